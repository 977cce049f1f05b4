"""Runs a planned save: writes a staging folder and publishes it, or leaves everything as it was."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from unified_ckpt.core.text import MAX_SHOWN, count_text, first_items, format_list, human_size
from unified_ckpt.engine.cluster.copies import replicate
from unified_ckpt.engine.cluster.local_shardings import CommitGroup
from unified_ckpt.engine.encode.exceptions import ExceptionsByPart, gather_exceptions, has_too_many
from unified_ckpt.engine.encode.stored_models import (
    masters_of_differing_models,
    model_digests,
    models_read_wrong,
    read_model_digests,
)
from unified_ckpt.engine.folder.if_exists import resolve_if_exists
from unified_ckpt.engine.folder.non_tensor_state import MergedState
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.save_plan import GlobalPlan
from unified_ckpt.engine.save.finalize import finalize
from unified_ckpt.engine.save.gather_state import gather_state
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.replica_check import describe_differences
from unified_ckpt.engine.save.snapshot import Snapshot
from unified_ckpt.engine.save.write import sync_files, write_digests, write_tensors
from unified_ckpt.engine.source.value_paths import value_name
from unified_ckpt.engine.values.caller_extra import write_rank_extra
from unified_ckpt.errors import LayoutError, StorageError
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.format.manifest_fields import DigestFile, RankExtraFile, ReplicaDifference
from unified_ckpt.format.names import MASTER
from unified_ckpt.runtime.comm.phases import PhaseReport, summarize_phases

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save.

    `nbytes`: tensor bytes of the folder at `path`.
    `seconds`: from the call to the commit on this rank.
    `blocked_seconds`: the part of `seconds` in which the caller waited; all of it for `save`.
    `existed`: true if nothing was saved because a checkpoint was kept, see `SaveOptions.if_exists`.
    `step` and `id` are then those of that checkpoint.
    `encoded_nbytes`: the part of `nbytes` in compressed tensors. `exceptions`: the elements of them
    that are stored separately, without loss. `plain_tensors`: the number of tensors that this save
    could not compress, though the option applies to them.
    `differing_values`: names of values beside tensors that differ between ranks, such as
    "extra.scheduler", on rank 0 only. Each is stored for the ranks that hold it.
    `parts`: tensor bytes by part, on rank 0 only. `phases`: the steps of the ranks that share the
    folder of rank 0, on rank 0 only.
    `omitted_parts`: parts of the state that `SaveOptions` leave out.
    `failed_attempts`: failed attempts of the `CheckpointManager` before this commit.
    `replica_differences`: tensors that ranks did not hold alike, at most 32; see
    `SaveOptions.check_replicas`.
    """

    path: str
    step: int | None
    id: str
    nbytes: int
    seconds: float
    existed: bool = False
    encoded_nbytes: int = 0
    exceptions: int = 0
    plain_tensors: int = 0
    differing_values: tuple[str, ...] = ()
    blocked_seconds: float = 0.0
    parts: Mapping[str, int] = field(default_factory=dict, hash=False)
    omitted_parts: tuple[str, ...] = ()
    phases: PhaseReport | None = field(default=None, hash=False, repr=False)
    failed_attempts: int = 0
    replica_differences: tuple[ReplicaDifference, ...] = field(default=(), hash=False)

    def __str__(self) -> str:
        step = "without a step" if self.step is None else f"of step {self.step}"
        verb = "was there already and stays" if self.existed else "committed"
        size = f"{human_size(self.nbytes)} in {self.seconds:.2f} s"
        if self.encoded_nbytes:
            size += f", {human_size(self.encoded_nbytes)} of it compressed"
        if self.omitted_parts:
            size += f", without {', '.join(self.omitted_parts)}"
        if self.replica_differences:
            size += f"; replicas of {count_text(len(self.replica_differences), 'tensor')} differ"
        return f"{self.path}\n  save {self.id} {step} {verb}\n  {size}"

    @property
    def background_seconds(self) -> float:
        """The part of `seconds` in which the caller could go on."""
        return max(self.seconds - self.blocked_seconds, 0.0)


def write_and_commit(planned: PlannedSave, snapshot: Snapshot | None) -> SaveReport:
    """Collective. Write the tensors, or their snapshot, to a staging folder and publish it."""
    call = planned.call
    with (
        planned.commit_group.sharing_errors_with_groups(),
        call.storage,
        _transaction(planned) as transaction,
    ):
        existing = transaction.begin(
            partial(_existing_checkpoint, planned),
            entries_before=planned.entries_before,
            save_id=planned.commit_group.save_id,
        )
        if existing is not None:
            seconds = time.monotonic() - call.started
            return SaveReport(
                call.path,
                existing["step"],
                existing["id"],
                0,
                seconds,
                existed=True,
                blocked_seconds=seconds,
            )
        with call.connections.transport.receiving(
            transaction.save_id, transaction.storage, transaction.folder
        ):
            phases, differing = _fill_and_publish(planned, transaction, snapshot)
    seconds, nbytes = time.monotonic() - call.started, planned.plan.nbytes
    omitted_parts = planned.request.omitted_parts.parts
    if phases is not None:
        slowest, write_seconds = phases.slowest("write")
        _LOG.info(
            "saved %s: %s in %.2f s, %s/s; rank %d wrote longest: %.2f s%s",
            call.path,
            human_size(nbytes),
            seconds,
            human_size(nbytes / max(seconds, 1e-9)),
            slowest,
            write_seconds,
            f"; without {', '.join(omitted_parts)}" if omitted_parts else "",
        )
    if planned.replica_differences and planned.commit_group.collective.rank == 0:
        _LOG.warning("%s: %s", call.path, describe_differences(planned.replica_differences))
    global_plan = planned.plan.global_plan
    return SaveReport(
        call.path,
        planned.request.step,
        transaction.save_id,
        nbytes,
        seconds,
        encoded_nbytes=planned.plan.encoded_nbytes,
        exceptions=planned.exceptions.total,
        plain_tensors=len(call.cache.agreement.plain),
        differing_values=differing,
        blocked_seconds=seconds,
        parts=dict(global_plan.tensors.nbytes) if global_plan is not None else {},
        omitted_parts=omitted_parts,
        phases=phases,
        replica_differences=tuple(planned.replica_differences),
    )


def _transaction(planned: PlannedSave) -> Transaction:
    target = planned.target()
    if not planned.commit_group.is_single and target.if_exists in ("keep", "keep_complete"):
        # It publishes once all node groups have agreed that no folder is kept.
        target = replace(target, if_exists="replace")
    fsync = planned.request.options.fsync
    return Transaction(planned.collective, planned.call.storage, target, fsync=fsync)


def _existing_checkpoint(planned: PlannedSave) -> Manifest | None:
    """On rank 0 of each node group: return the checkpoint that is kept if all folders have it."""
    target, storage = planned.target(), planned.call.storage
    if planned.commit_group.is_single:
        return resolve_if_exists(storage, target)
    keeping = target if target.if_exists == "keep_complete" else replace(target, if_exists="keep")
    existing = resolve_if_exists(storage, keeping)
    save_ids = planned.commit_group.all_gather(
        "existing-save", existing.save_id.encode() if existing else b""
    )
    if existing is not None and set(save_ids) == {existing.save_id.encode()}:
        return resolve_if_exists(storage, target)
    if existing is not None and target.if_exists == "error":
        raise StorageError(
            f"{planned.call.path}: got a folder of save {existing.save_id} that is not on every "
            'node, expected a free name; choose another one, or pass if_exists="replace"'
        )
    return None


def _fill_and_publish(
    planned: PlannedSave, transaction: Transaction, snapshot: Snapshot | None
) -> tuple[PhaseReport | None, tuple[str, ...]]:
    """Collective. Write all files of the folder and publish it.

    Returns on rank 0 the phases, and the names of values that differ between ranks.
    """
    call, collective, plan = planned.call, planned.collective, planned.plan
    fsync = planned.request.options.fsync
    with collective.step("check-visible"):
        transaction.check_visible()
        if plan.global_plan is not None:
            transaction.check_free_space(
                plan.global_plan.nbytes, index_nbytes=plan.global_plan.index_nbytes
            )
    with collective.step("write"), _comparing_replicas(planned):
        merged, digest_file, rank_extra, exceptions = _write_files(planned, transaction, snapshot)
        if planned.request.captured is not None:
            planned.request.captured.check_unchanged()  # the loop may still run
    with collective.step("sync"):
        if fsync:
            sync_files(planned, transaction.folder)
        call.storage.close()  # raises what a file system reports only then
    with collective.step("finalize"):
        phases_by_rank = collective.gather_phases()
        if merged is not None:
            finalize(
                planned,
                transaction,
                merged=merged,
                digest_file=digest_file,
                rank_extra=rank_extra,
                exceptions=exceptions,
            )
    if call.cache.copy_plan is not None:
        parts = call.cache.global_records.encodings
        replicate(planned.commit_group, transaction, call.cache.copy_plan, encoded_parts=parts)
    _publish(planned.commit_group, transaction)
    if not phases_by_rank or merged is None:
        return None, ()
    differing = tuple(map(value_name, merged.rank_entries.paths))
    _warn_differing(planned, differing)
    phases_by_rank[collective.ranks[0]] = collective.clock.phases()
    return summarize_phases(phases_by_rank), differing


def _warn_differing(planned: PlannedSave, names: tuple[str, ...]) -> None:
    """Log on rank 0 which values differ between ranks, unless the last save has logged them."""
    plan, is_first = planned.plan, planned.commit_group.collective.rank == 0
    if is_first and names and names != plan.differing_values:
        _LOG.warning(
            "%s: ranks hold different values of %s; each is stored for the ranks that hold it, and "
            "goes back to them in a job of the same layout",
            planned.call.path,
            first_items(names, MAX_SHOWN),
        )
    plan.differing_values = names


@contextmanager
def _comparing_replicas(planned: PlannedSave) -> Iterator[None]:
    """Collective. Compare replicas beside the block. LayoutError if a difference is an error.

    With a new plan, the ranks wait for the result before the block. Otherwise they read it after
    the block, when rank 0 has it: a save with a cached plan waits for no message more.
    """
    check, commit_group = planned.replica_check, planned.commit_group
    if check is None:
        yield
        return
    waits = not commit_group.collective.all_cached
    with commit_group.waiting_for_groups():
        check.send()
        if waits:
            planned.replica_differences.extend(check.finish())
    yield
    with commit_group.waiting_for_groups():
        if not waits:
            planned.replica_differences.extend(check.finish())
    planned.plan.comparisons += 1


def _publish(commit_group: CommitGroup, transaction: Transaction) -> None:
    """Collective over all node groups. Publish every folder once all are written, or none."""
    if commit_group.is_single:
        transaction.publish_and_clean_up()
        return
    collective = commit_group.collective
    collective.finish_step("written")
    transaction.publish_with_others(partial(collective.finish_step, "committed"))
    with collective.step("clean-up"):
        transaction.clean_up()


def _write_files(
    planned: PlannedSave, transaction: Transaction, snapshot: Snapshot | None
) -> tuple[MergedState | None, DigestFile | None, RankExtraFile | None, ExceptionsByPart]:
    """Collective. Write tensors, digests and rank extras.

    Returns, on rank 0, the state beside tensors of all ranks, and the records of both files. On
    rank 0 of all node groups, also the exceptions of all ranks.
    """
    call, collective, plan = planned.call, planned.collective, planned.plan
    file_writer = planned.file_writer(transaction)
    crcs_by_group = write_tensors(planned, file_writer, snapshot)
    digest_file = write_digests(
        collective,
        file_writer,
        plan.groups,
        crcs_by_group,
        plan.global_plan,
        encoded=planned.is_encoded,
    )
    if planned.is_encoded and plan.global_plan is not None:
        _check_models(planned, plan.global_plan)
    rank_extra = write_rank_extra(collective, file_writer, planned.rank_extra)
    merged = gather_state(planned)
    exceptions: ExceptionsByPart = {}
    if planned.is_encoded:
        shapes = planned.encoded_shapes()
        with planned.commit_group.waiting_for_groups():
            exceptions = gather_exceptions(
                planned.commit_group.collective, planned.exceptions, shapes
            )
        if has_too_many(exceptions, shapes):
            call.cache.plan = None  # the next save decides again what it encodes
    file_writer.flush()
    return merged, digest_file, rank_extra, exceptions


def _check_models(planned: PlannedSave, global_plan: GlobalPlan) -> None:
    """On rank 0: raise if encoded masters could be decoded beside other bits of the model.

    StorageError if the file system gave back other bits than ranks wrote. LayoutError if node
    groups store different ones of the same box.
    """
    cache, decls = planned.call.cache, global_plan.decls_by_group
    digest_by_key = read_model_digests(planned.collective, decls)
    if names := models_read_wrong(decls, digest_by_key):
        title = (
            f"{planned.call.path}: the file system gave back other bytes of these model tensors "
            'than ranks wrote, expected the same; save master weights with compression="none"'
        )
        raise StorageError(format_list(title, names))
    if MASTER not in cache.global_records.encodings:
        return
    gathered = planned.commit_group.gather_json(
        "stored-models", model_digests(decls, digest_by_key)
    )
    if names := masters_of_differing_models(gathered, planned.encoded_shapes()):
        cache.plan = None  # the next save compares replicas again
        title = (
            f"{planned.call.path}: nodes hold different bytes of the model of these master "
            'weights; mend the replicas, or pass compression="none"'
        )
        raise LayoutError(format_list(title, names))

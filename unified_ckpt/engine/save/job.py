"""Runs a planned save: writes a staging folder and publishes it, or leaves everything as it was."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unified_ckpt.engine.folder import backup, commit
from unified_ckpt.engine.save.extra_state import write_rank_extra
from unified_ckpt.engine.save.finalize import finalize, write_digests
from unified_ckpt.engine.save.node_local import CommitGroup, propagating_errors
from unified_ckpt.engine.save.node_replicas import replicate
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.snapshot import Snapshot
from unified_ckpt.engine.save.write import sync_parts, write_parts
from unified_ckpt.errors import CheckpointError, RankError, StorageError
from unified_ckpt.format.manifest import DigestFile, Manifest, RankExtraFile

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save.

    `nbytes` counts the tensor bytes of the folder at `path`. `seconds` is the time from call to
    commit on this rank. `existed` means that nothing was saved because a checkpoint was kept, see
    `SaveOptions.if_exists`; `step` and `id` are then those of that checkpoint.
    """

    path: str
    step: int | None
    id: str
    nbytes: int
    seconds: float
    existed: bool = False


def write_and_commit(planned: PlannedSave, snapshot: Snapshot | None) -> SaveReport:
    """Collective. Write the tensors, or their snapshot, to a staging folder and publish it."""
    with propagating_errors(planned.commit_group), planned.call.storage:
        return _write_and_commit(planned, snapshot)


def _write_and_commit(planned: PlannedSave, snapshot: Snapshot | None) -> SaveReport:
    call, transport = planned.call, planned.transport
    staging_dir, existing = _create_staging_dir(planned)
    if staging_dir is None:
        seconds = time.monotonic() - call.started
        return SaveReport(call.path, existing["step"], existing["id"], 0, seconds, existed=True)
    try:
        _fill_and_publish(planned, staging_dir, snapshot)
    except BaseException as error:
        _abort(planned, staging_dir, error)
        raise
    finally:
        if transport is not None:
            transport.end_save(staging_dir.save_id)
    seconds, nbytes = time.monotonic() - call.started, planned.plan.nbytes
    if planned.collective.rank == 0:
        gigabytes = nbytes / 1e9
        _LOG.info(
            "saved %s: %.3f GB in %.2f s, %.2f GB/s; %s",
            call.path,
            gigabytes,
            seconds,
            gigabytes / max(seconds, 1e-9),
            call.cache.slowest_rank,
        )
    return SaveReport(call.path, planned.request.step, staging_dir.save_id, nbytes, seconds)


def _create_staging_dir(planned: PlannedSave) -> tuple[commit.StagingDir | None, dict[str, Any]]:
    """Collective. Return the staging folder, visible to every rank; None if a checkpoint is kept.

    The second value has the "id" and "step" of the kept checkpoint.
    """
    collective, storage, name = planned.collective, planned.call.storage, planned.call.name
    transport, global_plan = planned.transport, planned.plan.global_plan
    staging_dir = None
    try:
        with collective.step("begin"):
            if collective.rank == 0:
                existing = _existing_checkpoint(planned)
                if existing is None:
                    staging_dir = commit.create(
                        storage,
                        name,
                        save_id=planned.commit_group.save_id if planned.commit_group else None,
                        existing_entries=planned.existing_entries,
                    )
                    outcome: dict[str, Any] = {
                        "folder": staging_dir.folder,
                        "id": staging_dir.save_id,
                    }
                else:
                    outcome = {"id": existing.save_id, "step": existing.step}
                collective.put("staging-dir", json.dumps({"name": name, **outcome}).encode())
        with collective.step("check-visible"):
            received: dict[str, Any] = json.loads(collective.get("staging-dir", sender=0))
            if staging_dir is None and "folder" in received:
                staging_dir = commit.StagingDir(
                    received["name"], received["folder"], received["id"]
                )
            if received["name"] != name:
                raise RankError(
                    f"rank {collective.rank}: got name {name!r}, expected {received['name']!r} "
                    "as on rank 0; save under one name on every rank"
                )
            if staging_dir is not None:
                commit.check_visible(storage, staging_dir)
                if transport is not None:
                    transport.accept_save(staging_dir.save_id, storage, staging_dir.folder)
                if global_plan is not None:
                    commit.check_free_space(
                        storage,
                        staging_dir,
                        global_plan.nbytes,
                        metadata_nbytes=global_plan.index_nbytes,
                    )
    except BaseException as error:
        _abort(planned, staging_dir, error)
        raise
    return staging_dir, received


def _existing_checkpoint(planned: PlannedSave) -> Manifest | None:
    """On rank 0 of each node group: return the checkpoint that is kept if all folders have it."""
    target, storage = planned.target(), planned.call.storage
    if planned.commit_group is None:
        return commit.resolve_if_exists(storage, target)
    keeping = target if target.if_exists == "keep_complete" else replace(target, if_exists="keep")
    existing = commit.resolve_if_exists(storage, keeping)
    save_ids = planned.commit_group.all_gather(
        "existing-save", existing.save_id.encode() if existing else b""
    )
    if existing is not None and set(save_ids) == {existing.save_id.encode()}:
        return commit.resolve_if_exists(storage, target)
    if existing is not None and target.if_exists == "error":
        raise StorageError(
            f"{planned.call.path}: got a folder of save {existing.save_id} that is not on every "
            'node, expected a free name; choose another one, or pass if_exists="replace"'
        )
    return None


def _fill_and_publish(
    planned: PlannedSave, staging_dir: commit.StagingDir, snapshot: Snapshot | None
) -> None:
    """Collective. Write all files of the folder and publish it."""
    call, collective, plan = planned.call, planned.collective, planned.plan
    fsync = planned.request.options.fsync
    with collective.step("write"):
        states, digest_file, rank_extra = _write_files(planned, staging_dir, snapshot)
    with collective.step("sync"):
        if fsync:
            sync_parts(planned, staging_dir.folder)
        seconds_by_rank = collective.collect(
            "seconds",
            f"{time.monotonic() - call.started:.3f}".encode(),
            dst=0,
            ranks=range(collective.world),
        )
        if seconds_by_rank:
            seconds, rank = max((float(text), rank) for rank, text in enumerate(seconds_by_rank))
            call.cache.slowest_rank = f"rank {rank} was slowest: {seconds:.2f} s"
    with collective.step("finalize"):
        if plan.global_plan is not None:
            finalize(
                planned,
                staging_dir,
                states=states,
                digest_file=digest_file,
                rank_extra=rank_extra,
            )
    if planned.commit_group is None:
        with collective.step("publish"):
            if plan.global_plan is not None:
                backup.clean_up(call.storage, _publish(planned, staging_dir), fsync=fsync)
    else:
        if call.cache.copy_plan is not None:
            replicate(
                planned.commit_group,
                collective,
                call.storage,
                staging_dir,
                call.cache.copy_plan,
                fsync=fsync,
            )
        _publish_all_groups(planned, planned.commit_group, staging_dir)


def _write_files(
    planned: PlannedSave, staging_dir: commit.StagingDir, snapshot: Snapshot | None
) -> tuple[list[bytes], DigestFile | None, RankExtraFile | None]:
    """Collective. Write tensors, digests and rank extras.

    Returns, on rank 0, the non-tensor states of all reporters and the records of both files.
    """
    collective, plan = planned.collective, planned.plan
    file_writer = planned.file_writer(staging_dir)
    crcs_by_group = write_parts(planned, file_writer, snapshot)
    digest_file = write_digests(
        collective, file_writer, plan.groups, crcs_by_group, plan.global_plan
    )
    rank_extra = write_rank_extra(collective, file_writer, planned.extra_state.rank_extra)
    local_state = planned.non_tensor_state
    if local_state is None:
        local_state = planned.encode_non_tensor_state()
    reporters: Sequence[int] = (collective.rank,) if plan.is_reporter else ()
    if plan.global_plan is not None:
        reporters = plan.global_plan.reporters
    states = collective.collect("non-tensor-state", local_state, dst=0, ranks=reporters)
    file_writer.flush()
    return states, digest_file, rank_extra


def _publish_all_groups(
    planned: PlannedSave, commit_group: CommitGroup, staging_dir: commit.StagingDir
) -> None:
    """Collective over all node groups. Publish every folder once all are written, or none."""
    storage, published = planned.call.storage, None
    try:
        commit_group.barrier("written")
        with planned.collective.step("publish"):
            if planned.plan.global_plan is not None:
                published = _publish(planned, staging_dir)
        commit_group.barrier("committed")
    except BaseException as error:
        if published is not None and isinstance(error, CheckpointError):
            backup.rollback(storage, published)
        raise
    with commit_group.step("clean-up"):
        if published is not None:
            backup.clean_up(storage, published, fsync=planned.request.options.fsync)


def _publish(planned: PlannedSave, staging_dir: commit.StagingDir) -> backup.Published:
    """On rank 0: rename the staging folder to the checkpoint's name."""
    target = planned.target()
    if planned.commit_group is not None and target.if_exists in ("keep", "keep_complete"):
        # All node groups have agreed that the existing folder is not complete on every node.
        target = replace(target, if_exists="replace")
    fsync = planned.request.options.fsync
    return commit.publish(planned.call.storage, staging_dir, target, fsync=fsync)


def _abort(
    planned: PlannedSave, staging_dir: commit.StagingDir | None, error: BaseException
) -> None:
    """Remove the staging folder of a failed save, on rank 0, once no rank writes to it.

    `staging_dir` is None where this rank has not learnt of one.
    """
    if planned.transport is not None and staging_dir is not None:
        planned.transport.disconnect()
        planned.transport.end_save(staging_dir.save_id)
    commit.abort_collectively(
        planned.collective, planned.call.storage, staging_dir, error, leader=0
    )

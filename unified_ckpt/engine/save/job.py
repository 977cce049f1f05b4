"""From a job to a checkpoint: begin a folder, write, make durable, publish; or leave everything as
it was.

A `PlannedSave` is a save that all ranks have come to, planned and checked. Its bytes come from the
tensors, or from a snapshot of them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, NodeGroup
from unified_ckpt.engine.folder import backup, commit
from unified_ckpt.engine.folder import extra_state as folder_extra_state
from unified_ckpt.engine.folder.manifest import write_manifest
from unified_ckpt.engine.plan.save_plan import SavePlan
from unified_ckpt.engine.save import extra_state, finalize
from unified_ckpt.engine.save.node_local import (
    CommitGroup,
    GlobalTotals,
    LocalShardings,
    propagating_errors,
)
from unified_ckpt.engine.save.node_replicas import CopyPlan, replicate
from unified_ckpt.engine.save.probe_topology import Topology
from unified_ckpt.engine.save.request import SaveRequest, StoredParts
from unified_ckpt.engine.save.snapshot import Snapshot, SnapshotMemory
from unified_ckpt.engine.save.write import sync_parts, write_parts
from unified_ckpt.errors import CheckpointError, RankError, StorageError
from unified_ckpt.format import codec, names
from unified_ckpt.format.manifest import DigestFile, Manifest, NodeGroupRecord, RankExtraFile
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.shared_files import AlignedFileWriter, FileWriter
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.exchange.windows import TileBuffers
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did. `nbytes`: tensor bytes of the folder at `path`; `seconds`: on this rank,
    from call to commit. `existed`: nothing was saved, for the checkpoint that was there stays, see
    `SaveOptions.if_exists`: `step` and `id` are of that one.
    """

    path: str
    step: int | None
    id: str
    nbytes: int
    seconds: float
    existed: bool = False


@dataclass(slots=True)
class SaveCache:
    """What one save leaves for the next of the same ranks. `slowest_rank`: in words, on rank 0."""

    tile_buffers: TileBuffers = field(default_factory=TileBuffers)
    load_tile_buffers: TileBuffers = field(
        default_factory=TileBuffers
    )  # apart: a load is of all ranks, a save may be of an island's
    snapshot_memory: SnapshotMemory = field(default_factory=SnapshotMemory)
    plan: SavePlan | None = None
    stored_parts: StoredParts = field(default_factory=StoredParts)  # of the plan
    topology: Topology | None = None
    local_shardings: LocalShardings | None = None  # of an island
    global_totals: GlobalTotals = field(default_factory=dict)  # of all islands
    copy_plan: CopyPlan | None = None  # of an island
    slowest_rank: str = ""

    def reset_for(self, topology: Topology | None) -> None:
        """Before a save: what was kept for other ranks means nothing to these, who also count their
        exchanges from another start.
        """
        if self.topology is not topology:
            self.tile_buffers.close()
            self.tile_buffers, self.topology, self.plan, self.local_shardings, self.copy_plan = (
                TileBuffers(),
                topology,
                None,
                None,
                None,
            )

    def close(self) -> None:
        self.tile_buffers.close()
        self.load_tile_buffers.close()
        self.snapshot_memory.close()


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that all ranks have come to, planned and checked: what is left is to write it.
    `parts_by_group`: by group of the plan. `non_tensor_state`: what is not tensors, for all ranks
    that hold the same ones; None where it is still to be put in words. `commit_group`: where the
    ranks of this save are one island of several. `transport`: where they are on several machines.
    """

    collective: Collective
    storage: LocalStorage
    name: str
    request: SaveRequest
    plan: SavePlan
    tensors_by_group: Sequence[Sequence[LocalTensor]]
    extra_state: extra_state.ExtraState
    started: float
    non_tensor_state: bytes | None = None
    commit_group: CommitGroup | None = None
    transport: PeerTransport | None = None
    existing_entries: frozenset[str] = (
        frozenset()
    )  # of `commit.check_way`, on the rank that publishes

    def target(self) -> commit.PublishTarget:
        """The name of the checkpoint, and what may be in its way, on the rank that publishes it."""
        return commit.PublishTarget(
            self.name, self.request.options.if_exists, self.part_names(), self.request.is_step_path
        )

    def part_names(self) -> set[str]:
        """The parts of this save, on the rank that knows them all."""
        return {
            part.removesuffix(SHARD_SUFFIX)
            for part in (
                *self.request.stored_part_names(),
                *(self.plan.global_plan.records if self.plan.global_plan else ()),
            )
        }

    def heartbeat(self) -> None:
        """A sign of life, also for those of other islands, who wait at the gate."""
        self.collective.heartbeat()
        if self.commit_group is not None:
            self.commit_group.collective.heartbeat()

    def file_writer(self, staging_dir: commit.StagingDir) -> FileWriter:
        """The files under construction, as this rank writes to them."""
        if self.transport is None:
            return FileWriter(self.storage, staging_dir.folder)
        return AlignedFileWriter(
            self.storage, staging_dir.folder, transport=self.transport, save_id=staging_dir.save_id
        )


def write_and_commit(
    planned: PlannedSave, cache: SaveCache, snapshot: Snapshot | None
) -> SaveReport:
    """Collective. From a job to a checkpoint; the bytes come from the snapshot where there is one."""
    with propagating_errors(planned.commit_group):
        return _write_and_commit(planned, cache, snapshot)


def _write_and_commit(
    planned: PlannedSave, cache: SaveCache, snapshot: Snapshot | None
) -> SaveReport:
    collective, storage, request = planned.collective, planned.storage, planned.request
    with storage:
        staging_dir, existing = _create_staging_dir(planned)
        if staging_dir is None:
            return SaveReport(
                storage.path(planned.name),
                existing["step"],
                existing["id"],
                0,
                time.monotonic() - planned.started,
                existed=True,
            )
        try:
            _fill_and_publish(planned, staging_dir, cache, snapshot)
        except BaseException as error:
            _abort(planned, staging_dir, error)
            raise
        finally:
            if planned.transport is not None:
                planned.transport.end_save(staging_dir.save_id)
    seconds, nbytes = time.monotonic() - planned.started, planned.plan.nbytes
    if collective.rank == 0:
        path, gigabytes = storage.path(planned.name), nbytes / 1e9
        _LOG.info(
            "saved %s: %.3f GB in %.2f s, %.2f GB/s; %s",
            path,
            gigabytes,
            seconds,
            gigabytes / max(seconds, 1e-9),
            cache.slowest_rank,
        )
    return SaveReport(
        storage.path(planned.name), request.step, staging_dir.save_id, nbytes, seconds
    )


def _create_staging_dir(planned: PlannedSave) -> tuple[commit.StagingDir | None, dict[str, Any]]:
    """Collective. The folder under construction, seen by every rank; or what is said of the
    checkpoint that stays.
    """
    collective, storage, name = planned.collective, planned.storage, planned.name
    announcement: dict[str, Any] = {"name": name}
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
                    announcement |= {"folder": staging_dir.folder, "id": staging_dir.save_id}
                else:
                    announcement |= {"id": existing.save_id, "step": existing.step}
                collective.put("begun", json.dumps(announcement).encode())
        with collective.step("see"):
            received = json.loads(collective.get("begun", sender=0))
            if "folder" in received:
                staging_dir = staging_dir or commit.StagingDir(
                    received["name"], received["folder"], received["id"]
                )
            if received["name"] != name:
                raise RankError(
                    f"rank {collective.rank} saves with name {name!r}, rank 0 with {received['name']!r}; needed the same"
                )
            if staging_dir is not None:
                commit.check_visible(storage, staging_dir)
                if planned.transport is not None:
                    planned.transport.accept_save(staging_dir.save_id, storage, staging_dir.folder)
                if planned.plan.global_plan is not None:
                    commit.check_free_space(
                        storage,
                        staging_dir,
                        planned.plan.global_plan.nbytes,
                        metadata_nbytes=planned.plan.global_plan.index_nbytes,
                    )
    except BaseException as error:
        _abort(planned, staging_dir, error)
        raise
    return staging_dir, received


def _existing_checkpoint(planned: PlannedSave) -> Manifest | None:
    """Rank 0 of each island: the checkpoint that is there and stays. One that is not on every
    island is none.
    """
    target = planned.target()
    if planned.commit_group is None:
        return commit.resolve_if_exists(planned.storage, target)
    keeping = target if target.if_exists == "keep_complete" else replace(target, if_exists="keep")
    existing = commit.resolve_if_exists(planned.storage, keeping)
    save_ids = planned.commit_group.all_gather(
        "there", existing.save_id.encode() if existing else b""
    )
    if existing is not None and set(save_ids) == {existing.save_id.encode()}:
        return commit.resolve_if_exists(planned.storage, target)
    if existing is not None and target.if_exists == "error":
        problem = f"{planned.storage.path(planned.name)}: holds a folder of save {existing.save_id}, which is not on every machine"
        raise StorageError(f'{problem}; needed a free name, or if_exists="replace"')
    return None


def _fill_and_publish(
    planned: PlannedSave,
    staging_dir: commit.StagingDir,
    cache: SaveCache,
    snapshot: Snapshot | None,
) -> None:
    """Collective. Fills the folder and publishes it."""
    collective, storage, plan, request, folder = (
        planned.collective,
        planned.storage,
        planned.plan,
        planned.request,
        staging_dir.folder,
    )
    file_writer = planned.file_writer(staging_dir)
    with collective.step("write"):
        block_crcs = write_parts(
            collective,
            plan,
            planned.tensors_by_group,
            file_writer,
            cache.tile_buffers,
            snapshot,
            transport=planned.transport,
            fsync=request.options.fsync,
            on_progress=planned.heartbeat,
        )
        digest_file = finalize.write_digests(
            collective, file_writer, plan.groups, block_crcs, plan.global_plan
        )
        rank_extra = extra_state.write_rank_extra(
            collective, file_writer, planned.extra_state.rank_extra
        )
        local_state = (
            planned.non_tensor_state
            if planned.non_tensor_state is not None
            else collect_non_tensor_state(planned)
        )
        reporters = (
            plan.global_plan.reporters
            if plan.global_plan is not None
            else (collective.rank,)
            if plan.is_reporter
            else ()
        )
        states = collective.collect("told", local_state, dst=0, ranks=reporters)
        file_writer.flush()
    with collective.step("sync"):
        if request.options.fsync:
            sync_parts(
                collective,
                storage,
                folder,
                plan,
                shared=planned.transport is not None,
                on_progress=planned.heartbeat,
            )
        seconds_by_rank = collective.collect(
            "seconds",
            f"{time.monotonic() - planned.started:.3f}".encode(),
            dst=0,
            ranks=range(collective.world),
        )
        if seconds_by_rank:
            slowest_rank = max(
                range(collective.world), key=lambda rank: float(seconds_by_rank[rank])
            )
            cache.slowest_rank = (
                f"rank {slowest_rank} was slowest: {float(seconds_by_rank[slowest_rank]):.2f} s"
            )
    with collective.step("complete"):
        if plan.global_plan is not None:
            _finalize(
                planned,
                staging_dir,
                cache,
                states,
                digest_file,
                rank_extra,
                started=planned.started,
            )
    if planned.commit_group is None:
        with collective.step("publish"):
            if plan.global_plan is not None:
                published = _publish(planned, staging_dir)
                backup.clean_up(storage, published, fsync=request.options.fsync)
    else:
        if cache.copy_plan is not None:
            replicate(
                planned.commit_group,
                collective,
                storage,
                staging_dir,
                cache.copy_plan,
                fsync=request.options.fsync,
            )
        _publish_all_groups(planned, planned.commit_group, staging_dir)


def _publish_all_groups(
    planned: PlannedSave, commit_group: CommitGroup, staging_dir: commit.StagingDir
) -> None:
    """Collective over all islands: each gives its folder the name once all have theirs complete,
    and takes it back where one cannot.
    """
    published: backup.Published | None = None
    try:
        commit_group.barrier("written")
        with planned.collective.step("publish"):
            if planned.plan.global_plan is not None:
                published = _publish(planned, staging_dir)
        commit_group.barrier("committed")
    except BaseException as error:
        if published is not None and isinstance(error, CheckpointError):
            backup.rollback(planned.storage, published)
        raise
    with commit_group.step("cleaned"):
        if published is not None:
            backup.clean_up(planned.storage, published, fsync=planned.request.options.fsync)


def collect_non_tensor_state(planned: PlannedSave) -> bytes:
    """What this rank says of what is not tensors, for all ranks that hold the same ones."""
    request = planned.request
    return (
        extra_state.encode_non_tensor_state(
            request.state, with_optimizer=request.stores(OPTIMIZER)
        )
        if planned.plan.is_reporter
        else b"."
    )


def _node_group_record(node_group: NodeGroup | None, cache: SaveCache) -> NodeGroupRecord | None:
    if node_group is None:
        return None
    node_copies = list(cache.copy_plan.files_by_group) if cache.copy_plan is not None else []
    ranks, world_size, global_totals = (
        list(node_group.ranks),
        node_group.world_size,
        dict(cache.global_totals),
    )
    return NodeGroupRecord(
        number=node_group.number,
        count=node_group.count,
        ranks=ranks,
        world_size=world_size,
        totals=global_totals,
        replicas=node_copies,
    )


def _finalize(
    planned: PlannedSave,
    staging_dir: commit.StagingDir,
    cache: SaveCache,
    states: Sequence[bytes],
    digest_file: DigestFile | None,
    rank_extra: RankExtraFile | None,
    *,
    started: float,
) -> None:
    """Rank 0 only: what the caller attaches, the small files, the manifest: all that a checkpoint
    needs but its name.
    """
    storage, request, plan, folder, fsync = (
        planned.storage,
        planned.request,
        planned.plan,
        staging_dir.folder,
        planned.request.options.fsync,
    )
    if plan.global_plan is None:
        raise AssertionError("rank 0 has a book")
    if planned.commit_group is not None:  # each island's folder says what is said of the whole
        states = [
            state
            for group_states in planned.commit_group.all_gather(
                "told", codec.pack(list(states), "told")
            )
            for state in codec.unpack(group_states, "told")
        ]
    non_tensor_state = extra_state.merge_non_tensor_state(states)
    extra = folder_extra_state.write_extra(
        storage, folder, planned.extra_state.extra, non_tensor_state
    )
    tokens_before = {
        name: storage.version_token(f"{folder}/{name}") for name in storage.entries(folder)
    }
    if request.attach is not None:
        request.attach(storage.path(folder))
        protected_names = {
            *tokens_before,
            names.MANIFEST,
            *(names.index_name(part) for part in plan.global_plan.records),
        }
        for name in sorted(protected_names):
            token = storage.version_token(f"{folder}/{name}")
            if token != tokens_before.get(name):
                raise StorageError(
                    f"{storage.path(folder)}: `attach` changed {name}, which is the checkpoint's own; needed another name"
                )
    indexes = finalize.write_indexes(storage, folder, plan.global_plan)
    if fsync:
        for name in sorted(
            set(storage.entries(folder))
            - {file for records in plan.global_plan.records.values() for file in records}
            - {commit.MARKER}
        ):
            storage.sync_tree(f"{folder}/{name}")
    storage.remove_file(f"{folder}/{commit.MARKER}")
    manifest = finalize.make_manifest(
        save_id=staging_dir.save_id,
        step=request.step,
        seconds=time.monotonic() - started,
        metrics=request.metrics,
        world_size=planned.collective.world,
        mesh=request.mesh,
        part_names=sorted({*request.stored_part_names(), *plan.global_plan.records}),
        omitted=request.stored_parts.omitted,
        global_plan=plan.global_plan,
        indexes=indexes,
        non_tensor_state=non_tensor_state,
        extra=extra,
        objects=planned.extra_state.objects,
        digest_file=digest_file,
        rank_extra=rank_extra,
        node_group=_node_group_record(
            planned.commit_group.node_group if planned.commit_group else None, cache
        ),
    )
    write_manifest(storage, folder, manifest, fsync=fsync)


def _publish(planned: PlannedSave, staging_dir: commit.StagingDir) -> backup.Published:
    """Rank 0 only: the rename."""
    target = planned.target()
    if planned.commit_group is not None and target.if_exists in ("keep", "keep_complete"):
        target = replace(
            target, if_exists="replace"
        )  # what is there is not whole on every island, as they have agreed
    return commit.publish(planned.storage, staging_dir, target, fsync=planned.request.options.fsync)


def _abort(
    planned: PlannedSave, staging_dir: commit.StagingDir | None, error: BaseException
) -> None:
    """Rank 0 clears away what a failed save left, once nobody writes to it. None where this rank
    knows of nothing yet.
    """
    if planned.transport is not None and staging_dir is not None:
        planned.transport.disconnect()
        planned.transport.end_save(staging_dir.save_id)
    commit.abort_collectively(planned.collective, planned.storage, staging_dir, error, leader=0)

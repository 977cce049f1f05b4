"""The values of one save: the call, the planned save, its staging, the cache for the next one."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.core.nodes.replica_placement import CopyPlan
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.cluster.local_shardings import CommitGroup, GlobalRecords, LocalShardings
from unified_ckpt.engine.encode.agree import EncodingAgreement
from unified_ckpt.engine.encode.exceptions import Exceptions
from unified_ckpt.engine.folder.if_exists import PublishTarget
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.holders import Membership
from unified_ckpt.engine.plan.save_plan import SavePlan
from unified_ckpt.engine.save.replica_check import ReplicaCheck
from unified_ckpt.engine.save.request import OmittedParts, SaveRequest
from unified_ckpt.engine.save.snapshot import Snapshot, SnapshotMemory
from unified_ckpt.engine.values.encode_values import EncodedValues
from unified_ckpt.format.manifest_fields import ReplicaDifference
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.file_writer import FileWriter
from unified_ckpt.runtime.exchange.probe_topology import Connections
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


class Staging:
    """Whether the tensors of a save may change again: all are copied or written, or it failed.

    `blocked_seconds`: what the save takes from the training thread, apart from a wait for the end
    at the call.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.ended_at: float | None = None  # of the monotonic clock
        self.blocked_seconds = 0.0

    def end(self) -> None:
        """Let the caller go on."""
        if not self._ended.is_set():
            self.ended_at = time.monotonic()
            self._ended.set()

    def add_blocked(self, started: float) -> None:
        """Add the time since `started`, a monotonic time, to `blocked_seconds`."""
        self.blocked_seconds += time.monotonic() - started

    def is_set(self) -> bool:
        """Return whether it has ended."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for the end. An interrupt is raised then: the tensors must not change before."""
        interrupt: BaseException | None = None
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException as error:
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt


@dataclass(slots=True)
class SaveCache:
    """Plans and buffers that one save leaves for the next save of the same ranks.

    `omitted_parts` and `agreement` belong to `plan`. Only node groups have `local_shardings`,
    `global_records`, `global_groups` and a `copy_plan`.
    """

    tile_buffers: TileBuffers = field(default_factory=TileBuffers)
    # Separate, because a load involves all ranks and a save may involve one node group.
    load_tile_buffers: TileBuffers = field(default_factory=TileBuffers)
    snapshot_memory: SnapshotMemory = field(default_factory=SnapshotMemory)
    replica_memory: SnapshotMemory = field(default_factory=SnapshotMemory)
    plan: SavePlan | None = None
    omitted_parts: OmittedParts = field(default_factory=OmittedParts)
    agreement: EncodingAgreement = field(default_factory=EncodingAgreement)
    connections: Connections | None = None
    local_shardings: LocalShardings | None = None
    global_records: GlobalRecords = field(default_factory=GlobalRecords)
    global_groups: Sequence[Membership] = ()
    copy_plan: CopyPlan | None = None

    def reset_for(self, connections: Connections) -> None:
        """Drop plan and tile buffers of other connections, whose exchange ids start again."""
        if self.connections != connections:
            self.tile_buffers.close()
            self.tile_buffers, self.connections = TileBuffers(connections.transport), connections
            self.plan = self.local_shardings = self.copy_plan = None

    def close(self) -> None:
        """Release the buffers."""
        self.tile_buffers.close()
        self.load_tile_buffers.close()
        self.snapshot_memory.close()
        self.replica_memory.close()


@dataclass(frozen=True, slots=True)
class SaveCall:
    """One call of save on this rank: what to store, under which name, with which ranks.

    `comm`: all ranks. `request` is the error that this rank met while building one; then every
    rank raises it. `connections`: those of the ranks that share the folder.
    """

    comm: Comm
    storage: LocalStorage
    name: str
    request: SaveRequest | Exception
    cache: SaveCache
    timeout_seconds: float
    connections: Connections
    started: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> str:
        """The absolute path of the checkpoint."""
        return self.storage.path(self.name)


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that all ranks have entered, planned and checked; only the writing is left.

    `collective` is that of the ranks that share the folder. `tensors_by_group` has one entry per
    group of the plan. `rank_extra` is encoded, and `state` is what this rank holds
    beside tensors.
    `entries_before` are those of the replaced folder, on the rank that publishes. `exceptions` are
    collected while tensors are written. `replica_check` is None if nothing is compared.
    `replica_differences`: its result, once there is one. `staging` is that of a background save.
    """

    call: SaveCall
    commit_group: CommitGroup
    collective: Collective
    request: SaveRequest
    plan: SavePlan
    tensors_by_group: Sequence[Sequence[LocalTensor]]
    rank_extra: bytes
    state: Sequence[EncodedValues]
    entries_before: frozenset[str] = frozenset()
    exceptions: Exceptions = field(default_factory=Exceptions)
    replica_check: ReplicaCheck | None = None
    replica_differences: list[ReplicaDifference] = field(default_factory=list)
    staging: Staging = field(default_factory=Staging)

    @property
    def is_encoded(self) -> bool:
        """Whether some tensors of this save may be stored encoded; equal on all ranks."""
        return self.request.options.compression != "none"

    def encoded_shapes(self) -> Mapping[Key, Sequence[int]]:
        """Return the shapes of all encoded tensors of the save, on rank 0 of all ranks."""
        if not self.commit_group.is_single:
            return self.call.cache.global_records.encoded_shapes
        global_plan = self.plan.global_plan
        encoded = global_plan.encoded if global_plan is not None else ()
        return {decl.key: decl.spec.shape for decl in encoded}

    def target(self) -> PublishTarget:
        """Return the name to publish under, for the rank that publishes."""
        options, is_managed_path = self.request.options, self.request.is_managed_path
        return PublishTarget(self.call.name, options.if_exists, self.part_names(), is_managed_path)

    def part_names(self) -> set[str]:
        """Return the parts of this save; complete only on the rank that has the global plan."""
        global_plan = self.plan.global_plan
        planned = global_plan.tensors.records if global_plan is not None else ()
        names = (*self.request.stored_part_names(), *planned)
        return {part.removesuffix(SHARD_SUFFIX) for part in names}

    def heartbeat(self) -> None:
        """Signal progress to the ranks of this folder and of other node groups."""
        self.collective.heartbeat()
        self.commit_group.collective.heartbeat()

    def finish(self) -> None:
        """Mark the collectives of a background save as finished on this rank."""
        for collective in {self.collective, self.commit_group.collective}:
            collective.finish()

    def file_writer(self, transaction: Transaction) -> FileWriter:
        """Return the positional writer of this rank for files in the staging folder."""
        return FileWriter(
            transaction.storage,
            transaction.folder,
            self.call.connections.transport,
            save_id=transaction.save_id,
        )


def without_tensors(planned: PlannedSave, snapshot: Snapshot) -> tuple[PlannedSave, Snapshot]:
    """Drop references to the caller's tensors, all of which are copied.

    The caller may then free them, or move them elsewhere, while the copies are written.
    """
    request = replace(
        planned.request, state=FlatState(requested_parts=planned.request.state.requested_parts)
    )
    if planned.replica_check is not None:
        planned.replica_check.digests.release_tensors()
    tensors_by_group = [
        [tensor.without_memory() for tensor in tensors] for tensors in planned.tensors_by_group
    ]
    released = replace(
        planned,
        call=replace(planned.call, request=request),
        request=request,
        tensors_by_group=tensors_by_group,
    )
    return released, replace(snapshot, tensors_by_group=tensors_by_group)

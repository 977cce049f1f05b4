"""The values of one save: the call, the planned save, and the cache for the next one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.plan.save_plan import SavePlan
from unified_ckpt.engine.save.extra_state import ExtraState, encode_non_tensor_state
from unified_ckpt.engine.save.node_local import CommitGroup, GlobalTotals, LocalShardings
from unified_ckpt.engine.save.node_replicas import CopyPlan
from unified_ckpt.engine.save.probe_topology import Topology
from unified_ckpt.engine.save.request import SaveRequest, StoredParts
from unified_ckpt.engine.save.snapshot import SnapshotMemory
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.file_writer import AlignedFileWriter, FileWriter
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


@dataclass(slots=True)
class SaveCache:
    """Plans and buffers that one save leaves for the next save of the same ranks.

    `stored_parts` belongs to `plan`. Only node groups have `local_shardings` and a `copy_plan`.
    `slowest_rank` is a phrase for the log of rank 0.
    """

    tile_buffers: TileBuffers = field(default_factory=TileBuffers)
    # Separate, because a load involves all ranks and a save may involve one node group.
    load_tile_buffers: TileBuffers = field(default_factory=TileBuffers)
    snapshot_memory: SnapshotMemory = field(default_factory=SnapshotMemory)
    plan: SavePlan | None = None
    stored_parts: StoredParts = field(default_factory=StoredParts)
    topology: Topology | None = None
    local_shardings: LocalShardings | None = None
    global_totals: GlobalTotals = field(default_factory=dict)
    copy_plan: CopyPlan | None = None
    slowest_rank: str = ""

    def reset_for(self, topology: Topology | None) -> None:
        """Drop plan and tile buffers of another topology, whose ranks number exchanges anew."""
        if self.topology is not topology:
            self.tile_buffers.close()
            self.tile_buffers, self.topology = TileBuffers(), topology
            self.plan = self.local_shardings = self.copy_plan = None

    def close(self) -> None:
        """Release the buffers."""
        self.tile_buffers.close()
        self.load_tile_buffers.close()
        self.snapshot_memory.close()


@dataclass(frozen=True, slots=True)
class SaveCall:
    """One call of save on this rank: what to store, under which name, with which ranks.

    `request` is the error that this rank met while building one; then every rank raises it.
    `topology` is None where all ranks are on one node.
    """

    comm: Comm
    storage: LocalStorage
    name: str
    request: SaveRequest | Exception
    cache: SaveCache
    timeout_seconds: float
    topology: Topology | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> str:
        """The absolute path of the checkpoint."""
        return self.storage.path(self.name)


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that all ranks have entered, planned and checked; only the writing is left.

    `collective` is that of the ranks that share the folder. `tensors_by_group` has one entry per
    group of the plan.
    `non_tensor_state` is None until it is encoded. `commit_group` is set for node groups.
    `existing_entries` are those of the replaced folder, on the rank that publishes.
    """

    call: SaveCall
    collective: Collective
    request: SaveRequest
    plan: SavePlan
    tensors_by_group: Sequence[Sequence[LocalTensor]]
    extra_state: ExtraState
    non_tensor_state: bytes | None = None
    commit_group: CommitGroup | None = None
    existing_entries: frozenset[str] = frozenset()

    @property
    def transport(self) -> PeerTransport | None:
        """The transport to ranks of other nodes that share the folder, if there are any."""
        return self.call.topology.transport if self.call.topology is not None else None

    def target(self) -> commit.PublishTarget:
        """Return the name to publish under, for the rank that publishes."""
        options, is_step_path = self.request.options, self.request.is_step_path
        return commit.PublishTarget(
            self.call.name, options.if_exists, self.part_names(), is_step_path
        )

    def part_names(self) -> set[str]:
        """Return the parts of this save; complete only on the rank that has the global plan."""
        global_plan = self.plan.global_plan
        planned = global_plan.records if global_plan is not None else ()
        names = (*self.request.stored_part_names(), *planned)
        return {part.removesuffix(SHARD_SUFFIX) for part in names}

    def heartbeat(self) -> None:
        """Signal progress to the ranks of this folder and of other node groups."""
        self.collective.heartbeat()
        if self.commit_group is not None:
            self.commit_group.collective.heartbeat()

    def file_writer(self, staging_dir: commit.StagingDir) -> FileWriter:
        """Return the positional writer of this rank for the staged files."""
        storage, transport = self.call.storage, self.transport
        if transport is None:
            return FileWriter(storage, staging_dir.folder)
        return AlignedFileWriter(
            storage, staging_dir.folder, transport=transport, save_id=staging_dir.save_id
        )

    def encode_non_tensor_state(self) -> bytes:
        """Return this rank's non-tensor state; a placeholder where another rank reports it."""
        if not self.plan.is_reporter:
            return b"."
        return encode_non_tensor_state(
            self.request.state, with_optimizer=self.request.stores(OPTIMIZER)
        )

"""A save into one folder per node group; see `SaveScope` for what a save asks of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unified_ckpt.core.nodes.node_groups import NodeGroup
from unified_ckpt.core.nodes.replica_placement import CopyPlan
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.cluster.commit_group import join_commit_group
from unified_ckpt.engine.cluster.copies import check_copy_count, plan_copies, replicate
from unified_ckpt.engine.cluster.local_shardings import (
    GlobalRecords,
    LocalShardings,
    check_global,
    local_shardings,
    localize,
    shard_kinds,
)
from unified_ckpt.engine.encode.agree import (
    agree_on_encodings,
    masters_of_differing_models,
    with_encodings,
)
from unified_ckpt.engine.encode.outliers import broadcast_files
from unified_ckpt.engine.folder.if_exists import PublishTarget, resolve_if_exists
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.replica_sets import plan_replicas
from unified_ckpt.engine.plan.save_plan import make_plan
from unified_ckpt.engine.save.layout.layout_plan import LayoutKey, LayoutPlan
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.scope import OneFolder, SaveDescription, SaveScope
from unified_ckpt.errors import StorageError
from unified_ckpt.format.manifest import Manifest, NodeGroupRecord
from unified_ckpt.format.manifest_fields import RankMeshRecord
from unified_ckpt.format.names import MASTER
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.traffic import NetworkReport, merge_traffic, report_traffic
from unified_ckpt.runtime.exchange.connections import Connections
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


@dataclass(frozen=True, slots=True)
class NodeGroupLayout:
    """What one layout decides about the folder of a node group.

    `is_encoded`: whether some tensors of the save may be. `shardings`: within the group.
    `group_rank`: the index of this rank in the group. `records`: of the whole save. `copies`: what
    the group copies from others.
    """

    is_encoded: bool
    encodings: Mapping[Key, str]
    shardings: LocalShardings
    node_group: NodeGroup
    group_rank: int
    records: GlobalRecords
    copies: CopyPlan

    def localize(self, tensors: Sequence[LocalTensor]) -> list[LocalTensor]:
        """Return the tensors as the folder stores them: whole, or as shards."""
        rank = self.node_group.ranks[self.group_rank]
        encoded = with_encodings(tensors, self.encodings, rank=rank)
        return localize(encoded, self.shardings, self.node_group, group_rank=self.group_rank)


class NodeGroups:
    """A save into one folder per node group. Implements `SaveScope`."""

    def __init__(self, collective: Collective, connections: Connections) -> None:
        """Collective. Join the ranks of all folders, then those of the folder of this rank."""
        self.all_ranks = collective
        with collective.propagating_errors():
            self._group = join_commit_group(collective, connections.topology.node_group)
            self._comm, self.save_id = connections.comm, self._group.save_id
            self.traffic = self._group.traffic
            self.folder_ranks = self._comm.begin_collective(
                "save of a node group",
                timeout_seconds=collective.timeout_seconds,
                parent=collective,
            )
        if collective.in_progress:
            self.folder_ranks.move_to_background()

    def plan(
        self, request: SaveRequest, key: LayoutKey, *, smallest_part_nbytes: int | None
    ) -> LayoutPlan:
        """As `SaveScope.plan`. The claims of all ranks are checked before those of the group."""
        del smallest_part_nbytes  # all ranks share a bucket
        all_ranks, comm, node_group = self.all_ranks, self._comm, self._group.node_group
        tensors, options = request.stored_tensors(), request.options
        check_copy_count(self._group, options.node_copies)
        shardings = local_shardings(self._group, comm, tensors)
        with all_ranks.step("agree-on-encodings"):
            kinds = shard_kinds(tensors, shardings, node_group, comm.rank)
            agreement = agree_on_encodings(all_ranks, tensors, options.compression, kinds=kinds)
        records, global_groups, boxes = check_global(
            all_ranks,
            with_encodings(tensors, agreement.encodings),
            layout=request.layout,
            matched_rules=request.matched_rules,
        )
        localizer = NodeGroupLayout(
            options.compression != "none",
            agreement.encodings,
            shardings,
            node_group,
            comm.rank,
            records,
            copies={},
        )
        with self.folder_ranks.step("plan"):
            writes = make_plan(
                self.folder_ranks,
                localizer.localize(tensors),
                layout=None,  # it is checked for all ranks
                matched_rules=set(),
                max_file_bytes=options.max_file_bytes,
            )
        copies = plan_copies(self._group, writes.global_plan, copies=options.node_copies)
        return LayoutPlan(
            key,
            request.omitted_parts,
            agreement,
            writes,
            replace(localizer, copies=copies),
            plan_replicas(global_groups, tensors, request.state, rank=all_ranks.rank, boxes=boxes),
            records.encoded_shapes,
            compares_models=MASTER in records.encodings,
        )

    def refuse_existing(self, _: Storage, __: PublishTarget, /) -> None:
        """As `SaveScope.refuse_existing`. No group knows alone whether its checkpoint is kept."""

    def kept_checkpoint(self, storage: Storage, target: PublishTarget) -> Manifest | None:
        """As `SaveScope.kept_checkpoint`: a checkpoint is kept if all folders have it."""
        keeping = (
            target if target.if_exists == "keep_complete" else replace(target, if_exists="keep")
        )
        existing = resolve_if_exists(storage, keeping)
        save_ids = self.gather("existing-save", None if existing is None else existing.save_id)
        if existing is not None and set(save_ids) == {existing.save_id}:
            return resolve_if_exists(storage, target)
        if existing is not None and target.if_exists == "error":
            raise StorageError(
                f"{storage.path(target.name)}: got a folder of save {existing.save_id} that is not "
                f"on every node, expected a free name; choose another one, or {target.advice}"
            )
        return None

    def publish_target(self, target: PublishTarget) -> PublishTarget:
        """As `SaveScope.publish_target`: what is not on every node is replaced."""
        if target.if_exists in ("keep", "keep_complete"):
            return replace(target, if_exists="replace")
        return target

    def gather(self, key: str, value: Any, /) -> list[Any]:
        """As `SaveScope.gather`."""
        return self._group.gather(key, value)

    def describe(self, description: SaveDescription, layout: LayoutPlan, /) -> SaveDescription:
        """As `SaveScope.describe`: the folder of each node group describes the whole save."""
        own, node_group = _own_layout(layout), self._group.node_group
        outliers = description.outliers
        if own.is_encoded:
            with self.waiting():
                outliers = broadcast_files(self.all_ranks, outliers)
        # All folders record one mesh, although a rank knows only those of its own tensors.
        mesh = description.rank_mesh
        first = self.gather("rank-mesh", None if mesh is None else mesh.model_dump(mode="json"))[0]
        return SaveDescription(
            encodings=own.records.encodings,
            outliers=outliers,
            rank_mesh=None if first is None else RankMeshRecord.model_validate(first),
            shardings=None,
            node_group=NodeGroupRecord(
                number=node_group.number,
                count=node_group.count,
                ranks=list(node_group.ranks),
                world_size=node_group.world_size,
                totals=dict(own.records.totals),
                replicas=list(own.copies),
            ),
        )

    def publish(self, transaction: Transaction, layout: LayoutPlan, /) -> NetworkReport | None:
        """As `SaveScope.publish`: copies are made first; no folder is published alone."""
        own = _own_layout(layout)
        replicate(self._group, transaction, own.copies, encoded_parts=own.records.encodings)
        network = None
        if own.copies:  # of one group, hence of all
            with self.all_ranks.step("gather-traffic"):
                network = self._gather_traffic()
        self.all_ranks.finish_step("written")
        transaction.publish_with_others(partial(self.all_ranks.finish_step, "committed"))
        with self.all_ranks.step("clean-up"):
            transaction.clean_up()
        return network

    def _gather_traffic(self) -> NetworkReport | None:
        """Return the traffic of all nodes on rank 0, through the first rank of each folder."""
        ranks, group = self.folder_ranks, self._group.node_group
        summaries = ranks.collect_json(
            "traffic", self.traffic.summary(), dst=0, ranks=range(ranks.world)
        )
        if ranks.rank == 0:
            self.all_ranks.put_json(f"traffic/{group.number}", merge_traffic(summaries))
        if self.all_ranks.rank != 0:
            return None
        merged = [self.all_ranks.get_json(f"traffic/{number}") for number in range(group.count)]
        return report_traffic(merge_traffic(merged))

    def differing_models(self, layout: LayoutPlan, /) -> list[str]:
        """As `SaveScope.differing_models`."""
        if not layout.compares_models:
            return []
        digest_by_name: dict[str, int] = {}
        global_plan = layout.writes.global_plan
        for index in range(len(global_plan.stored_by_group) if global_plan is not None else 0):
            digest_by_name |= self.folder_ranks.get_json(f"models/{index}")
        gathered = self.gather("stored-models", digest_by_name)
        return masters_of_differing_models(gathered, layout.encoded_shapes)

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """As `SaveScope.sharing_errors`."""
        try:
            with self._group.sharing_errors():
                yield
        except BaseException:
            # The first rank of the folder waits for this before it removes the folder. This rank
            # may fail before it has a transaction.
            self.folder_ranks.mark_stopped()
            raise

    def waiting(self) -> AbstractContextManager[None]:
        """As `SaveScope.waiting`."""
        return self._group.waiting()


def _own_layout(layout: LayoutPlan) -> NodeGroupLayout:
    assert isinstance(layout.localizer, NodeGroupLayout)  # a plan is of one topology
    return layout.localizer


def join_scope(collective: Collective, connections: Connections) -> SaveScope:
    """Collective. Return the folders of a save, once every rank has joined it."""
    if connections.topology.node_group.count == 1:
        return OneFolder(collective)
    return NodeGroups(collective, connections)

"""The folders that one save writes: one that all ranks share, or one for each node group.

The protocol is all of the surface between a save and nodes with folders of their own. It answers
three main questions: what the folder of this rank stores (`plan`), what is there already
(`kept_checkpoint`), and how the finished folder is published (`publish`). Where all ranks share one
folder, the answers cost nothing. `join_scope` of `engine.cluster.save_scope` chooses.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from unified_ckpt.engine.encode.agree import agree_on_encodings, with_encodings
from unified_ckpt.engine.folder.if_exists import PublishTarget, resolve_if_exists
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.replica_sets import plan_replicas
from unified_ckpt.engine.plan.save_plan import make_plan
from unified_ckpt.engine.save.layout.layout_plan import LayoutKey, LayoutPlan
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.format.manifest import Manifest, NodeGroupRecord
from unified_ckpt.format.manifest_fields import EncodingRecord, RankMeshRecord, ShardingRecords
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.traffic import NetworkReport, Traffic
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


@dataclass(frozen=True, slots=True)
class SaveDescription:
    """What the first rank of a folder knows of the whole save; the manifest records it.

    `outliers`: the bodies of the files of outliers, by part.
    """

    encodings: Mapping[str, Mapping[str, EncodingRecord]]
    outliers: Mapping[str, bytes]
    rank_mesh: RankMeshRecord | None
    shardings: ShardingRecords | None
    node_group: NodeGroupRecord | None = None


class SaveScope(Protocol):
    """The folders of one save, once every rank has joined it.

    `all_ranks`: their operation. `folder_ranks`: that of the ranks that share the folder of this
    rank. `save_id`: of the checkpoint, on the first rank of each folder. `traffic`: of this rank.
    """

    all_ranks: Collective
    folder_ranks: Collective
    save_id: str
    traffic: Traffic

    def plan(
        self, request: SaveRequest, key: LayoutKey, *, smallest_part_nbytes: int | None
    ) -> LayoutPlan:
        """Collective. Plan what this rank writes. LayoutError or MismatchError on every rank if the
        claims of the ranks do not add up to whole tensors. `smallest_part_nbytes`: as in `Storage`.
        """

    def refuse_existing(self, storage: Storage, target: PublishTarget, /) -> None:
        """On the first rank of a folder, before any work: raise if a checkpoint is in the way, as
        far as this rank knows alone.
        """

    def kept_checkpoint(self, storage: Storage, target: PublishTarget) -> Manifest | None:
        """On the first rank of a folder: return the checkpoint that is kept, if there is one.

        StorageError if a checkpoint is in the way.
        """

    def publish_target(self, target: PublishTarget) -> PublishTarget:
        """Return the target after `kept_checkpoint` has found nothing to keep."""

    def gather(self, key: str, value: Any, /) -> list[Any]:
        """Return the values of the first ranks of all folders, on these ranks. Inside a step."""

    def describe(self, description: SaveDescription, layout: LayoutPlan, /) -> SaveDescription:
        """On the first rank of a folder: complete what its manifest records of the whole save."""

    def publish(self, transaction: Transaction, layout: LayoutPlan, /) -> NetworkReport | None:
        """Collective. Publish the finished folders: all or none, unless a rank dies meanwhile.

        Return the traffic of all nodes so far on rank 0 if folders were copied between them.
        """

    def differing_models(self, layout: LayoutPlan, /) -> list[str]:
        """On the first rank of a folder: return the encoded masters whose model differs between
        folders that store the same box.
        """

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Raise an error of the block on the ranks of all folders."""

    def waiting(self) -> AbstractContextManager[None]:
        """Wait in the block for ranks of other folders, inside a step of this folder."""


class OneFolder:
    """A save into one folder that all ranks share."""

    def __init__(self, collective: Collective) -> None:
        self.all_ranks = self.folder_ranks = collective
        self.save_id, self.traffic = secrets.token_hex(8), Traffic()

    def plan(
        self, request: SaveRequest, key: LayoutKey, *, smallest_part_nbytes: int | None
    ) -> LayoutPlan:
        """As `SaveScope.plan`."""
        tensors, options = request.stored_tensors(), request.options
        with self.all_ranks.step("plan"):
            agreement = agree_on_encodings(self.all_ranks, tensors, options.compression)
            localizer = _WholeTensors(agreement.encodings, self.all_ranks.rank)
            writes = make_plan(
                self.all_ranks,
                localizer.localize(tensors),
                layout=request.layout,
                matched_rules=request.matched_rules,
                max_file_bytes=options.max_file_bytes,
                smallest_part_nbytes=smallest_part_nbytes,
            )
        encoded = writes.global_plan.encoded if writes.global_plan is not None else ()
        return LayoutPlan(
            key,
            request.omitted_parts,
            agreement,
            writes,
            localizer,
            plan_replicas(
                writes.memberships,
                tensors,
                request.state,
                rank=self.all_ranks.rank,
                boxes=writes.boxes,
            ),
            {decl.key: decl.spec.shape for decl in encoded},
        )

    def refuse_existing(self, storage: Storage, target: PublishTarget, /) -> None:
        """As `SaveScope.refuse_existing`."""
        resolve_if_exists(storage, target)

    def kept_checkpoint(self, storage: Storage, target: PublishTarget) -> Manifest | None:
        """As `SaveScope.kept_checkpoint`."""
        return resolve_if_exists(storage, target)

    def publish_target(self, target: PublishTarget) -> PublishTarget:
        """As `SaveScope.publish_target`."""
        return target

    def gather(self, _: str, value: Any, /) -> list[Any]:
        """As `SaveScope.gather`."""
        return [value]

    def describe(self, description: SaveDescription, _: LayoutPlan, /) -> SaveDescription:
        """As `SaveScope.describe`."""
        return description

    def publish(self, transaction: Transaction, _: LayoutPlan, /) -> NetworkReport | None:
        """As `SaveScope.publish`."""
        transaction.publish_and_clean_up()
        return None

    def differing_models(self, _: LayoutPlan, /) -> list[str]:
        """As `SaveScope.differing_models`."""
        return []

    def sharing_errors(self) -> AbstractContextManager[None]:
        """As `SaveScope.sharing_errors`."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """As `SaveScope.waiting`."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class _WholeTensors:
    """The layout of one folder that all ranks share: every tensor is stored whole."""

    encodings: Mapping[tuple[str, str], str]
    rank: int

    def localize(self, tensors: Sequence[LocalTensor]) -> list[LocalTensor]:
        return with_encodings(tensors, self.encodings, rank=self.rank)

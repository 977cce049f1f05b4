"""A save that all ranks have entered, planned and checked; only the writing is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.engine.folder.if_exists import PublishTarget
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.save_plan import SavePlan
from unified_ckpt.engine.save.call import SaveCall
from unified_ckpt.engine.save.layout.layout_plan import LayoutPlan
from unified_ckpt.engine.save.replica_check import ReplicaCheck
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.scope import SaveScope
from unified_ckpt.engine.save.tensor_hold import TensorHold
from unified_ckpt.engine.values.encode_values import EncodedValues
from unified_ckpt.format.manifest_fields import ReplicaDifference
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_writer import FileWriter, FolderWriter, UploadWriter
from unified_ckpt.runtime.objects.staged import StagedFiles
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that all ranks have entered, planned and checked; only the writing is left.

    `tensors_by_group` has one entry per group of the plan. `rank_extra` is encoded, and `state` is
    what this rank holds beside tensors. `entries_before` are those of the replaced folder, on the
    rank that publishes. `replica_check` is None if nothing is compared; `replica_differences`: its
    result, once there is one. `hold`: while the caller's tensors may not change.
    """

    call: SaveCall
    scope: SaveScope
    request: SaveRequest
    layout: LayoutPlan
    tensors_by_group: Sequence[Sequence[LocalTensor]]
    rank_extra: bytes
    state: Sequence[EncodedValues]
    entries_before: frozenset[str]
    replica_check: ReplicaCheck | None
    replica_differences: list[ReplicaDifference] = field(default_factory=list)
    hold: TensorHold = field(default_factory=TensorHold)

    @property
    def folder_ranks(self) -> Collective:
        """The operation of the ranks that share the folder."""
        return self.scope.folder_ranks

    @property
    def writes(self) -> SavePlan:
        """What this rank writes where."""
        return self.layout.writes

    @property
    def is_encoded(self) -> bool:
        """Whether some tensors of this save may be stored encoded; equal on all ranks."""
        return self.request.options.compression != "none"

    def target(self) -> PublishTarget:
        """Return the name to publish under, for the rank that publishes."""
        request = self.request
        return PublishTarget(
            self.call.name,
            request.options.if_exists,
            self.part_names(),
            is_managed_path=request.is_managed_path,
            shares_folder=request.shares_folder,
        )

    def part_names(self) -> set[str]:
        """Return the parts of this save; complete only on the rank that has the global plan."""
        global_plan = self.writes.global_plan
        planned = global_plan.tensors.records if global_plan is not None else ()
        names = (*self.request.stored_part_names(), *planned)
        return {part.removesuffix(SHARD_SUFFIX) for part in names}

    def heartbeat(self) -> None:
        """Signal progress to the ranks of this folder and of others."""
        self.scope.folder_ranks.heartbeat()
        self.scope.all_ranks.heartbeat()

    def file_writer(self, transaction: Transaction, *, in_background: bool) -> FileWriter:
        """Collective. Return the positional writer of this rank for files in the staging folder.

        Beside training, nobody waits for the disk.
        """
        storage, transport = transaction.storage, self.call.connections.transport
        if not isinstance(storage, ObjectStorage):
            return FolderWriter(
                storage,
                transaction.folder,
                transport,
                save_id=transaction.save_id,
                writeback_early=self.request.options.fsync and not in_background,
            )
        staged = storage.staged(transaction.folder)
        self._share_uploads(staged)
        return UploadWriter(staged, self.folder_ranks, transport)

    def _share_uploads(self, staged: StagedFiles) -> None:
        """Begin the uploads of all tensor files on rank 0. Others join those that they write."""
        collective, global_plan, groups = (
            self.folder_ranks,
            self.writes.global_plan,
            self.writes.groups,
        )
        for group in groups:
            assert group.part_nbytes is not None  # the same in all groups
            sizes = {file.name: file.nbytes for file in group.files}
            staged.expect(sizes, part_nbytes=group.part_nbytes)
        if global_plan is not None:
            files = [file for records in global_plan.tensors.records.values() for file in records]
            for file, upload_id in staged.begin(*files).items():
                collective.put(f"upload/{file}", upload_id.encode())
            return
        for file in sorted(
            {file for group in groups for file in group.written_files(collective.rank)}
        ):
            staged.join({file: collective.get(f"upload/{file}").decode()})

"""Merges the folders that several nodes wrote of one save into one checkpoint on a shared path.

The target is a commit of its own. Each file of it is written by the ranks of one node: the node
whose disk holds most of it. Bytes on other nodes arrive over TCP. Every block is compared with its
digest when it is read, and what is written is digested again.

How data could be lost, and what prevents it:
- A piece is missing or damaged: it is read from another node that has it. If no node has it,
  nothing is committed.
- A byte is written twice or never: the ranks' shares are a pure function that every rank computes
  for all ranks (`plan_merge`), and the leader counts the digests of every block before the
  manifest.
- A node writes to a different folder at the same path: a node that does not see the leader's save
  id in it writes nothing.
- A file is incomplete when the manifest is written: each rank syncs its writes before it reports,
  and the leader checks all sizes.
- A crash or a full disk: one rename, or a commit record in a bucket, publishes the target at the
  end; until then the old one stays.
- Non-tensor state disappears with a folder: extra state and optimizer metadata are in every folder.
  If the `rank_extra` of any rank is lost or damaged, the target has none, and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_ranks
from unified_ckpt.engine.cluster.discover import open_cluster_source, open_folders
from unified_ckpt.engine.cluster.source import ClusterSource
from unified_ckpt.engine.folder.backup import engine_files
from unified_ckpt.engine.folder.copy import CopyReport, ExtraFiles, FolderCopier
from unified_ckpt.engine.folder.finalize import finalize_checkpoint
from unified_ckpt.engine.folder.if_exists import PublishTarget, resolve_copy_if_exists
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.save_plan import StagedTensors
from unified_ckpt.engine.rewrite.metadata import (
    no_rank_extra_note,
    write_rank_extra,
    write_state,
)
from unified_ckpt.engine.rewrite.tensors import (
    OnProgress,
    Rewrite,
    WrittenFiles,
    plan_files,
    tensor_sizes,
    write_tensors,
)
from unified_ckpt.errors import IntegrityError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.comm.call import Call
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.protocol import Storage


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How to merge.

    `if_exists` applies to another save at the target; the same save is left unchanged.
    `on_progress` is called with the bytes of each write; an exception ends the merge.
    """

    max_file_bytes: int | None
    if_exists: str
    timeout_seconds: float
    on_progress: OnProgress = lambda _: None


def merge_paths(
    comm: Comm,
    paths: Sequence[str],
    storage: Storage,
    name: str,
    options: MergeOptions,
    *,
    topology: Topology,
) -> CopyReport:
    """Merge the folders at `paths`, of each node, with `merge`. Collective. A node may have none.

    The folders are locked against removal meanwhile.
    """
    operation = f"merge of {', '.join(paths)}"
    with ExitStack() as resources:
        folders = open_folders(paths, resources, lock=topology.is_node_leader)
        source = open_cluster_source(
            comm,
            operation,
            folders,
            topology,
            resources,
            timeout_seconds=options.timeout_seconds,
        )
        if source is None:
            raise NotFoundError(
                f"{operation}: got no checkpoint with a manifest, expected the folders of one save"
            )
        return merge(comm, source, storage, name, options, topology=topology)


def merge(
    comm: Comm,
    source: ClusterSource,
    storage: Storage,
    name: str,
    options: MergeOptions,
    *,
    topology: Topology,
) -> CopyReport:
    """Write the save to `name` under the storage's root. Collective; a few MiB of memory per rank.

    The result has the same save id, step and state, and only whole tensors. Nodes that do not
    see the root write nothing. IncompleteError or IntegrityError if
    no intact copy of a block is left, StorageError if the target cannot be written: the same error
    on all ranks. After any error, `name` is as it was and no temporary folder is left.
    """
    call = Call(f"merge to {storage.path(name)}", {"name": name})
    collective = comm.begin_collective(call, timeout_seconds=options.timeout_seconds)
    nbytes = 0

    def on_write(count: int) -> None:
        nonlocal nbytes
        nbytes += count
        collective.heartbeat()
        options.on_progress(count)

    with storage, collective.propagating_errors():
        leader, nbytes_by_node = _locate_tensors(collective, source, topology)
        # only managers merge, so the name is a step's
        target = PublishTarget(name, options.if_exists, source.parts, is_managed_path=True)
        with Transaction(collective, storage, target, leader=leader) as transaction:
            existing = transaction.begin(
                partial(_existing_save, source, storage, target), copied_save_id=source.save_id
            )
            if existing is not None:
                save_id = existing["id"]
                return CopyReport(save_id, 0, is_other_save=save_id != source.save_id)
            rewrite = Rewrite(transaction, source, topology, tensor_sizes(source), on_write)
            rewrite = plan_files(rewrite, nbytes_by_node, max_file_bytes=options.max_file_bytes)
            with collective.step("write"):
                written = write_tensors(rewrite)
            with collective.step("finalize"):
                if written is not None:
                    _finalize(rewrite, source, written)
            transaction.publish_and_clean_up()
    return CopyReport(source.save_id, nbytes, tuple(source.verification.damage))


def _locate_tensors(
    collective: Collective, source: ClusterSource, topology: Topology
) -> tuple[int, dict[Key, dict[int, int]]]:
    """Return the leader's rank, and on the leader the bytes of each tensor per node. Collective.

    The leader is the first rank of the node that has the first folder.
    """
    keys, node_leaders = sorted(tensor_sizes(source)), topology.node_leaders
    group_numbers: list[int] = []
    local_nbytes: list[tuple[int, int]] = []
    with collective.step("locate-tensors"):
        if topology.is_node_leader:
            group_numbers = [
                folder.manifest.node_group.number
                if folder.manifest and folder.manifest.node_group
                else 0
                for folder in source.local_folders
            ]
            local_nbytes = [
                (key_index, nbytes)
                for key_index, key in enumerate(keys)
                if (nbytes := source.local_nbytes(*key))
            ]
        lowest_group = min(group_numbers, default=None)
        groups = collective.collect_json("lowest-group", lowest_group, dst=0, ranks=node_leaders)
        candidates = [
            (group, rank)
            for group, rank in zip(groups, node_leaders, strict=False)
            if group is not None
        ]
        leader: int = collective.broadcast_json("leader", min(candidates, default=(0, 0))[1])
        nbytes_of_nodes = collective.collect_json(
            "local-nbytes", local_nbytes, dst=leader, ranks=node_leaders
        )
    nbytes_by_node: dict[Key, dict[int, int]] = {}
    for node, entries in enumerate(nbytes_of_nodes):
        for key_index, nbytes in entries:
            nbytes_by_node.setdefault(keys[key_index], {})[node] = nbytes
    return leader, nbytes_by_node


def _existing_save(
    source: ClusterSource, storage: Storage, target: PublishTarget
) -> Manifest | None:
    """On the leader: the checkpoint at the target that is kept, possibly this very save.

    IntegrityError if a folder lacks digests to verify its bytes with.
    """
    for manifest in source.manifests:
        if manifest.digests is None or not manifest.digests.is_supported:
            raise IntegrityError(
                f"save {manifest.save_id}: a folder has no digests of a known algorithm, expected "
                "one per block"
            )
    return resolve_copy_if_exists(storage, target, save_id=source.save_id)


def _finalize(rewrite: Rewrite, source: ClusterSource, written: WrittenFiles) -> None:
    """On the leader: write everything beside tensors, the manifest last."""
    manifests, notes, tensors = source.manifests, source.verification.damage, written.tensors
    first_manifest = manifests[0]
    node_group = first_manifest.node_group
    world_size = node_group.world_size if node_group is not None else first_manifest.world_size
    rank_extra = None
    if any(manifest.rank_extra is not None for manifest in manifests):
        absent = _absent_ranks(manifests, world_size=world_size)
        if absent:
            reason = f"no node here has the folder of rank(s) {format_ranks(absent)}"
            notes.append(no_rank_extra_note(world_size, reason))
        else:
            rank_extra = write_rank_extra(rewrite, world_size=world_size, notes=notes)
    has_optimizer = first_manifest.optimizer is not None
    state = write_state(rewrite, written, has_optimizer=has_optimizer, rank_extra=rank_extra)
    nbytes = {**dict.fromkeys(_empty_parts(manifests), 0), **tensors.nbytes}
    tensors = replace(tensors, nbytes=nbytes)
    fields = {**dict(first_manifest), "world_size": world_size, "node_group": None}
    attach = partial(_copy_attached, rewrite, source, tensors)
    finalize_checkpoint(rewrite.transaction, tensors, state, fields, attach=attach)


def _absent_ranks(manifests: Sequence[Manifest], *, world_size: int) -> set[int]:
    """Return the ranks of the save that wrote none of these folders."""
    present = {
        rank
        for manifest in manifests
        for rank in (
            manifest.node_group.ranks if manifest.node_group else range(manifest.world_size)
        )
    }
    return set(range(world_size)) - present


def _empty_parts(manifests: Sequence[Manifest]) -> set[str]:
    """Parts that were saved without any tensor, except parts that were deleted from all folders."""
    candidates = {
        part
        for manifest in manifests
        for part, record in manifest.parts.items()
        if not record.files
    }
    return {
        part
        for part in candidates
        if not any(
            manifest.node_group is not None and part in manifest.node_group.totals
            for manifest in manifests
        )
    }


def _copy_attached(rewrite: Rewrite, source: ClusterSource, tensors: StagedTensors, _: str) -> None:
    """Copy the files that `attach` added; it added the same ones to every folder."""
    excluded = {names.DIGESTS, names.EXTRA, names.RANK_EXTRA, names.RANK_VALUES}
    excluded.update(*map(engine_files, source.manifests))
    excluded |= {
        file for part, files in tensors.records.items() for file in (*files, names.index_name(part))
    }
    transaction, folder = rewrite.transaction, source.local_folders[0]
    extra = ExtraFiles(folder.storage, excluded)
    transaction.expect_files(extra.files)
    copier = FolderCopier(folder, transaction.storage, transaction.folder, rewrite.on_progress)
    copier.copy_extra_files(extra)

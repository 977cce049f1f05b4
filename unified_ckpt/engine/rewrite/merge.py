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
- A node writes to a different folder at the same path: a node that does not see the leader's marker
  file writes nothing.
- A file is incomplete when the manifest is written: each rank syncs its writes before it reports,
  and the leader checks all sizes.
- A crash or a full disk: one rename publishes the target at the end; until then the old one stays.
- Non-tensor state disappears with a folder: extra state and optimizer metadata are in every folder.
  If the `rank_extra` of any rank is lost or damaged, the target has none, and the report says so.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import clean_up
from unified_ckpt.engine.folder.manifest import write_manifest
from unified_ckpt.engine.nodes.discover import open_cluster_source, open_folders
from unified_ckpt.engine.nodes.source import ClusterSource
from unified_ckpt.engine.rewrite.metadata import write_merged_metadata
from unified_ckpt.engine.rewrite.tensors import (
    OnProgress,
    Output,
    Rewrite,
    WrittenFiles,
    check_free_space,
    check_sizes,
    nodes_that_see,
    plan_files,
    tensor_sizes,
    write_tensors,
)
from unified_ckpt.errors import IntegrityError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.storage import LocalStorage


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How to merge.

    `if_exists` applies to another save at the target; the same save is left unchanged.
    `on_progress` is called with the bytes of each write; an exception ends the merge.
    """

    max_file_bytes: int
    if_exists: str
    fsync: bool
    timeout_seconds: float
    on_progress: OnProgress = lambda _: None


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge wrote.

    `nbytes` is what this rank wrote. It is 0 on every rank if a checkpoint exists at the target and
    is kept; `save_id` is then the id of that checkpoint, and `is_other_save` says that it is
    another save. `notes` lists damage that was bypassed and state that was left out.
    """

    save_id: str
    nbytes: int
    notes: tuple[str, ...]
    is_other_save: bool = False


def merge_paths(
    comm: Comm,
    paths: Sequence[str],
    storage: LocalStorage,
    name: str,
    options: MergeOptions,
    *,
    nodes: Sequence[int],
) -> MergeReport:
    """Merge the folders at `paths`, of each node, with `merge`. Collective. A node may have none.

    The folders are locked against removal meanwhile.
    """
    operation = f"merge of {', '.join(paths)}"
    with ExitStack() as resources:
        folders = open_folders(paths, resources, lock=comm.rank in first_ranks(nodes))
        source = open_cluster_source(
            comm,
            operation,
            folders,
            nodes,
            resources,
            timeout_seconds=options.timeout_seconds,
        )
        if not isinstance(source, ClusterSource):
            raise NotFoundError(
                f"{operation}: got no checkpoint with a manifest, expected the folders of one save"
            )
        return merge(comm, source, storage, name, options, nodes=nodes)


def merge(
    comm: Comm,
    source: ClusterSource,
    storage: LocalStorage,
    name: str,
    options: MergeOptions,
    *,
    nodes: Sequence[int],
) -> MergeReport:
    """Write the save to `name` under the storage's root. Collective; a few MiB of memory per rank.

    The result has the same save id, step and state, and only whole tensors. `nodes` gives the node
    of each rank; nodes that do not see the root write nothing. IncompleteError or IntegrityError if
    no intact copy of a block is left, StorageError if the target cannot be written: the same error
    on all ranks. After any error, `name` is as it was and no temporary folder is left.
    """
    collective = comm.begin_collective(
        f"merge to {storage.path(name)}", timeout_seconds=options.timeout_seconds
    )
    with storage, collective.propagating_errors():
        leader, nbytes_by_node = _locate_tensors(collective, source, nodes)
        # only managers merge, so the name is a step's
        commit_target = commit.PublishTarget(
            name, options.if_exists, source.parts, is_step_path=True
        )
        staging, existing = commit.create_collectively(
            collective,
            storage,
            commit_target,
            partial(_existing_save, source, storage, commit_target),
            leader=leader,
        )
        if staging is None:
            return MergeReport(
                existing["id"], 0, (), is_other_save=existing["id"] != source.save_id
            )
        try:
            writer_nodes = nodes_that_see(collective, storage, staging, nodes, leader=leader)
            sizes = tensor_sizes(source)
            file_plan = plan_files(
                collective,
                sizes,
                nbytes_by_node,
                writer_nodes=writer_nodes,
                max_file_bytes=options.max_file_bytes,
                leader=leader,
            )
            rewrite = Rewrite(
                collective, source, storage, staging, leader, tuple(nodes), file_plan, sizes
            )
            nbytes = _write_and_publish(rewrite, source, commit_target, options)
        except BaseException as error:
            commit.abort_collectively(collective, storage, staging, error, leader=leader)
            raise
    return MergeReport(source.save_id, nbytes, tuple(source.storage.verification_log.damage))


def _locate_tensors(
    collective: Collective, source: ClusterSource, nodes: Sequence[int]
) -> tuple[int, dict[Key, dict[int, int]]]:
    """Return the leader's rank, and on the leader the bytes of each tensor per node. Collective.

    The leader is the first rank of the node that has the first folder.
    """
    keys, node_leaders = sorted(tensor_sizes(source)), first_ranks(nodes)
    with collective.step("locate-tensors"):
        if collective.rank in node_leaders:
            group_numbers = [
                folder.manifest.node_group.number
                if folder.manifest and folder.manifest.node_group
                else 0
                for folder in source.local_folders
            ]
            collective.put(
                f"lowest-group/{collective.rank}", str(min(group_numbers, default=-1)).encode()
            )
            local_nbytes = [
                (key_index, nbytes)
                for key_index, key in enumerate(keys)
                if (nbytes := source.local_nbytes(*key))
            ]
            collective.put(
                f"local-nbytes/{collective.rank}",
                zlib.compress(json.dumps(local_nbytes).encode(), 1),
            )
        if collective.rank == 0:
            lowest_group = {
                rank: int(collective.get(f"lowest-group/{rank}")) for rank in node_leaders
            }
            collective.put(
                "leader",
                str(
                    min((number, rank) for rank, number in lowest_group.items() if number >= 0)[1]
                ).encode(),
            )
    leader = int(collective.get("leader"))
    if collective.rank != leader:
        return leader, {}
    nbytes_by_node: dict[Key, dict[int, int]] = {}
    for rank in node_leaders:
        for key_index, nbytes in json.loads(
            zlib.decompress(collective.get(f"local-nbytes/{rank}"))
        ):
            nbytes_by_node.setdefault(keys[key_index], {})[nodes[rank]] = nbytes
    return leader, nbytes_by_node


def _existing_save(
    source: ClusterSource, storage: LocalStorage, commit_target: commit.PublishTarget
) -> Manifest | None:
    """On the leader: the checkpoint at the target that is kept, possibly this very save."""
    _check_has_digests(source)
    return commit.resolve_copy_if_exists(storage, commit_target, save_id=source.save_id)


def _check_has_digests(source: ClusterSource) -> None:
    """IntegrityError if a folder lacks digests to verify its bytes with."""
    for manifest in source.manifests:
        if manifest.digests is None or not manifest.digests.is_supported:
            raise IntegrityError(
                f"save {manifest.save_id}: a folder has no digests of a known algorithm, expected "
                "one per block"
            )


def _write_and_publish(
    rewrite: Rewrite,
    source: ClusterSource,
    commit_target: commit.PublishTarget,
    options: MergeOptions,
) -> int:
    """Write and publish the folder; return the number of bytes that this rank wrote. Collective."""
    collective, storage, staging = rewrite.collective, rewrite.storage, rewrite.staging

    def on_write(nbytes: int) -> None:
        collective.heartbeat()
        options.on_progress(nbytes)

    output = Output(storage, staging.folder, fsync=options.fsync, on_progress=on_write)
    with collective.step("check-free-space"):
        if collective.rank == rewrite.leader:
            check_free_space(rewrite)
    with collective.step("write"):
        written = write_tensors(rewrite, output)
    with collective.step("finalize"):
        if written is not None:
            _finalize(source, output, written)
    with collective.step("publish"):
        if collective.rank == rewrite.leader:
            published = commit.publish(storage, staging, commit_target, fsync=options.fsync)
            clean_up(storage, published, fsync=options.fsync)
    return output.nbytes


def _finalize(source: ClusterSource, output: Output, written: WrittenFiles) -> None:
    """On the leader: write everything beside tensors, check sizes, and write the manifest last."""
    storage, folder = output.storage, output.folder
    manifest = write_merged_metadata(source, output, written)
    check_sizes(storage, folder, written.file_records)
    storage.remove_file(f"{folder}/{names.MARKER}")
    write_manifest(storage, folder, manifest, fsync=output.fsync)

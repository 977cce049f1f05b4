"""The folders that several machines wrote of one save, merged into one checkpoint in a place that
they share, as a commit of its own.

Each file of the target is written by the ranks of one machine, the one on whose disk most of it
lies; what lies elsewhere comes over TCP. Every block is compared with its digest as it is read, and
what is written is digested anew.

How data could be lost or be wrong:
- a piece is missing or damaged: it is read from another machine that has it; where none has,
  nothing is committed;
- a byte is written twice or never: shares are a pure function that every rank computes for all
  ranks (`core/plan_merge.py`), and the lead counts the digests of every block before the manifest
  is written;
- a machine writes to a folder of its own that only looks the same: who does not see the lead's
  probe file writes nothing;
- a file is not whole when the manifest says so: each rank syncs what it wrote, then tells; the
  lead looks at all sizes;
- a crash or a full disk: the target has its name only after all of that, by one rename; what was
  there stays until then;
- something that is said beside tensors goes missing with a folder: extra state and words of
  optimizers are in every folder; where the
  `rank_extra` of any rank is lost or damaged, the target has none of any rank, and `Merged.notes`
  says so.
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
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.storage import LocalStorage


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How to merge. `if_exists`: for another save of the target's name; the same save is left as it
    is.
    """

    max_file_bytes: int
    if_exists: str
    fsync: bool
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class MergeReport:
    """`nbytes`: written by this rank; 0 everywhere where the name holds a checkpoint already, which
    stays: `save_id` is then that one's.
    `notes`: damage that was read around, and what was left out, in sentences. `is_other_save`: what
    stays is another save.
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
    on_progress: OnProgress,
) -> MergeReport:
    """Collective. `merge` of the folders `paths` of each machine; a machine may have none. Nobody
    who asks removes them meanwhile.
    """
    operation = f"merge of {', '.join(paths)}"
    with ExitStack() as resources:
        folders = open_folders(paths, resources, lock=comm.rank in first_ranks(nodes))
        source = open_cluster_source(
            comm,
            operation,
            paths,
            folders,
            nodes,
            resources,
            timeout_seconds=options.timeout_seconds,
        )
        if not isinstance(source, ClusterSource):
            raise NotFoundError(
                f"{operation}: holds no checkpoint with a manifest; needed the folders of one save"
            )
        return merge(comm, source, storage, name, options, nodes=nodes, on_progress=on_progress)


def merge(
    comm: Comm,
    source: ClusterSource,
    storage: LocalStorage,
    name: str,
    options: MergeOptions,
    *,
    nodes: Sequence[int],
    on_progress: OnProgress,
) -> MergeReport:
    """Collective. Writes the save to `name` under the storage's root, in a few MiB of memory a
    rank, or raises one error on all ranks.

    The same save id, step, extra state and words, with whole tensors only. `nodes`: the machine
    of each rank; those that do not see the root write nothing. IncompleteError or IntegrityError
    where no undamaged copy is left, StorageError where the target cannot be written. What was at
    `name` is as it was after any error, and nothing is left beside it.
    """
    collective = comm.begin_collective(
        f"merge to {storage.path(name)}", cached=False, timeout_seconds=options.timeout_seconds
    )
    with storage, collective.propagating_errors():
        leader, nbytes_by_node = _locate_tensors(collective, source, nodes)
        commit_target = commit.PublishTarget(
            name, options.if_exists, source.parts, is_step_path=True
        )  # only a manager merges
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
            writer_nodes, sizes = (
                nodes_that_see(collective, storage, staging, nodes, leader=leader),
                tensor_sizes(source),
            )
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
            nbytes = _write_and_publish(rewrite, source, commit_target, options, on_progress)
        except BaseException as error:
            commit.abort_collectively(collective, storage, staging, error, leader=leader)
            raise
    return MergeReport(source.save_id, nbytes, tuple(source.storage.verification_log.damage))


def _locate_tensors(
    collective: Collective, source: ClusterSource, nodes: Sequence[int]
) -> tuple[int, dict[Key, dict[int, int]]]:
    """Collective. The rank that leads, the first of the machine that has the first folder; on it
    what lies on which machine.
    """
    keys, node_leaders = sorted(tensor_sizes(source)), first_ranks(nodes)
    with collective.step("survey"):
        if collective.rank in node_leaders:
            group_numbers = [
                folder.manifest.node_group.number
                if folder.manifest and folder.manifest.node_group
                else 0
                for folder in source.local_folders
            ]
            collective.put(f"first/{collective.rank}", str(min(group_numbers, default=-1)).encode())
            local_nbytes = [
                (key_index, nbytes)
                for key_index, key in enumerate(keys)
                if (nbytes := source.local_nbytes(*key))
            ]
            collective.put(
                f"here/{collective.rank}", zlib.compress(json.dumps(local_nbytes).encode(), 1)
            )
        if collective.rank == 0:
            lowest_group = {rank: int(collective.get(f"first/{rank}")) for rank in node_leaders}
            collective.put(
                "lead",
                str(
                    min((number, rank) for rank, number in lowest_group.items() if number >= 0)[1]
                ).encode(),
            )
    leader = int(collective.get("lead"))
    if collective.rank != leader:
        return leader, {}
    nbytes_by_node: dict[Key, dict[int, int]] = {}
    for rank in node_leaders:
        for key_index, nbytes in json.loads(zlib.decompress(collective.get(f"here/{rank}"))):
            nbytes_by_node.setdefault(keys[key_index], {})[nodes[rank]] = nbytes
    return leader, nbytes_by_node


def _existing_save(
    source: ClusterSource, storage: LocalStorage, commit_target: commit.PublishTarget
) -> Manifest | None:
    """The lead only: the checkpoint that is there and stays, this save's own too."""
    _check_has_digests(source)
    return commit.resolve_copy_if_exists(storage, commit_target, save_id=source.save_id)


def _check_has_digests(source: ClusterSource) -> None:
    """IntegrityError where a folder has no digests to prove its bytes by."""
    for manifest in source.manifests:
        if manifest.digests is None or not manifest.digests.is_supported:
            raise IntegrityError(
                f"save {manifest.save_id}: a folder has no digests that this version knows; needed those of every block"
            )


def _write_and_publish(
    rewrite: Rewrite,
    source: ClusterSource,
    commit_target: commit.PublishTarget,
    options: MergeOptions,
    on_progress: OnProgress,
) -> int:
    """Collective. Fills the folder and publishes it; returns the bytes that this rank wrote."""
    collective, storage, staging, fsync = (
        rewrite.collective,
        rewrite.storage,
        rewrite.staging,
        options.fsync,
    )

    def on_write(nbytes: int) -> None:
        collective.heartbeat()
        on_progress(nbytes)

    output = Output(storage, staging.folder, fsync=fsync, on_progress=on_write)
    with collective.step("room"):
        if collective.rank == rewrite.leader:
            check_free_space(rewrite)
    with collective.step("write"):
        written = write_tensors(rewrite, output)
    with collective.step("complete"):
        if written is not None:
            _finalize(rewrite, source, output, written, fsync=fsync)
    with collective.step("publish"):
        if collective.rank == rewrite.leader:
            published = commit.publish(storage, staging, commit_target, fsync=fsync)
            clean_up(storage, published, fsync=fsync)
    return output.nbytes


def _finalize(
    rewrite: Rewrite, source: ClusterSource, output: Output, written: WrittenFiles, *, fsync: bool
) -> None:
    """The lead only: what is not tensors, the proof, and the manifest."""
    storage, folder = rewrite.storage, rewrite.staging.folder
    manifest = write_merged_metadata(source, storage, folder, output, written, fsync=fsync)
    check_sizes(storage, folder, written.file_records)
    storage.remove_file(f"{folder}/{commit.MARKER}")
    write_manifest(storage, folder, manifest, fsync=fsync)

"""Copies what a node group stores to other groups, so that nodes may be lost.

Data could be lost if a copy counted that is not there:

1. It belongs to another save or another node group. The served manifest must name this save and
   that group.
2. Bytes are damaged in transit or on the disk they come from. Every block is verified against its
   digest, and the verified memory is written.
3. A copy cut off by a crash is taken for a whole one. The manifest of each copy is written last,
   after its files are synced.
4. The checkpoint is published before its copies exist. They are made before the barrier at which
   all node groups publish.
5. Fewer nodes hold the data than believed. The plans of the groups are counted, by part and name.
   Two shard files are equal only if they hold the same shards. Nodes that share a folder count
   once.
6. The copy plan of another layout is used. It is cached with the save plan, and made anew if any
   rank has a new one.
7. A load mixes saves. It joins copies by their save id, as it does for any folder.

A copy is a folder inside the checkpoint, so it is renamed, rolled back and removed with it. The
cases are tested in tests/engine/save/test_node_replicas.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import cache, partial

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.core.nodes.replica_placement import CopyPlan, place_replicas
from unified_ckpt.engine.cluster.commit_group import CommitGroup
from unified_ckpt.engine.folder.copy import FolderCopier
from unified_ckpt.engine.folder.finalize import write_indexes, write_manifest
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.save_plan import GlobalPlan, StagedTensors
from unified_ckpt.errors import IntegrityError, RankError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import parse_manifest
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_server import FolderServer, Peer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import Address
from unified_ckpt.runtime.storage.protocol import Storage

_FAILURE_CHECK_NBYTES = 64 << 20  # copied between two checks whether another rank has failed


def check_copy_count(commit_group: CommitGroup, copies: int) -> None:
    """Collective over all node groups. RankError if there are too few groups."""
    group_count = commit_group.node_group.count
    with commit_group.collective.step("node-copies"):
        if copies > group_count:
            raise RankError(
                f"node_copies={copies}: got {group_count} nodes with folders of their own, "
                f"expected {copies} or more; use more nodes or fewer copies"
            )


def plan_copies(
    commit_group: CommitGroup, global_plan: GlobalPlan | None, *, copies: int
) -> CopyPlan:
    """Collective over all node groups, once per layout. Rank 0 decides which group copies what.

    Returns what this group copies, which is nothing if no copies are requested. Groups describe
    equal contents only once.
    """
    collective, node_group = commit_group.collective, commit_group.node_group
    if copies == 1:
        return {}
    numbers = range(node_group.count)
    with commit_group.collective.step("plan-copies"):
        if global_plan is not None:
            content_by_file, units_by_content = stored_units(global_plan)
            for content, units in units_by_content.items():
                if collective.add(f"contents/{content}") == 1:
                    collective.put_json(f"units/{content}", units)
            collective.put_json(f"stored-files/{node_group.number}", content_by_file)
        if collective.rank == 0:
            stored = [collective.get_json(f"stored-files/{number}") for number in numbers]
            contents = dict.fromkeys(content for files in stored for content in files.values())
            units_by_content = {
                content: collective.get_json(f"units/{content}") for content in contents
            }
            placements = place_replicas(stored, units_by_content, copies=copies)
            for number, placement in enumerate(placements):
                collective.put_json(f"copy-plan/{number}", placement)
        placement = collective.get_json(f"copy-plan/{node_group.number}")
    return {int(source): files for source, files in placement.items()}


def stored_units(global_plan: GlobalPlan) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the content id of each file that a node group stores, and the units of each content.

    A whole tensor is a unit, because groups may put the same tensors into different files. All
    shards of a file are one unit: they are many, and groups that have the same ones are alike.
    """
    content_by_file: dict[str, str] = {}
    units_by_content: dict[str, list[str]] = {}
    for part, weight_map in global_plan.tensors.weight_maps.items():
        for file, fqns in group_by_value(weight_map.items()).items():
            content = _content_id([part, sorted(fqns)])
            content_by_file[file] = content
            units = [content]
            if not part.endswith(SHARD_SUFFIX):
                units = [_content_id([part, fqn]) for fqn in sorted(fqns)]
            units_by_content[content] = units
    return content_by_file, units_by_content


def _content_id(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def replicate(
    commit_group: CommitGroup,
    transaction: Transaction,
    copy_plan: CopyPlan,
    *,
    encoded_parts: Collection[str],
) -> None:
    """Collective over all node groups. Copy what the plan says into the finalized staging folder.

    The ranks of this node group share the files to copy; its first rank serves the folder. Copies
    have the outliers files of `encoded_parts`.
    StorageError or IntegrityError on every rank of all groups if one fails.
    """
    if not copy_plan:
        return
    number, count = commit_group.node_group.number, commit_group.node_group.count
    storage = transaction.storage
    rank, world = transaction.collective.rank, transaction.collective.world
    with ExitStack() as exit_stack:  # serves until all groups are through or one has failed
        with commit_group.collective.step("copy"):
            if rank == 0:
                _serve(commit_group, transaction, copy_plan, exit_stack)
            open_peer = cache(partial(_open_peer, commit_group, exit_stack))
            if rank == 0:
                nbytes = sum(_copied_nbytes(open_peer(n), files) for n, files in copy_plan.items())
                transaction.check_free_space(nbytes)
            # Set once the folders of the copies exist.
            commit_group.collective.get(_server_key(number))
            nearest = sorted(copy_plan, key=lambda source: (number - source) % count)
            outliers = map(names.outliers_name, encoded_parts)
            auxiliary = (
                names.DIGESTS,
                names.EXTRA,
                names.RANK_EXTRA,
                names.RANK_VALUES,
                *outliers,
            )
            tasks = [
                (source, file) for source in nearest for file in (*auxiliary, *copy_plan[source])
            ]
            on_bytes = _copy_heartbeat(commit_group.collective)
            copiers: dict[int, FolderCopier] = {}
            for source, file in tasks[rank::world]:
                if source not in copiers:
                    target = _replica_folder(transaction, source)
                    copiers[source] = FolderCopier(open_peer(source), storage, target, on_bytes)
                copiers[source].copy_file(file)
        with commit_group.collective.step("finalize-copies"):
            if rank == 0:
                for source, files in copy_plan.items():
                    target = _replica_folder(transaction, source)
                    _finalize_copy(open_peer(source), files, storage, target)


def _open_peer(commit_group: CommitGroup, exit_stack: ExitStack, number: int) -> Folder:
    """Open the folder that another node group serves. IntegrityError if it is of another save."""
    collective = commit_group.collective
    served = collective.get_json(_server_key(number))
    storage = PeerStorage(
        Peer(collective.ranks[served["rank"]], Address(*served["address"])),
        folder=0,
        root=served["root"],
        names=served["files"],
        traffic=commit_group.traffic,
        timeout_seconds=collective.timeout_seconds,
    )
    exit_stack.callback(storage.close)
    folder = open_folder(storage)
    check_peer_manifest(folder, save_id=commit_group.save_id, number=number)
    return folder


def check_peer_manifest(folder: Folder, *, save_id: str, number: int) -> None:
    """IntegrityError unless the folder is of this save and node group `number`."""
    manifest = folder.require_manifest()
    identity = manifest.save_id, manifest.node_group and manifest.node_group.number
    if identity != (save_id, number):
        raise IntegrityError(
            f"{folder.storage.root}: got {identity}, "
            f"expected what node group {number} wrote of save {save_id}"
        )


def _serve(
    commit_group: CommitGroup, transaction: Transaction, copy_plan: CopyPlan, exit_stack: ExitStack
) -> None:
    """Serve this group's folder, create the folders of its copies, and publish the address."""
    collective, storage, folder = commit_group.collective, transaction.storage, transaction.folder
    root = storage.path(folder)
    manifest = parse_manifest(storage.read(f"{folder}/{names.MANIFEST}"), file=root)
    files = [*manifest.files(), names.MANIFEST]
    server = FolderServer(
        [(root, files)], traffic=commit_group.traffic, timeout_seconds=collective.timeout_seconds
    )
    exit_stack.callback(server.close)
    storage.make_folder(f"{folder}/{names.REPLICAS}")
    for source in copy_plan:
        storage.make_folder(_replica_folder(transaction, source))
    offer = {"address": server.address, "root": root, "rank": collective.rank}
    key = _server_key(commit_group.node_group.number)
    collective.put_json(key, {**offer, "files": files})


def _server_key(number: int) -> str:
    return f"file-server/{number}"


def _replica_folder(transaction: Transaction, source: int) -> str:
    return f"{transaction.folder}/{names.replica_name(source)}"


def _copy_heartbeat(collective: Collective) -> Callable[[int], None]:
    """Return a callback for copied bytes, which raises the error of a rank that has failed."""
    unchecked_nbytes = 0

    def on_bytes(nbytes: int) -> None:
        nonlocal unchecked_nbytes
        collective.heartbeat()
        unchecked_nbytes += nbytes
        if unchecked_nbytes >= _FAILURE_CHECK_NBYTES:
            unchecked_nbytes = 0
            collective.raise_if_failed()

    return on_bytes


def _copied_nbytes(folder: Folder, files: Collection[str]) -> int:
    """Return the bytes of these part files, and of all files of no part."""
    manifest = folder.require_manifest()
    part_files = (item for item in manifest.part_files() if item[0] in files)
    copied = (*manifest.whole_files(), *part_files)
    return sum(record.nbytes for _, record in copied)


def _finalize_copy(folder: Folder, files: Collection[str], storage: Storage, target: str) -> None:
    """Write the indexes and the manifest of a copy that has only these part files."""
    manifest = folder.require_manifest()
    weight_maps, records, nbytes_by_part = {}, {}, {}
    for part, record in manifest.parts.items():
        weight_map = {
            name: file
            for name in folder.names(part)
            if (file := folder.file_of(part, name)) in files
        }
        specs = folder.specs(part, weight_map)
        nbytes_by_part[part] = sum(spec.nbytes for spec in specs.values())
        records[part] = {name: file for name, file in record.files.items() if name in files}
        if records[part]:
            weight_maps[part] = weight_map
    tensors = StagedTensors(weight_maps, records, nbytes_by_part)
    indexes = write_indexes(storage, target, tensors)
    parts = {
        part: record.model_copy(
            update={
                "files": records[part],
                "index": indexes.get(part),
                "total_nbytes": nbytes_by_part[part],
            }
        )
        for part, record in manifest.parts.items()
    }
    assert manifest.node_group is not None  # only folders of nodes are copied to other nodes
    node_group = manifest.node_group.model_copy(update={"replicas": []})
    manifest = manifest.model_copy(update={"parts": parts, "node_group": node_group})
    write_manifest(storage, target, manifest)

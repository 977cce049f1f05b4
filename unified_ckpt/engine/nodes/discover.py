"""Brings the folders of all machines together for a load: who has what, is it complete, who reads
what from whom. Collective.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from unified_ckpt.engine.folder.reader import Folder, open_folder, open_path
from unified_ckpt.engine.nodes.coverage import ClusterIndex, decode_cluster_index, select_save
from unified_ckpt.engine.nodes.folders import FolderCache
from unified_ckpt.engine.nodes.inventory import (
    TensorList,
    decode_inventory,
    decode_tensor_list,
    read_inventory,
    tensor_list_name,
)
from unified_ckpt.engine.nodes.source import ClusterSource
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import CheckpointError, IncompleteError, NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import all_gather, first_ranks, node_numbers
from unified_ckpt.runtime.exchange.file_server import FolderServer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import Address, parse_address
from unified_ckpt.runtime.storage.storage import LocalStorage, Reader, is_url

_PLAIN = b"plain"  # says a machine whose folder has no manifest


def gather_node_numbers(
    comm: Comm, operation: str, node_id: str, *, timeout_seconds: float
) -> list[int]:
    """Collective. The machine of each rank, counted from 0 in the order of their first ranks."""
    collective = comm.begin_collective(operation, cached=False, timeout_seconds=timeout_seconds)
    with collective.step("machines"):
        return node_numbers(all_gather(collective, "machine", node_id))


@dataclass(frozen=True, slots=True)
class OpenedFolders:
    """This rank's folders. `error`: why it has none; `problems`: in sentences, why it lacks some of
    them.
    """

    folders: tuple[Folder, ...] = ()
    error: Exception | None = None
    problems: tuple[str, ...] = ()


def open_folders(paths: Iterable[str], resources: ExitStack, *, lock: bool) -> OpenedFolders:
    """What `open_cluster_source` tells to all: of a folder that cannot be opened the others may
    have enough.
    `lock`: on one rank of each machine.
    """
    folders: list[Folder] = []
    errors: list[CheckpointError] = []
    for path in paths:
        try:
            folders.append(open_path(path, lock=lock))
        except CheckpointError as error:
            errors.append(error)
        except Exception as error:
            return OpenedFolders(error=error)
        else:
            resources.callback(folders[-1].close)
    if not folders and not errors:
        return OpenedFolders(error=NotFoundError("no path is given; needed that of a checkpoint"))
    if errors and all(
        folder.manifest is None for folder in folders
    ):  # of weights without a manifest nothing tells what belongs to them
        return OpenedFolders(
            error=next(
                (error for error in errors if not isinstance(error, NotFoundError)), errors[0]
            )
        )
    return OpenedFolders(tuple(folders), problems=tuple(map(str, errors)))


def open_source(
    comm: Comm,
    label: str,
    paths: Sequence[str],
    nodes: Sequence[int],
    resources: ExitStack,
    *,
    timeout_seconds: float,
) -> Source | Exception:
    """The checkpoint at some paths of this machine, or why this rank has none. Collective where it
    may lie on several machines.

    `resources`: what is to be closed after all ranks have read.
    """
    opened = open_folders(paths, resources, lock=comm.rank in first_ranks(nodes))
    if may_span_folders(paths, opened, nodes):
        return open_cluster_source(
            comm,
            f"load of {label}",
            paths,
            opened,
            nodes,
            resources,
            timeout_seconds=timeout_seconds,
        )
    return opened.error or opened.folders[0]


def may_span_folders(paths: Sequence[str], opened: OpenedFolders, nodes: Sequence[int]) -> bool:
    """Whether the checkpoint may lie in several folders: several machines or paths, or a folder
    that says so of itself.
    """
    if any(is_url(path) for path in paths):
        return False
    if max(nodes) > 0 or len(paths) > 1:
        return True
    manifest = opened.folders[0].manifest if opened.folders else None
    return manifest is not None and manifest.node_group is not None


def open_cluster_source(
    comm: Comm,
    operation: str,
    paths: Sequence[str],
    opened: OpenedFolders,
    nodes: Sequence[int],
    resources: ExitStack,
    *,
    timeout_seconds: float,
) -> Source:
    """Collective. The checkpoint that the machines have between them. `resources`: what is to be
    closed after all ranks have read.

    `opened`: this machine's folders. Raises IncompleteError, the same on every rank, where no
    complete copy of the newest save that any machine has is there, naming what is missing;
    NotFoundError where no machine has anything.
    """
    collective = comm.begin_collective(operation, cached=False, timeout_seconds=timeout_seconds)
    node, leaders = nodes[collective.rank], first_ranks(nodes)
    with collective.step("inventory"):
        message = (
            _describe_folders(collective, paths, opened, node)
            if collective.rank in leaders
            else b""
        )
        messages = collective.collect("inventory", message, dst=0, ranks=leaders)
    with collective.step("choose"):
        body = collective.broadcast(
            "joint", _select_save(collective, messages, operation) if collective.rank == 0 else None
        )
        if body == _PLAIN:
            if opened.error is not None:
                raise opened.error
            return opened.folders[0]  # a folder without a manifest: each machine reads its own
        index = decode_cluster_index(body)
    local = [number for number, folder in enumerate(index.folders) if folder.node == node]
    with collective.step("serve"):
        server = FolderServer(
            [(index.folders[n].root, index.folders[n].files) for n in local],
            timeout_seconds=timeout_seconds,
        )
        resources.callback(server.close)
        reused = _reuse_opened(
            index, local, opened
        )  # after the server has them, so that both have the same
        servers = _assign_servers(collective, server.address, nodes)
    with collective.step("open"):
        folders = FolderCache(
            _open_storages(collective, index, servers, node, reused, resources),
            reused,
            save_id=index.save_id,
        )
        resources.callback(folders.close)
    return ClusterSource(index, folders, local=local, rotation=collective.rank)


def _reuse_opened(
    index: ClusterIndex, local: Sequence[int], opened: OpenedFolders
) -> dict[int, Folder]:
    """Folders of the save that this rank has opened already, by number: their headers are parsed
    once.

    StorageError where another save has taken the place of one since the first rank of the machine
    told of it, or this rank opened it.
    """
    roots = {index.folders[number].root: number for number in local}
    reused = {
        roots[folder.storage.root]: folder
        for folder in opened.folders
        if folder.storage.root in roots
    }
    for folder in reused.values():
        save_id = folder.manifest.save_id if folder.manifest is not None else None
        if save_id != index.save_id or (
            isinstance(folder.storage, LocalStorage) and folder.storage.directory.was_replaced()
        ):
            raise StorageError(
                f"{folder.storage.root}: another save took its place while the ranks opened it; needed save {index.save_id}, of which the "
                "first rank of this machine told; load again"
            )
    return reused


def _select_save(collective: Collective, messages: Sequence[bytes], operation: str) -> bytes:
    """What rank 0 tells all: the save to read, where every box of it is; or that each machine reads
    a folder of its own.
    """
    if all(message == _PLAIN for message in messages):
        return _PLAIN
    tensor_lists: dict[str, TensorList] = {}

    def tensor_list_of(name: str) -> TensorList:
        if name not in tensor_lists:
            tensor_lists[name] = decode_tensor_list(
                zlib.decompress(collective.get(f"listing-of/{name}"))
            )
        return tensor_lists[name]

    inventories = [
        decode_inventory(body, tensor_list_of)
        for message in messages
        for body in _split_inventories(message)
    ]
    reasons = [
        f"machine {node}: {message[2:].decode()}"
        for node, message in enumerate(messages)
        if message[:1] == b"!"
    ]
    reasons += [
        f"machine {node}: has a folder without a manifest"
        for node, message in enumerate(messages)
        if message == _PLAIN
    ]
    if not inventories:
        raise (
            NotFoundError if all(message[:2] == b"!-" for message in messages) else IncompleteError
        )("; ".join(reasons))
    damaged = [
        f"machine {node}: {message[2:].decode()}"
        for node, message in enumerate(messages)
        if message[:2] == b"!+"
    ]
    index = select_save(inventories, label=operation, damaged=damaged)
    return replace(index, lost=(*index.lost, *damaged)).encode()


def _describe_folders(
    collective: Collective, paths: Sequence[str], opened: OpenedFolders, node: int
) -> bytes:
    """What the first rank of a machine says: its inventories, "plain", or why it has none: nothing
    there ("!-"), or damage ("!+").
    """
    error = opened.error
    if error is not None and not isinstance(error, CheckpointError):
        raise error
    adjacent, problems = (
        [folder for path in paths for folder in _adjacent_folders(path)],
        list(opened.problems),
    )
    replicas = [folder for path in paths for folder in _replica_folders(path, problems)]
    replicas += [
        folder for item in adjacent for folder in _replica_folders(item.storage.root, [])
    ]  # a crash may have cut them off
    try:
        if error is not None:
            if not adjacent and not replicas:
                return (b"!-" if isinstance(error, NotFoundError) else b"!+") + str(error).encode()
            problems += [str(error)] if not isinstance(error, NotFoundError) else []
        elif all(folder.manifest is None for folder in opened.folders):
            return _PLAIN
        node_folders = (*opened.folders, *adjacent)
        inventories = [
            read_inventory(item, node=node, is_replica=False)
            for item in node_folders
            if item.manifest is not None
        ]
        inventories += [read_inventory(item, node=node, is_replica=True) for item in replicas]
    finally:
        for folder in (*adjacent, *replicas):
            folder.close()
    inventories[0] = replace(inventories[0], lost=(*problems, *inventories[0].lost))
    bodies = [
        item.encode(tensor_list=_publish_tensor_list(collective, item.listing))
        for item in inventories
    ]
    return b"=" + b"".join(len(body).to_bytes(8, "little") + body for body in bodies)


def _publish_tensor_list(collective: Collective, tensor_list: TensorList) -> str:
    """The name by which rank 0 finds it. The first machine to have one tells it: the others' are
    mostly the same.
    """
    body = tensor_list.encode()
    name = tensor_list_name(body)
    if collective.add(f"listing/{name}") == 1:
        collective.put(f"listing-of/{name}", zlib.compress(body))
    return name


def _adjacent_folders(path: str) -> list[Folder]:
    """Folders beside the checkpoint that are complete but for their name, or had it before: of
    saves that ended between the renames of several machines.
    """
    parent, name = os.path.split(path)
    folders = []
    storage = LocalStorage(parent)
    if storage.kind("") != "folder":
        return []
    for entry in storage.names():
        if names.is_replaced(entry, name) or names.is_staging_of(entry, name):
            try:
                folder = open_folder(LocalStorage(storage.path(entry)))
            except CheckpointError:
                continue  # unfinished: it has no manifest
            if folder.manifest is not None and folder.manifest.node_group is not None:
                folders.append(folder)
    return folders


def _replica_folders(path: str, problems: list[str]) -> list[Folder]:
    """What the folder keeps of other machines' folders. `problems`: gets, in sentences, what cannot
    be read of it.
    """
    storage, folders = LocalStorage(os.path.join(path, names.REPLICAS)), []
    for entry in storage.names() if storage.kind("") == "folder" else []:
        try:
            folder = open_folder(LocalStorage(storage.path(entry)))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if folder.manifest is not None and folder.manifest.node_group is not None:
            folders.append(folder)
        else:
            problems.append(
                f"{folder.storage.root}: has no {names.MANIFEST} of a machine's folder; needed a copy of one"
            )
    return folders


def _split_inventories(message: bytes) -> list[bytes]:
    """The encoded inventories of a machine."""
    bodies, position = [], 1
    while message[:1] == b"=" and position < len(message):
        size = int.from_bytes(message[position : position + 8], "little")
        bodies.append(message[position + 8 : position + 8 + size])
        position += 8 + size
    return bodies


def _assign_servers(
    collective: Collective, address: Address, nodes: Sequence[int]
) -> list[tuple[int, Address]]:
    """Collective. Of each machine, the rank that this one is to ask, and where; the ranks of a
    machine take turns in whom they ask.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    turn_count = max(map(len, ranks.values()))
    turn = ranks[nodes[collective.rank]].index(collective.rank) % turn_count
    ranks_by_turn = [
        [ranks[node][turn % len(ranks[node])] for node in range(len(ranks))]
        for turn in range(turn_count)
    ]
    addresses = collective.collect(
        "serves", address.encode().encode(), dst=0, ranks=range(collective.world)
    )
    if collective.rank == 0:
        for number, servers in enumerate(ranks_by_turn):
            collective.put(
                f"servers/{number}", zlib.compress(b"\n".join(addresses[rank] for rank in servers))
            )
    texts = zlib.decompress(collective.get(f"servers/{turn}", sender=0)).decode().split("\n")
    return [
        (rank, parse_address(text)) for rank, text in zip(ranks_by_turn[turn], texts, strict=True)
    ]


def _pinned_storage(root: str, resources: ExitStack) -> LocalStorage:
    storage = LocalStorage(root)
    storage.open_handle()
    resources.callback(storage.directory.close)
    return storage


def _open_storages(
    collective: Collective,
    index: ClusterIndex,
    servers: Sequence[tuple[int, Address]],
    node: int,
    reused: Mapping[int, Folder],
    resources: ExitStack,
) -> list[Reader]:
    """Each folder itself on its own machine, else as one of that machine's ranks serves it.
    StorageError where one of those does not.
    """
    storages: list[Reader] = []
    folders_by_node: dict[int, int] = {}  # folders so far, by machine
    for folder_number, folder in enumerate(index.folders):
        number = folders_by_node.get(folder.node, 0)
        folders_by_node[folder.node] = number + 1
        if folder.node == node:
            storages.append(
                reused[folder_number].storage
                if folder_number in reused
                else _pinned_storage(folder.root, resources)
            )
            continue
        rank, address = servers[folder.node]
        storages.append(
            PeerStorage(
                address,
                folder=number,
                root=folder.root,
                rank=collective.ranks[rank],
                names=folder.files,
                timeout_seconds=collective.timeout_seconds,
            )
        )
    # A rank opens few of the folders, and when it reads; that there is a way between machines has
    # to be known before the first byte is
    # written. So each asks one of them.
    remote = [storage for storage in storages if isinstance(storage, PeerStorage)]
    if remote:
        remote[collective.rank % len(remote)].size(names.MANIFEST)
    return storages

"""Discover the folders of all nodes for a load: what they hold, and who reads from whom.

Collective.
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

# How the message of a node begins.
_INVENTORIES = b"="  # its inventories follow
_PLAIN = b"plain"  # its folder has no manifest
_ABSENT = b"!-"  # there is no folder; an error follows
_DAMAGED = b"!+"  # a folder cannot be opened; an error follows


def gather_node_numbers(
    comm: Comm, operation: str, node_id: str, *, timeout_seconds: float
) -> list[int]:
    """Return the node of each rank, numbered by first rank. Collective."""
    collective = comm.begin_collective(operation, timeout_seconds=timeout_seconds)
    with collective.step("nodes"):
        return node_numbers(all_gather(collective, "node", node_id))


@dataclass(frozen=True, slots=True)
class OpenedFolders:
    """The folders that this rank opened. `error`: why there are none.

    `problems`: why some of them are missing, one sentence each.
    """

    paths: tuple[str, ...]
    folders: tuple[Folder, ...] = ()
    error: Exception | None = None
    problems: tuple[str, ...] = ()


def open_folders(paths: Iterable[str], resources: ExitStack, *, lock: bool) -> OpenedFolders:
    """Open folders; `open_cluster_source` combines errors of all nodes, which may have enough.

    `lock`: set on one rank of each node.
    """
    paths = tuple(paths)
    folders: list[Folder] = []
    errors: list[CheckpointError] = []
    for path in paths:
        try:
            folders.append(open_path(path, lock=lock))
        except CheckpointError as error:
            errors.append(error)
        except Exception as error:
            return OpenedFolders(paths, error=error)
        else:
            resources.callback(folders[-1].close)
    if not folders and not errors:
        return OpenedFolders(paths, error=NotFoundError("got no path, expected a checkpoint's"))
    # Without a manifest, nothing says which folders belong together.
    if errors and all(folder.manifest is None for folder in folders):
        damage = [problem for problem in errors if not isinstance(problem, NotFoundError)]
        return OpenedFolders(paths, error=(damage or errors)[0])
    return OpenedFolders(paths, tuple(folders), problems=tuple(map(str, errors)))


def open_source(
    comm: Comm,
    label: str,
    paths: Sequence[str],
    nodes: Sequence[int],
    resources: ExitStack,
    *,
    timeout_seconds: float,
) -> Source | Exception:
    """Return the checkpoint at some paths of this node, or this rank's error.

    Collective if the checkpoint may span several nodes. `resources`: closed after all ranks
    have read.
    """
    opened = open_folders(paths, resources, lock=comm.rank in first_ranks(nodes))
    if may_span_folders(opened, nodes):
        return open_cluster_source(
            comm, f"load of {label}", opened, nodes, resources, timeout_seconds=timeout_seconds
        )
    return opened.error or opened.folders[0]


def may_span_folders(opened: OpenedFolders, nodes: Sequence[int]) -> bool:
    """Return whether a checkpoint may lie in several folders, by nodes, paths or manifest."""
    if any(is_url(path) for path in opened.paths):
        return False
    if max(nodes) > 0 or len(opened.paths) > 1:
        return True
    manifest = opened.folders[0].manifest if opened.folders else None
    return manifest is not None and manifest.node_group is not None


def open_cluster_source(
    comm: Comm,
    operation: str,
    opened: OpenedFolders,
    nodes: Sequence[int],
    resources: ExitStack,
    *,
    timeout_seconds: float,
) -> Source:
    """Return the checkpoint that all nodes hold together. Collective.

    `opened`: this node's folders; `resources`: closed after all ranks have read. Raises
    IncompleteError on every rank, naming what is missing, if no save is complete, and
    NotFoundError if no node has any.
    """
    collective = comm.begin_collective(operation, timeout_seconds=timeout_seconds)
    node, leaders = nodes[collective.rank], first_ranks(nodes)
    with collective.step("inventory"):
        is_leader = collective.rank in leaders
        message = _describe_folders(collective, opened, node) if is_leader else b""
        messages = collective.collect("inventory", message, dst=0, ranks=leaders)
    with collective.step("select"):
        answer = _select_save(collective, messages, operation) if collective.rank == 0 else None
        body = collective.broadcast("index", answer)
        if body == _PLAIN:
            if opened.error is not None:
                raise opened.error
            return opened.folders[0]  # each node reads its own
        index = decode_cluster_index(body)
    local = [number for number, folder in enumerate(index.folders) if folder.node == node]
    with collective.step("serve"):
        server = FolderServer(
            [(index.folders[number].root, index.folders[number].files) for number in local],
            timeout_seconds=timeout_seconds,
        )
        resources.callback(server.close)
        reused = _reuse_opened(index, local, opened)  # the server opened them before
        servers = _assign_servers(collective, server.address, nodes)
    with collective.step("open"):
        storages = _open_storages(collective, index, servers, node, reused, resources)
        folders = FolderCache(storages, reused, save_id=index.save_id)
        resources.callback(folders.close)
    return ClusterSource(index, folders, local=local, rotation=collective.rank)


def _reuse_opened(
    index: ClusterIndex, local: Sequence[int], opened: OpenedFolders
) -> dict[int, Folder]:
    """Return folders of the save that this rank has opened, by number, to parse headers once.

    Raises StorageError if another save replaced one of them meanwhile.
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
                f"{folder.storage.root}: was replaced by another save while the ranks opened "
                f"it, expected save {index.save_id}; load again"
            )
    return reused


def _select_save(collective: Collective, messages: Sequence[bytes], operation: str) -> bytes:
    """Return rank 0's answer: the index of the save to read, or _PLAIN."""
    if all(message == _PLAIN for message in messages):
        return _PLAIN
    tensor_lists: dict[str, TensorList] = {}

    def tensor_list_of(name: str) -> TensorList:
        if name not in tensor_lists:
            tensor_lists[name] = decode_tensor_list(
                zlib.decompress(collective.get(f"tensor-list/{name}"))
            )
        return tensor_lists[name]

    inventories = [
        decode_inventory(body, tensor_list_of)
        for message in messages
        for body in _split_inventories(message)
    ]
    reasons = [
        f"node {node}: {message[2:].decode()}"
        for node, message in enumerate(messages)
        if message.startswith((_ABSENT, _DAMAGED))
    ]
    reasons += [
        f"node {node}: has a folder without a manifest"
        for node, message in enumerate(messages)
        if message == _PLAIN
    ]
    if not inventories:
        is_absent = all(message.startswith(_ABSENT) for message in messages)
        raise (NotFoundError if is_absent else IncompleteError)("; ".join(reasons))
    damaged = [
        f"node {node}: {message[2:].decode()}"
        for node, message in enumerate(messages)
        if message.startswith(_DAMAGED)
    ]
    index = select_save(inventories, label=operation, damaged=damaged)
    return replace(index, problems=(*index.problems, *damaged)).encode()


def _describe_folders(collective: Collective, opened: OpenedFolders, node: int) -> bytes:
    """Return this node's message: its inventories, _PLAIN, or why it has none."""
    error = opened.error
    if error is not None and not isinstance(error, CheckpointError):
        raise error
    problems = list(opened.problems)
    adjacent = [folder for path in opened.paths for folder in _adjacent_folders(path)]
    replicas = [folder for path in opened.paths for folder in _replica_folders(path, problems)]
    for folder in adjacent:  # a crash may have interrupted their replicas: no problem
        replicas += _replica_folders(folder.storage.root, [])
    try:
        if error is not None:
            if not adjacent and not replicas:
                tag = _ABSENT if isinstance(error, NotFoundError) else _DAMAGED
                return tag + str(error).encode()
            problems += [str(error)] if not isinstance(error, NotFoundError) else []
        elif all(folder.manifest is None for folder in opened.folders):
            return _PLAIN
        node_folders = (*opened.folders, *adjacent)
        inventories = [
            read_inventory(folder, node=node, is_replica=False)
            for folder in node_folders
            if folder.manifest is not None
        ]
        inventories += [read_inventory(folder, node=node, is_replica=True) for folder in replicas]
    finally:
        for folder in (*adjacent, *replicas):
            folder.close()
    first = inventories[0]
    inventories[0] = replace(first, problems=(*problems, *first.problems))
    bodies = [
        inventory.encode(list_name=_publish_tensor_list(collective, inventory.tensor_list))
        for inventory in inventories
    ]
    return _INVENTORIES + b"".join(len(body).to_bytes(8, "little") + body for body in bodies)


def _publish_tensor_list(collective: Collective, tensor_list: TensorList) -> str:
    """Publish a tensor list unless another node has, and return its name. Most nodes share one."""
    body = tensor_list.encode()
    name = tensor_list_name(body)
    if collective.add(f"tensor-list-count/{name}") == 1:
        collective.put(f"tensor-list/{name}", zlib.compress(body))
    return name


def _adjacent_folders(path: str) -> list[Folder]:
    """Return complete folders next to the checkpoint, staged or replaced.

    A save that stopped between the renames of several nodes leaves them.
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
    """Return replicas of other nodes' folders. Unreadable ones add to `problems`."""
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
                f"{folder.storage.root}: has no {names.MANIFEST} of a node's folder, "
                "expected a replica of one"
            )
    return folders


def _split_inventories(message: bytes) -> list[bytes]:
    """Return the encoded inventories of a node's message."""
    bodies, position = [], len(_INVENTORIES)
    while message.startswith(_INVENTORIES) and position < len(message):
        nbytes = int.from_bytes(message[position : position + 8], "little")
        bodies.append(message[position + 8 : position + 8 + nbytes])
        position += 8 + nbytes
    return bodies


def _assign_servers(
    collective: Collective, address: Address, nodes: Sequence[int]
) -> list[tuple[int, Address]]:
    """Return, for each node, the rank to read from and its address; clients are spread evenly.

    Collective.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    local_world = max(map(len, ranks.values()))
    servers_by_local_rank = [
        [ranks[node][local_rank % len(ranks[node])] for node in range(len(ranks))]
        for local_rank in range(local_world)
    ]
    addresses = collective.collect(
        "addresses", address.encode().encode(), dst=0, ranks=range(collective.world)
    )
    if collective.rank == 0:
        for local_rank, servers in enumerate(servers_by_local_rank):
            collective.put(
                f"servers/{local_rank}",
                zlib.compress(b"\n".join(addresses[rank] for rank in servers)),
            )
    local_rank = ranks[nodes[collective.rank]].index(collective.rank)
    body = zlib.decompress(collective.get(f"servers/{local_rank}", sender=0))
    servers, texts = servers_by_local_rank[local_rank], body.decode().split("\n")
    return [(rank, parse_address(text)) for rank, text in zip(servers, texts, strict=True)]


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
    """Return a reader for each folder: direct on this node, through a peer elsewhere.

    Raises StorageError if a peer does not answer.
    """
    storages: list[Reader] = []
    folders_by_node: dict[int, int] = {}  # folders so far
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
    # Folders are opened while reading. A missing connection must show before the first byte is
    # written, so ask one peer now.
    remote = [storage for storage in storages if isinstance(storage, PeerStorage)]
    if remote:
        remote[collective.rank % len(remote)].size(names.MANIFEST)
    return storages

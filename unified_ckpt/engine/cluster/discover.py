"""Opens a unified checkpoint for a load: one folder, or the folders of all nodes as one Source."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

from unified_ckpt.engine.cluster.bucket import open_bucket
from unified_ckpt.engine.cluster.coverage import ClusterIndex, decode_cluster_index, select_save
from unified_ckpt.engine.cluster.folders import FolderCache
from unified_ckpt.engine.cluster.inventory import (
    TensorList,
    decode_inventory,
    decode_tensor_list,
    tensor_list_name,
)
from unified_ckpt.engine.cluster.node_inventory import read_node_inventories
from unified_ckpt.engine.cluster.source import ClusterSource
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.source.decoded import decode_source
from unified_ckpt.engine.source.protocol import ReadPolicy, Source
from unified_ckpt.errors import CheckpointError, IncompleteError, NotFoundError, StorageError
from unified_ckpt.format import codec, names
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.exchange.file_server import FolderServer, Peer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import Address
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.paths import is_url
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.storage.storage import LocalStorage

_PLAIN = b"plain"  # the answer of rank 0 if no folder has a manifest


@dataclass(frozen=True, slots=True)
class OpenedFolders:
    """The folders that this rank opened. `error`: why there are none.

    `problems`: why some of them are missing, one sentence each.
    """

    paths: tuple[str, ...]
    policy: ReadPolicy
    folders: tuple[Folder, ...] = ()
    error: Exception | None = None
    problems: tuple[str, ...] = ()


def open_folders(
    paths: Iterable[str], resources: ExitStack, *, lock: bool, policy: ReadPolicy | None = None
) -> OpenedFolders:
    """Open folders; `open_cluster_source` combines errors of all nodes, which may have enough.

    `lock`: set on one rank of each node.
    """
    paths, policy = tuple(paths), policy or ReadPolicy()
    folders: list[Folder] = []
    errors: list[CheckpointError] = []
    for path in paths:
        try:
            folders.append(open_path(path, lock=lock, policy=policy))
        except CheckpointError as error:
            errors.append(error)
        except Exception as error:
            return OpenedFolders(paths, policy, error=error)
        else:
            resources.callback(folders[-1].close)
    if not folders and not errors:
        return OpenedFolders(
            paths, policy, error=NotFoundError("got no path, expected a checkpoint's")
        )
    # Without a manifest, nothing says which folders belong together.
    if errors and all(folder.manifest is None for folder in folders):
        damage = [problem for problem in errors if not isinstance(problem, NotFoundError)]
        return OpenedFolders(paths, policy, error=(damage or errors)[0])
    return OpenedFolders(paths, policy, tuple(folders), problems=tuple(map(str, errors)))


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A checkpoint to open on all ranks.

    `label` names it in errors; `paths` are those of this node.
    """

    label: str
    paths: Sequence[str]
    topology: Topology
    timeout_seconds: float
    policy: ReadPolicy


def open_unified(comm: Comm, request: OpenRequest, resources: ExitStack) -> Source | Exception:
    """Open the unified checkpoint at some paths of this node, or return this rank's error.

    Collective if the checkpoint may span several nodes, or is in a bucket. `resources`: closed
    after all ranks have read.
    """
    topology = request.topology
    if len(request.paths) == 1 and is_bucket_url(request.paths[0]) and comm.world > 1:
        operation, timeout = f"load of {request.label}", request.timeout_seconds
        collective = comm.begin_collective(operation, timeout_seconds=timeout)
        folder = open_bucket(collective, request.paths[0], topology, request.policy, resources)
        return decode_source(folder, label=request.label)
    opened = open_folders(
        request.paths, resources, lock=topology.is_node_leader, policy=request.policy
    )
    if may_span_folders(opened, topology):
        operation, timeout = f"load of {request.label}", request.timeout_seconds
        source = open_cluster_source(
            comm, operation, opened, topology, resources, timeout_seconds=timeout
        )
        if source is not None:
            return decode_source(source, label=request.label)
    return opened.error or decode_source(opened.folders[0], label=request.label)


def may_span_folders(opened: OpenedFolders, topology: Topology) -> bool:
    """Return whether a checkpoint may lie in several folders, by nodes, paths or manifest."""
    if any(is_url(path) for path in opened.paths):
        return False
    if topology.spans_nodes or len(opened.paths) > 1:
        return True
    manifest = opened.folders[0].manifest if opened.folders else None
    return manifest is not None and manifest.node_group is not None


def open_cluster_source(
    comm: Comm,
    operation: str,
    opened: OpenedFolders,
    topology: Topology,
    resources: ExitStack,
    *,
    timeout_seconds: float,
) -> ClusterSource | None:
    """Return the checkpoint that all nodes hold together. Collective.

    None if no folder has a manifest: each node then reads its own.

    `opened`: this node's folders; `resources`: closed after all ranks have read. Raises
    IncompleteError on every rank, naming what is missing, if no save is complete, and
    NotFoundError if no node has any.
    """
    collective = comm.begin_collective(operation, timeout_seconds=timeout_seconds)
    node, leaders = topology.node, topology.node_leaders
    with collective.step("inventory"):
        is_leader = collective.rank in leaders
        message = b""
        if is_leader:
            message = codec.pack(_describe_folders(collective, opened, node), "inventory")
        messages = collective.collect("inventory", message, dst=0, ranks=leaders)
    with collective.step("select"):
        answer = _select_save(collective, messages, operation) if collective.rank == 0 else None
        body = collective.broadcast("index", answer)
        if body == _PLAIN:
            return None
        index = decode_cluster_index(body)
    local = [number for number, folder in enumerate(index.folders) if folder.node == node]
    traffic = opened.policy.traffic
    with collective.step("serve"):
        server = FolderServer(
            [(index.folders[number].root, index.folders[number].files) for number in local],
            traffic=traffic,
            timeout_seconds=timeout_seconds,
        )
        resources.callback(server.close)
        reused = _reuse_opened(index, local, opened)  # the server opened them before
        peers = _assign_servers(collective, server.address, topology)
    with collective.step("open"):
        local_storages = {
            number: reused[number].storage
            if number in reused
            else _pinned_storage(index.folders[number].root, resources)
            for number in local
        }
        storages = _open_storages(
            index, peers, local_storages, traffic=traffic, timeout_seconds=timeout_seconds
        )
        folders = FolderCache(storages, reused, save_id=index.save_id)
        resources.callback(folders.close)
        _ask_one_peer(collective, storages)
    return ClusterSource(
        index, folders, local=local, rotation=collective.rank, policy=opened.policy
    )


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
    reports = [codec.unpack(message, "inventory") for message in messages]
    if all(report["error_kind"] == "plain" for report in reports):
        return _PLAIN

    @cache
    def tensor_list_of(name: str) -> TensorList:
        return decode_tensor_list(zlib.decompress(collective.get(f"tensor-list/{name}")))

    def errors(*kinds: str) -> list[str]:
        return [
            f"node {node}: {report['error']}"
            for node, report in enumerate(reports)
            if report["error_kind"] in kinds
        ]

    inventories = [
        decode_inventory(body, tensor_list_of)
        for report in reports
        for body in report["inventories"]
    ]
    if not inventories:
        is_absent = all(report["error_kind"] == "absent" for report in reports)
        error_class = NotFoundError if is_absent else IncompleteError
        raise error_class("; ".join(errors("absent", "damaged", "plain")))
    damaged = errors("damaged")
    index = select_save(inventories, label=operation, damaged=damaged)
    return replace(index, problems=(*index.problems, *damaged)).encode()


def _describe_folders(
    collective: Collective, opened: OpenedFolders, node: int
) -> dict[str, object]:
    """Return this node's inventories, or why it has none: "absent", "damaged" or "plain"."""
    error = opened.error
    if error is not None and not isinstance(error, CheckpointError):
        raise error
    if error is None and all(folder.manifest is None for folder in opened.folders):
        text = "has a folder without a manifest"
        return {"inventories": [], "error_kind": "plain", "error": text}
    inventories, replica_problems = read_node_inventories(opened.folders, opened.paths, node=node)
    if not inventories:
        kind = "absent" if isinstance(error, NotFoundError) else "damaged"
        return {"inventories": [], "error_kind": kind, "error": str(error)}
    problems = [*opened.problems, *replica_problems]
    if error is not None and not isinstance(error, NotFoundError):
        problems.append(str(error))
    first = inventories[0]
    inventories[0] = replace(first, problems=(*problems, *first.problems))
    bodies = [
        inventory.encode(list_name=_send_tensor_list(collective, inventory.tensor_list))
        for inventory in inventories
    ]
    return {"inventories": bodies, "error_kind": ""}


def _send_tensor_list(collective: Collective, tensor_list: TensorList) -> str:
    """Publish a tensor list unless another node has, and return its name. Most nodes share one."""
    body = tensor_list.encode()
    name = tensor_list_name(body)
    if collective.add(f"tensor-list-count/{name}") == 1:
        collective.put(f"tensor-list/{name}", zlib.compress(body))
    return name


def _assign_servers(collective: Collective, address: Address, topology: Topology) -> list[Peer]:
    """Return, for each node, the rank to read from; clients are spread evenly.

    Collective.
    """
    ranks_by_node = topology.ranks_by_node
    local_world = max(map(len, ranks_by_node))
    servers_by_local_rank = [
        [ranks[local_rank % len(ranks)] for ranks in ranks_by_node]
        for local_rank in range(local_world)
    ]
    addresses = collective.collect_json("addresses", address, dst=0, ranks=range(collective.world))
    if collective.rank == 0:
        for local_rank, servers in enumerate(servers_by_local_rank):
            collective.put_json(f"servers/{local_rank}", [addresses[rank] for rank in servers])
    local_rank = ranks_by_node[topology.node].index(topology.rank)
    addresses = collective.get_json(f"servers/{local_rank}")
    servers = servers_by_local_rank[local_rank]
    return [
        Peer(collective.ranks[rank], Address(*fields))
        for rank, fields in zip(servers, addresses, strict=True)
    ]


def _pinned_storage(root: str, resources: ExitStack) -> LocalStorage:
    storage = LocalStorage(root)
    storage.open_handle()
    resources.callback(storage.directory.close)
    return storage


def _open_storages(
    index: ClusterIndex,
    peers: Sequence[Peer],
    local_storages: Mapping[int, Reader],
    *,
    traffic: Traffic,
    timeout_seconds: float,
) -> list[Reader]:
    """Return a reader for each folder: direct on this node, through a peer elsewhere."""
    storages: list[Reader] = []
    folders_by_node: dict[int, int] = {}  # folders so far
    for folder_number, folder in enumerate(index.folders):
        number = folders_by_node.get(folder.node, 0)
        folders_by_node[folder.node] = number + 1
        if folder_number in local_storages:
            storages.append(local_storages[folder_number])
            continue
        storages.append(
            PeerStorage(
                peers[folder.node],
                folder=number,
                root=folder.root,
                names=folder.files,
                traffic=traffic,
                timeout_seconds=timeout_seconds,
            )
        )
    return storages


def _ask_one_peer(collective: Collective, storages: Sequence[Reader]) -> None:
    """Raise StorageError if a peer does not answer: folders are opened while reading.

    A missing connection must show before the target is modified.
    """
    remote = [storage for storage in storages if isinstance(storage, PeerStorage)]
    if remote:
        remote[collective.rank % len(remote)].size(names.MANIFEST)

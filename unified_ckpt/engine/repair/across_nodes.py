"""Repairs the folders of several nodes from each other. Collective; one rank per node works.

A node without a folder, or with a folder of another save, is no source for others. If nodes share a
folder, one of them repairs it: locks do not work between nodes on every filesystem.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any

from unified_ckpt.engine.repair.expected import inspect_copy
from unified_ckpt.engine.repair.repair import RepairReport, repair_folder
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.exchange.file_server import FolderServer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import parse_address
from unified_ckpt.runtime.storage.locks import repair_lock, shared_lock
from unified_ckpt.runtime.storage.storage import LocalStorage

Reports = tuple[RepairReport, ...]  # of the nodes, in the order of their first ranks


def repair_across_nodes(
    comm: Comm, path: str, nodes: Sequence[int], *, timeout_seconds: float
) -> Reports:
    """Repair the folder at `path` of each node; return all nodes' reports on every rank.
    Collective.

    `nodes` gives the node of each rank. What one node cannot repair is in its report and does not
    stop the others. NotFoundError if no node has the folder, RankError if a rank is gone.
    """
    collective = comm.begin_collective(f"repair of {path}", timeout_seconds=timeout_seconds)
    node, node_leaders = nodes[collective.rank], first_ranks(nodes)
    is_leader, root = node_leaders[node] == collective.rank, os.path.realpath(path)
    with ExitStack() as resources, collective.propagating_errors():
        with ExitStack() as marker_scope:
            with collective.step("serve"):
                if is_leader:
                    marker = _create_marker(root, marker_scope) if len(node_leaders) > 1 else ""
                    collective.put(
                        f"server/{node}", _serve(root, marker, resources, timeout_seconds)
                    )
                served = [
                    json.loads(collective.get(f"server/{other_node}"))
                    for other_node in range(len(node_leaders))
                ]
                if not any(served):
                    raise NotFoundError(f"{root}: does not exist on any node")
            with collective.step("select-repairers"):
                if is_leader:
                    collective.put(f"repairer/{node}", str(_repairer(root, served, node)).encode())
                repairers = [
                    int(collective.get(f"repairer/{other_node}"))
                    for other_node in range(len(node_leaders))
                ]
        with collective.step("repair"):
            if is_leader and repairers[node] != node:
                collective.put(f"report/{node}", collective.get(f"report/{repairers[node]}"))
            elif is_leader:
                source_nodes = [
                    other_node
                    for other_node, info in enumerate(served)
                    if info and other_node != node and repairers[other_node] == other_node
                ]
                peers = [
                    _peer(collective, node_leaders[other_node], served[other_node])
                    for other_node in source_nodes
                ]
                for peer in peers:
                    resources.callback(peer.close)
                report = (
                    _repair_local(collective, root, peers)
                    if served[node]
                    else _failed_report(root, f"{root}: does not exist on this node")
                )
                collective.put(f"report/{node}", json.dumps(asdict(report)).encode())
        with collective.step("done"):  # peers may read here until they are done
            return tuple(
                _parse_report(collective.get(f"report/{other_node}"))
                for other_node in range(len(node_leaders))
            )


def _create_marker(root: str, marker_scope: ExitStack) -> str:
    """Create a uniquely named file until the scope closes; return its name, "" on failure."""
    marker = f"{names.REPAIR_TMP}mark-{secrets.token_hex(8)}"
    storage = marker_scope.enter_context(LocalStorage(root))
    with suppress(CheckpointError):
        marker_scope.callback(_remove_marker, storage, marker)
        storage.put(marker, b"mark", fsync=True)
        return marker
    return ""


def _remove_marker(storage: LocalStorage, marker: str) -> None:
    with suppress(CheckpointError):
        storage.remove_file(marker)


def _repairer(root: str, served: Sequence[dict[str, object] | None], node: int) -> int:
    """Return the first node whose marker is in this folder.

    Looks up names: directory listings may be stale.
    """
    storage = LocalStorage(root)
    for other_node, info in enumerate(served[:node]):
        with suppress(CheckpointError):
            if (
                served[node]
                and info
                and info["mark"]
                and storage.size(str(info["mark"])) is not None
            ):
                return other_node
    return node


def _serve(root: str, marker: str, resources: ExitStack, timeout_seconds: float) -> bytes:
    """Serve the folder to other nodes and return its address, or null if there is no folder."""
    if not os.path.isdir(root):
        return b"null"
    files = [
        name
        for name in LocalStorage(root).names()
        if name.endswith((".safetensors", names.index_name(""))) or name == names.MANIFEST
    ]
    server = FolderServer([(root, files)], timeout_seconds=timeout_seconds)
    resources.callback(server.close)
    return json.dumps(
        {"address": server.address.encode(), "root": root, "files": files, "mark": marker}
    ).encode()


def _peer(collective: Collective, rank: int, served: dict[str, object]) -> PeerStorage:
    files = served["files"]
    return PeerStorage(
        parse_address(str(served["address"])),
        folder=0,
        root=str(served["root"]),
        rank=collective.ranks[rank],
        names=files if isinstance(files, list) else [],
        timeout_seconds=collective.timeout_seconds,
    )


def _repair_local(collective: Collective, root: str, peers: Sequence[PeerStorage]) -> RepairReport:
    try:
        with repair_lock(root) as folder, shared_lock(root), LocalStorage(root) as storage:
            manifest, same_save, notes = inspect_copy(storage).manifest, list(peers), []
            if manifest is not None:
                for peer in peers:
                    peer_manifest = inspect_copy(peer).manifest
                    if peer_manifest is not None and peer_manifest.save_id != manifest.save_id:
                        same_save.remove(peer)
                        notes.append(
                            f"{peer.root} on another node: has another save, "
                            f"{peer_manifest.save_id} (step {peer_manifest.step})"
                        )
            report = repair_folder(
                storage, same_save, folder=folder, progress=lambda _: collective.heartbeat()
            )
            return replace(report, notes=(*notes, *report.notes))
    except CheckpointError as error:
        return _failed_report(root, str(error))


def _parse_report(body: bytes) -> RepairReport:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(body).items()
    }
    return RepairReport(**fields)


def _failed_report(root: str, problem: str) -> RepairReport:
    return RepairReport(root, "", (), (), (problem,), (), 0)

"""Repairs the folders of several nodes from each other. Collective; one rank per node works.

A node without a folder, or with a folder of another save, is no source for others. If nodes share a
folder, one of them repairs it: locks do not work between nodes on every filesystem.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any

from unified_ckpt.engine.repair.copies import open_source, open_target
from unified_ckpt.engine.repair.repair import FolderRepair, RepairReport, repair
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.exchange.file_server import FolderServer, Peer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import Address
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.locks import repair_lock, shared_lock
from unified_ckpt.runtime.storage.regular_files import is_folder
from unified_ckpt.runtime.storage.storage import LocalStorage

Reports = tuple[RepairReport, ...]  # of the nodes, in the order of their first ranks


def repair_across_nodes(
    comm: Comm, path: str, topology: Topology, *, timeout_seconds: float
) -> Reports:
    """Repair the folder at `path` of each node; return all nodes' reports on every rank.
    Collective.

    What one node cannot repair is in its report and does not
    stop the others. NotFoundError if no node has the folder, RankError if a rank is gone.
    """
    collective = comm.begin_collective(f"repair of {path}", timeout_seconds=timeout_seconds)
    node, leaders, root = topology.node, topology.node_leaders, os.path.realpath(path)
    is_leader = topology.is_node_leader
    if is_bucket_url(path):
        with collective.propagating_errors(), collective.step("repair"):
            fields = asdict(repair(path)) if collective.rank == 0 else None
            return (_parse_report(collective.broadcast_json("report", fields)),)

    def gather(key: str, value: object) -> list[Any]:
        values = collective.all_gather_json(key, value)
        return [values[leader] for leader in leaders]

    with ExitStack() as resources, collective.propagating_errors():
        with ExitStack() as marker_scope:
            with collective.step("serve"):
                served = None
                if is_leader and is_folder(root):
                    marker = _create_marker(root, marker_scope) if topology.spans_nodes else ""
                    served = _serve(root, marker, resources, timeout_seconds)
                offers = gather("server", served)
                if not any(offers):
                    raise NotFoundError(f"{root}: does not exist on any node")
            with collective.step("select-repairers"):
                repairers = gather("repairer", _repairer(root, offers, node) if is_leader else None)
        with collective.step("repair"):  # ends once no peer reads here any more
            report = None
            if is_leader and repairers[node] == node:
                peers = [
                    _peer(collective, leaders[number], offer)
                    for number, offer in enumerate(offers)
                    if offer and number != node and repairers[number] == number
                ]
                for peer in peers:
                    resources.callback(peer.close)
                report = asdict(_repair_local(collective, root, peers))
            reports = gather("report", report)
        return tuple(_parse_report(reports[repairer]) for repairer in repairers)


def _create_marker(root: str, marker_scope: ExitStack) -> str:
    """Create a uniquely named file until the scope closes; return its name, "" on failure."""
    marker = f"{names.REPAIR_TMP}mark-{secrets.token_hex(8)}"
    storage = marker_scope.enter_context(LocalStorage(root))
    with suppress(CheckpointError):
        marker_scope.callback(_remove_marker, storage, marker)
        storage.put(marker, b"mark")
        storage.sync(marker)  # NFS clients may see it once it is closed
        return marker
    return ""


def _remove_marker(storage: LocalStorage, marker: str) -> None:
    with suppress(CheckpointError):
        storage.remove_file(marker)


def _repairer(root: str, offers: Sequence[dict[str, Any] | None], node: int) -> int:
    """Return the first node whose marker is in this folder.

    Looks up names: directory listings may be stale.
    """
    storage = LocalStorage(root)
    for number, offer in enumerate(offers[:node] if offers[node] else ()):
        with suppress(CheckpointError):
            if offer and offer["mark"] and storage.size(offer["mark"]) is not None:
                return number
    return node


def _serve(
    root: str, marker: str, resources: ExitStack, timeout_seconds: float
) -> dict[str, object]:
    """Serve the folder to other nodes, and return what these need to read it."""
    files = [
        name
        for name in LocalStorage(root).names()
        if name.endswith((".safetensors", names.index_name(""))) or name == names.MANIFEST
    ]
    server = FolderServer([(root, files)], traffic=Traffic(), timeout_seconds=timeout_seconds)
    resources.callback(server.close)
    return {"address": server.address, "root": root, "files": files, "mark": marker}


def _peer(collective: Collective, rank: int, offer: dict[str, Any]) -> PeerStorage:
    return PeerStorage(
        Peer(collective.ranks[rank], Address(*offer["address"])),
        folder=0,
        root=offer["root"],
        names=offer["files"],
        traffic=Traffic(),  # is not reported
        timeout_seconds=collective.timeout_seconds,
    )


def _repair_local(collective: Collective, root: str, peers: Sequence[PeerStorage]) -> RepairReport:
    """Repair this node's folder from those peers that have a valid manifest of the same save."""
    notes: list[str] = []
    try:
        if not is_folder(root):
            raise NotFoundError(f"{root}: does not exist on this node")
        with repair_lock(root) as folder, shared_lock(root), LocalStorage(root) as storage:
            target, sources = open_target(storage), []
            for peer in peers:
                try:
                    sources.append(open_source(peer, target))
                except CheckpointError as error:
                    notes.append(f"not used: {error}")
            report = FolderRepair(
                storage, target, sources, folder, lambda _: collective.heartbeat()
            ).run()
            return replace(report, notes=(*notes, *report.notes))
    except CheckpointError as error:
        return RepairReport(root, "", (), (), (str(error),), tuple(notes), 0)


def _parse_report(fields: dict[str, Any]) -> RepairReport:
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()
    }
    return RepairReport(**values)

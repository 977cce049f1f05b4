"""The folders of several machines, each mended from the others. Collective; the first rank of each machine works, the others wait.

A machine whose folder is of another save, or that has none, is no source for the others, and its own report says what it lacks. Of
machines that share a folder, one mends it: locks alone would not keep them apart on every file system.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any

from unified_ckpt.engine.repair.expected import look
from unified_ckpt.engine.repair.repair import RepairReport, mend
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.exchange.file_server import PeerStorage, Server
from unified_ckpt.runtime.exchange.tcp import parse_address
from unified_ckpt.runtime.storage.locks import mending, reading
from unified_ckpt.runtime.storage.storage import LocalStorage

Reports = tuple[RepairReport, ...]  # of the machines, in the order of their first ranks


def repair_together(
    comm: Comm, path: str, machines: Sequence[int], *, timeout_seconds: float
) -> Reports:
    """Collective. Mends the folder `path` of each machine; the reports of all machines, the same on every rank.

    `machines`: of each rank. What one machine cannot do is in its report, and does not stop the others. NotFoundError where no machine
    has such a folder, RankError where a rank is gone.
    """
    meeting = comm.meet(f"repair of {path}", same=False, timeout_seconds=timeout_seconds)
    own, leads = machines[meeting.rank], first_ranks(machines)
    lead, root = leads[own] == meeting.rank, os.path.realpath(path)
    with ExitStack() as held, meeting.telling():
        with ExitStack() as marked:
            with meeting.phase("serve"):
                if lead:
                    mark = _mark(root, marked) if len(leads) > 1 else ""
                    meeting.put(f"serves/{own}", _serve(root, mark, held, timeout_seconds))
                told = [
                    json.loads(meeting.get(f"serves/{machine}")) for machine in range(len(leads))
                ]
                if not any(told):
                    raise NotFoundError(f"{root}: there is no such folder on any machine")
            with meeting.phase("look"):
                if lead:
                    meeting.put(f"mender/{own}", str(_mender(root, told, own)).encode())
                menders = [int(meeting.get(f"mender/{machine}")) for machine in range(len(leads))]
        with meeting.phase("repair"):
            if lead and menders[own] != own:
                meeting.put(f"report/{own}", meeting.get(f"report/{menders[own]}"))
            elif lead:
                there = [
                    machine
                    for machine, one in enumerate(told)
                    if one and machine != own and menders[machine] == machine
                ]
                peers = [_peer(meeting, leads[machine], told[machine]) for machine in there]
                for peer in peers:
                    held.callback(peer.close)
                report = (
                    _repair(meeting, root, peers)
                    if told[own]
                    else _report(root, f"{root}: there is no such folder on this machine")
                )
                meeting.put(f"report/{own}", json.dumps(asdict(report)).encode())
        with meeting.phase("done"):  # others may read here until they are done
            return tuple(_parse(meeting.get(f"report/{machine}")) for machine in range(len(leads)))


def _mark(root: str, marked: ExitStack) -> str:
    """The name of a fresh file in the folder, until `marked` is closed; "" where none can be made."""
    mark, storage = (
        f"{names.MENDING}mark-{secrets.token_hex(8)}",
        marked.enter_context(LocalStorage(root)),
    )
    with suppress(CheckpointError):
        marked.callback(_unmark, storage, mark)
        storage.put(mark, b"mark", fsync=True)
        return mark
    return ""


def _unmark(storage: LocalStorage, mark: str) -> None:
    with suppress(CheckpointError):
        storage.remove_file(mark)


def _mender(root: str, told: Sequence[dict[str, object] | None], own: int) -> int:
    """The first machine whose mark is in this folder: by name, since a list of a folder may be an old one."""
    storage = LocalStorage(root)
    for machine, one in enumerate(told[:own]):
        with suppress(CheckpointError):
            if told[own] and one and one["mark"] and storage.size(str(one["mark"])) is not None:
                return machine
    return own


def _serve(root: str, mark: str, held: ExitStack, timeout_seconds: float) -> bytes:
    """Where the folder can be read from, which of its files, and how others know it; null where there is none."""
    if not os.path.isdir(root):
        return b"null"
    files = [
        name
        for name in LocalStorage(root).names()
        if name.endswith((".safetensors", names.index_name(""))) or name == names.MANIFEST
    ]
    server = Server([(root, files)], timeout_seconds=timeout_seconds)
    held.callback(server.close)
    return json.dumps(
        {"address": server.address.encode(), "root": root, "files": files, "mark": mark}
    ).encode()


def _peer(meeting: Meeting, rank: int, told: dict[str, object]) -> PeerStorage:
    files = told["files"]
    return PeerStorage(
        parse_address(str(told["address"])),
        folder=0,
        root=str(told["root"]),
        rank=meeting.ranks[rank],
        names=files if isinstance(files, list) else [],
        timeout_seconds=meeting.timeout_seconds,
    )


def _repair(meeting: Meeting, root: str, peers: Sequence[PeerStorage]) -> RepairReport:
    try:
        with mending(root) as folder, reading(root), LocalStorage(root) as storage:
            manifest, same, notes = look(storage).manifest, list(peers), []
            if manifest is not None:
                for peer in peers:
                    theirs = look(peer).manifest
                    if theirs is not None and theirs.save_id != manifest.save_id:
                        same.remove(peer)
                        notes.append(
                            f"{peer.root} on another machine: holds save {theirs.save_id} (step {theirs.step}), not this one"
                        )
            report = mend(storage, same, folder=folder, progress=lambda _: meeting.beat())
            return replace(report, notes=(*notes, *report.notes))
    except CheckpointError as error:
        return _report(root, str(error))


def _parse(body: bytes) -> RepairReport:
    told: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(body).items()
    }
    return RepairReport(**told)


def _report(root: str, problem: str) -> RepairReport:
    return RepairReport(root, "", (), (), (problem,), (), 0)

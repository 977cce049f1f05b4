"""Brings the folders of all machines together for a load: who has what, is it complete, who reads what from whom. Collective."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack

from unified_ckpt.engine.checkpoint import Folder, open_folder
from unified_ckpt.engine.joint import Inventory, Joint, choose, decode_inventory, take_inventory
from unified_ckpt.engine.source import Source
from unified_ckpt.errors import CheckpointError, IncompleteError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm import Comm, Meeting
from unified_ckpt.runtime.peers import PeerStorage, Server
from unified_ckpt.runtime.storage import LocalStorage, Reader, is_url
from unified_ckpt.runtime.wire import parse_address


def machine_numbers(comm: Comm, what: str, machine: str, *, timeout_seconds: float) -> list[int]:
    """Collective. The machine of each rank, counted from 0 in the order of their first ranks."""
    meeting = comm.meet(what, same=False, timeout_seconds=timeout_seconds)
    with meeting.phase("machines"):
        told = [name.decode() for name in meeting.collect("machine", machine.encode(), at=0, ranks=range(meeting.world))]
        if meeting.rank == 0:
            numbers = {name: number for number, name in enumerate(dict.fromkeys(told))}
            meeting.put("machines", json.dumps([numbers[name] for name in told]).encode())
    found: list[int] = json.loads(meeting.get("machines"))
    return found


def is_scattered(paths: Sequence[str], opened: Sequence[Folder] | Exception, machines: Sequence[int]) -> bool:
    """Whether the checkpoint may lie in several folders: several machines or paths, or a folder that says so of itself."""
    if any(is_url(path) for path in paths):
        return False
    if max(machines) > 0 or len(paths) > 1:
        return True
    manifest = opened[0].manifest if not isinstance(opened, Exception) else None
    return manifest is not None and manifest.island is not None


def gather(
    comm: Comm,
    what: str,
    paths: Sequence[str],
    opened: Sequence[Folder] | Exception,
    machines: Sequence[int],
    owned: ExitStack,
    *,
    timeout_seconds: float,
) -> Source:
    """Collective. The checkpoint that the machines have between them. `owned`: what is to be closed after all ranks have read.

    `opened`: this machine's folders, or why there is none. Raises IncompleteError, the same on every rank, where no complete copy of the
    newest save that any machine has is there, naming what is missing; NotFoundError where no machine has anything.
    """
    meeting = comm.meet(what, same=False, timeout_seconds=timeout_seconds)
    own = machines[meeting.rank]
    with meeting.phase("inventory"):
        if machines.index(own) == meeting.rank:
            meeting.put(f"inventory/{own}", _tell(paths, opened, own))
        told = [meeting.get(f"inventory/{machine}") for machine in range(max(machines) + 1)]
    with meeting.phase("choose"):
        if all(words == b"plain" for words in told) and not isinstance(opened, Exception):
            return opened[0]  # a folder without a manifest: each machine reads its own
        inventories = [one for words in told for one in _parse(words)]
        why = [f"machine {m}: {words[2:].decode()}" for m, words in enumerate(told) if words[:1] == b"!"]
        why += [f"machine {m}: has a folder without a manifest" for m, words in enumerate(told) if words == b"plain"]
        if not inventories:
            raise (NotFoundError if all(words[:2] == b"!-" for words in told) else IncompleteError)("; ".join(why))
        members, found = choose(inventories, where=what)
    mine = [one for one in inventories if one.machine == own]
    with meeting.phase("serve"):
        server = Server([(one.root, one.files) for one in mine], timeout_seconds=timeout_seconds)
        owned.callback(server.close)
        meeting.put(f"serves/{meeting.rank}", server.address.encode().encode())
    with meeting.phase("open"):
        folders = {number: open_folder(_storage(meeting, inventories, number, machines)) for number in members}
        for folder in folders.values():
            owned.callback(folder.close)
    lost = [f"machine {inventories[n].machine}: {text}" for n in members for text in inventories[n].lost]
    lost += [f"machine {m}: {words[2:].decode()}" for m, words in enumerate(told) if words[:2] == b"!+"]
    return Joint(found, folders, own=[n for n in members if inventories[n].machine == own], lost=lost, turn=meeting.rank)


def _tell(paths: Sequence[str], opened: Sequence[Folder] | Exception, machine: int) -> bytes:
    """What the first rank of a machine says: its inventories, "plain", or why it has none: nothing there ("!-"), or damage ("!+")."""
    aside = [folder for path in paths for folder in _aside(path)]
    if isinstance(opened, Exception):
        if not isinstance(opened, CheckpointError):
            raise opened
        if not aside:
            return (b"!-" if isinstance(opened, NotFoundError) else b"!+") + str(opened).encode()
        opened = []
    elif all(folder.manifest is None for folder in opened):
        return b"plain"
    try:
        bodies = [take_inventory(one, machine=machine).encode() for one in (*opened, *aside) if one.manifest is not None]
    finally:
        for folder in aside:
            folder.close()
    return b"=" + b"".join(len(body).to_bytes(8, "little") + body for body in bodies)


def _aside(path: str) -> list[Folder]:
    """Folders beside the checkpoint that are complete but for their name, or had it before: of saves that ended between the renames of
    several machines."""
    parent, name = os.path.split(path)
    found = []
    storage = LocalStorage(parent)
    if storage.kind("") != "folder":
        return []
    for entry in storage.names():
        if names.is_replaced(entry, name) or (names.is_staging(entry) and entry.endswith(f"-{name}")):
            try:
                folder = open_folder(LocalStorage(storage.path(entry)))
            except CheckpointError:
                continue  # unfinished: it has no manifest
            if folder.manifest is not None and folder.manifest.island is not None:
                found.append(folder)
    return found


def _parse(words: bytes) -> list[Inventory]:
    found, position = [], 1
    while words[:1] == b"=" and position < len(words):
        size = int.from_bytes(words[position : position + 8], "little")
        found.append(decode_inventory(words[position + 8 : position + 8 + size]))
        position += 8 + size
    return found


def _storage(meeting: Meeting, inventories: Sequence[Inventory], number: int, machines: Sequence[int]) -> Reader:
    """The folder itself on its own machine, else as one of that machine's ranks serves it; ranks take turns in whom they ask."""
    one = inventories[number]
    if one.machine == machines[meeting.rank]:
        return LocalStorage(one.root)
    servers = [rank for rank, machine in enumerate(machines) if machine == one.machine]
    rank = servers[meeting.rank % len(servers)]
    index = sum(other.machine == one.machine for other in inventories[:number])
    address = parse_address(meeting.get(f"serves/{rank}").decode())
    timeout = meeting.timeout_seconds
    return PeerStorage(address, folder=index, root=one.root, rank=meeting.ranks[rank], names=one.files, timeout_seconds=timeout)

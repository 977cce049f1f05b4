"""Brings the folders of all machines together for a load: who has what, is it complete, who reads what from whom. Collective."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from unified_ckpt.engine.folder.reader import Folder, open_folder, open_path
from unified_ckpt.engine.nodes.coverage import Whole, choose, decode_whole
from unified_ckpt.engine.nodes.folders import Folders
from unified_ckpt.engine.nodes.inventory import (
    Listing,
    decode_inventory,
    decode_listing,
    listing_name,
    take_inventory,
)
from unified_ckpt.engine.nodes.source import Joint
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import CheckpointError, IncompleteError, NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import everybody, first_ranks, numbered
from unified_ckpt.runtime.exchange.file_server import PeerStorage, Server
from unified_ckpt.runtime.exchange.tcp import Address, parse_address
from unified_ckpt.runtime.storage.storage import LocalStorage, Reader, is_url

_PLAIN = b"plain"  # says a machine whose folder has no manifest


def machine_numbers(comm: Comm, what: str, machine: str, *, timeout_seconds: float) -> list[int]:
    """Collective. The machine of each rank, counted from 0 in the order of their first ranks."""
    meeting = comm.meet(what, same=False, timeout_seconds=timeout_seconds)
    with meeting.phase("machines"):
        return numbered(everybody(meeting, "machine", machine))


@dataclass(frozen=True, slots=True)
class Opened:
    """This rank's folders. `error`: why it has none; `bad`: in sentences, why it lacks some of them."""

    folders: tuple[Folder, ...] = ()
    error: Exception | None = None
    bad: tuple[str, ...] = ()


def open_folders(paths: Iterable[str], owned: ExitStack, *, hold: bool) -> Opened:
    """What `gather` tells to all: of a folder that cannot be opened the others may have enough. `hold`: on one rank of each machine."""
    found: list[Folder] = []
    errors: list[CheckpointError] = []
    for path in paths:
        try:
            found.append(open_path(path, hold=hold))
        except CheckpointError as error:
            errors.append(error)
        except Exception as error:
            return Opened(error=error)
        else:
            owned.callback(found[-1].close)
    if not found and not errors:
        return Opened(error=NotFoundError("no path is given; needed that of a checkpoint"))
    if errors and all(
        folder.manifest is None for folder in found
    ):  # of weights without a manifest nothing tells what belongs to them
        return Opened(
            error=next(
                (error for error in errors if not isinstance(error, NotFoundError)), errors[0]
            )
        )
    return Opened(tuple(found), bad=tuple(map(str, errors)))


def find_source(
    comm: Comm,
    where: str,
    paths: Sequence[str],
    machines: Sequence[int],
    owned: ExitStack,
    *,
    timeout_seconds: float,
) -> Source | Exception:
    """The checkpoint at some paths of this machine, or why this rank has none. Collective where it may lie on several machines.

    `owned`: what is to be closed after all ranks have read.
    """
    opened = open_folders(paths, owned, hold=comm.rank in first_ranks(machines))
    if is_scattered(paths, opened, machines):
        return gather(
            comm,
            f"load of {where}",
            paths,
            opened,
            machines,
            owned,
            timeout_seconds=timeout_seconds,
        )
    return opened.error or opened.folders[0]


def is_scattered(paths: Sequence[str], opened: Opened, machines: Sequence[int]) -> bool:
    """Whether the checkpoint may lie in several folders: several machines or paths, or a folder that says so of itself."""
    if any(is_url(path) for path in paths):
        return False
    if max(machines) > 0 or len(paths) > 1:
        return True
    manifest = opened.folders[0].manifest if opened.folders else None
    return manifest is not None and manifest.island is not None


def gather(
    comm: Comm,
    what: str,
    paths: Sequence[str],
    opened: Opened,
    machines: Sequence[int],
    owned: ExitStack,
    *,
    timeout_seconds: float,
) -> Source:
    """Collective. The checkpoint that the machines have between them. `owned`: what is to be closed after all ranks have read.

    `opened`: this machine's folders. Raises IncompleteError, the same on every rank, where no complete copy of the
    newest save that any machine has is there, naming what is missing; NotFoundError where no machine has anything.
    """
    meeting = comm.meet(what, same=False, timeout_seconds=timeout_seconds)
    own, leads = machines[meeting.rank], first_ranks(machines)
    with meeting.phase("inventory"):
        words = _tell(meeting, paths, opened, own) if meeting.rank in leads else b""
        told = meeting.collect("inventory", words, at=0, ranks=leads)
    with meeting.phase("choose"):
        body = meeting.broadcast(
            "joint", _choose(meeting, told, what) if meeting.rank == 0 else None
        )
        if body == _PLAIN:
            if opened.error is not None:
                raise opened.error
            return opened.folders[0]  # a folder without a manifest: each machine reads its own
        found = decode_whole(body)
    mine = [number for number, one in enumerate(found.folders) if one.machine == own]
    with meeting.phase("serve"):
        server = Server(
            [(found.folders[n].root, found.folders[n].files) for n in mine],
            timeout_seconds=timeout_seconds,
        )
        owned.callback(server.close)
        known = _opened(
            found, mine, opened
        )  # after the server has them, so that both have the same
        servers = _servers(meeting, server.address, machines)
    with meeting.phase("open"):
        folders = Folders(
            _storages(meeting, found, servers, own, known, owned), known, save_id=found.save_id
        )
        owned.callback(folders.close)
    return Joint(found, folders, own=mine, turn=meeting.rank)


def _opened(found: Whole, mine: Sequence[int], opened: Opened) -> dict[int, Folder]:
    """Folders of the save that this rank has opened already, by number: their headers are parsed once.

    StorageError where another save has taken the place of one since the first rank of the machine told of it, or this rank opened it.
    """
    roots = {found.folders[number].root: number for number in mine}
    known = {roots[one.storage.root]: one for one in opened.folders if one.storage.root in roots}
    for one in known.values():
        has = one.manifest.save_id if one.manifest is not None else None
        if has != found.save_id or (
            isinstance(one.storage, LocalStorage) and one.storage.place.is_replaced()
        ):
            raise StorageError(
                f"{one.storage.root}: another save took its place while the ranks opened it; needed save {found.save_id}, of which the "
                "first rank of this machine told; load again"
            )
    return known


def _choose(meeting: Meeting, told: Sequence[bytes], what: str) -> bytes:
    """What rank 0 tells all: the save to read, where every box of it is; or that each machine reads a folder of its own."""
    if all(words == _PLAIN for words in told):
        return _PLAIN
    listings: dict[str, Listing] = {}

    def listing_of(name: str) -> Listing:
        if name not in listings:
            listings[name] = decode_listing(zlib.decompress(meeting.get(f"listing-of/{name}")))
        return listings[name]

    inventories = [decode_inventory(body, listing_of) for words in told for body in _bodies(words)]
    why = [
        f"machine {m}: {words[2:].decode()}" for m, words in enumerate(told) if words[:1] == b"!"
    ]
    why += [
        f"machine {m}: has a folder without a manifest"
        for m, words in enumerate(told)
        if words == _PLAIN
    ]
    if not inventories:
        raise (NotFoundError if all(words[:2] == b"!-" for words in told) else IncompleteError)(
            "; ".join(why)
        )
    damaged = [
        f"machine {m}: {words[2:].decode()}" for m, words in enumerate(told) if words[:2] == b"!+"
    ]
    found = choose(inventories, where=what, damaged=damaged)
    return replace(found, lost=(*found.lost, *damaged)).encode()


def _tell(meeting: Meeting, paths: Sequence[str], opened: Opened, machine: int) -> bytes:
    """What the first rank of a machine says: its inventories, "plain", or why it has none: nothing there ("!-"), or damage ("!+")."""
    error = opened.error
    if error is not None and not isinstance(error, CheckpointError):
        raise error
    aside, bad = [folder for path in paths for folder in _aside(path)], list(opened.bad)
    copies = [folder for path in paths for folder in _copies(path, bad)]
    copies += [
        folder for one in aside for folder in _copies(one.storage.root, [])
    ]  # a crash may have cut them off
    try:
        if error is not None:
            if not aside and not copies:
                return (b"!-" if isinstance(error, NotFoundError) else b"!+") + str(error).encode()
            bad += [str(error)] if not isinstance(error, NotFoundError) else []
        elif all(folder.manifest is None for folder in opened.folders):
            return _PLAIN
        own = (*opened.folders, *aside)
        inventories = [
            take_inventory(one, machine=machine, copy=False)
            for one in own
            if one.manifest is not None
        ]
        inventories += [take_inventory(one, machine=machine, copy=True) for one in copies]
    finally:
        for folder in (*aside, *copies):
            folder.close()
    inventories[0] = replace(inventories[0], lost=(*bad, *inventories[0].lost))
    bodies = [one.encode(listing=_tell_listing(meeting, one.listing)) for one in inventories]
    return b"=" + b"".join(len(body).to_bytes(8, "little") + body for body in bodies)


def _tell_listing(meeting: Meeting, listing: Listing) -> str:
    """The name by which rank 0 finds it. The first machine to have one tells it: the others' are mostly the same."""
    body = listing.encode()
    name = listing_name(body)
    if meeting.count(f"listing/{name}") == 1:
        meeting.put(f"listing-of/{name}", zlib.compress(body))
    return name


def _aside(path: str) -> list[Folder]:
    """Folders beside the checkpoint that are complete but for their name, or had it before: of saves that ended between the renames of
    several machines."""
    parent, name = os.path.split(path)
    found = []
    storage = LocalStorage(parent)
    if storage.kind("") != "folder":
        return []
    for entry in storage.names():
        if names.is_replaced(entry, name) or names.is_staging_of(entry, name):
            try:
                folder = open_folder(LocalStorage(storage.path(entry)))
            except CheckpointError:
                continue  # unfinished: it has no manifest
            if folder.manifest is not None and folder.manifest.island is not None:
                found.append(folder)
    return found


def _copies(path: str, bad: list[str]) -> list[Folder]:
    """What the folder keeps of other machines' folders. `bad`: gets, in sentences, what cannot be read of it."""
    storage, found = LocalStorage(os.path.join(path, names.REPLICAS)), []
    for entry in storage.names() if storage.kind("") == "folder" else []:
        try:
            folder = open_folder(LocalStorage(storage.path(entry)))
        except CheckpointError as error:
            bad.append(str(error))
            continue
        if folder.manifest is not None and folder.manifest.island is not None:
            found.append(folder)
        else:
            bad.append(
                f"{folder.storage.root}: has no {names.MANIFEST} of a machine's folder; needed a copy of one"
            )
    return found


def _bodies(words: bytes) -> list[bytes]:
    """The encoded inventories of a machine."""
    found, position = [], 1
    while words[:1] == b"=" and position < len(words):
        size = int.from_bytes(words[position : position + 8], "little")
        found.append(words[position + 8 : position + 8 + size])
        position += 8 + size
    return found


def _servers(
    meeting: Meeting, address: Address, machines: Sequence[int]
) -> list[tuple[int, Address]]:
    """Collective. Of each machine, the rank that this one is to ask, and where; the ranks of a machine take turns in whom they ask."""
    ranks: dict[int, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    turns = max(map(len, ranks.values()))
    turn = ranks[machines[meeting.rank]].index(meeting.rank) % turns
    asked = [
        [ranks[machine][turn % len(ranks[machine])] for machine in range(len(ranks))]
        for turn in range(turns)
    ]
    told = meeting.collect("serves", address.encode().encode(), at=0, ranks=range(meeting.world))
    if meeting.rank == 0:
        for number, servers in enumerate(asked):
            meeting.put(
                f"servers/{number}", zlib.compress(b"\n".join(told[rank] for rank in servers))
            )
    texts = zlib.decompress(meeting.get(f"servers/{turn}", of=0)).decode().split("\n")
    return [(rank, parse_address(text)) for rank, text in zip(asked[turn], texts, strict=True)]


def _pinned(root: str, owned: ExitStack) -> LocalStorage:
    storage = LocalStorage(root)
    storage.pin()
    owned.callback(storage.place.close)
    return storage


def _storages(
    meeting: Meeting,
    found: Whole,
    servers: Sequence[tuple[int, Address]],
    own: int,
    known: Mapping[int, Folder],
    owned: ExitStack,
) -> list[Reader]:
    """Each folder itself on its own machine, else as one of that machine's ranks serves it. StorageError where one of those does not."""
    storages: list[Reader] = []
    served: dict[int, int] = {}  # folders so far, by machine
    for index, one in enumerate(found.folders):
        number = served.get(one.machine, 0)
        served[one.machine] = number + 1
        if one.machine == own:
            storages.append(known[index].storage if index in known else _pinned(one.root, owned))
            continue
        rank, address = servers[one.machine]
        storages.append(
            PeerStorage(
                address,
                folder=number,
                root=one.root,
                rank=meeting.ranks[rank],
                names=one.files,
                timeout_seconds=meeting.timeout_seconds,
            )
        )
    # A rank opens few of the folders, and when it reads; that there is a way between machines has to be known before the first byte is
    # written. So each asks one of them.
    elsewhere = [storage for storage in storages if isinstance(storage, PeerStorage)]
    if elsewhere:
        elsewhere[meeting.rank % len(elsewhere)].size(names.MANIFEST)
    return storages

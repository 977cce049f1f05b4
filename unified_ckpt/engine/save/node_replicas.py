"""Copies of what a machine stores, in the folders of the machines after it: as many machines may be lost as there are further copies.

How data could be lost: a copy is counted that is not there. (1) It is of another save, or of another machine. So what a machine serves
must name this save and that machine. (2) Bytes are damaged on the way, or on the disk that they are read from: every block is compared
with its digest, and the memory that was compared is written. (3) A copy that a crash cut off is taken for a whole one: the manifest of
each copy is written last, after its files are on the disk. (4) The checkpoint gets its name before the copies are there: they are made
before the gate at which all machines give the name. (5) What is believed to be on enough machines is not: what is counted is what the
machines' plans store, by part and name; two fragment files are the same only if they hold the same fragments; and several machines that
share a folder are one. (6) Orders of another layout are followed: they go with the plan, and are asked for anew whenever any rank has
another one. (7) A load mixes saves: it joins copies by their save id, as any folder. Each is a test in tests/test_machine_copies.py.

A copy is a folder of its own within the checkpoint, so that whatever renames, withdraws or removes that does so to the copies, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from unified_ckpt.core.nodes.node_groups import FRAGMENTS
from unified_ckpt.core.nodes.replica_placement import spread
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.copy import Copy
from unified_ckpt.engine.folder.manifest import write_manifest
from unified_ckpt.engine.folder.reader import Folder, open_folder
from unified_ckpt.engine.plan.save_plan import Book
from unified_ckpt.engine.save.node_local import Gate
from unified_ckpt.errors import IntegrityError, RankError
from unified_ckpt.format import index, names
from unified_ckpt.format.manifest import IndexFile, Manifest, Part
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.exchange.file_server import PeerStorage, Server
from unified_ckpt.runtime.exchange.tcp import parse_address
from unified_ckpt.runtime.storage.storage import LocalStorage

_HEED_NBYTES = 64 << 20  # copied between two looks whether another rank has failed


@dataclass(frozen=True, slots=True)
class Orders:
    """What this island copies: files by the numbers of the islands that have them. Empty where nobody asked for copies."""

    files: Mapping[int, Sequence[str]]


def check_copies(gate: Gate, copies: int) -> None:
    """Collective over all islands. RankError where ranks want different numbers, or more than there are islands."""
    with gate.together("machine-copies"):
        wanted = int(gate.meeting.broadcast("machine-copies-wanted", str(copies).encode()))
        if wanted != copies:
            raise RankError(
                f"rank {gate.meeting.rank} saves with machine_copies={copies}, rank 0 with {wanted}; needed the same"
            )
        if copies > gate.island.count:
            raise RankError(
                f"machine_copies={copies}: the ranks are on {gate.island.count} machines that have a folder of their own; needed {copies} "
                "or more of them, or fewer copies"
            )


def plan_copies(gate: Gate, book: Book | None, *, copies: int) -> Orders:
    """Collective over all islands, once for a layout. Rank 0 is told what each island stores, equal words once, and tells who copies."""
    meeting, number = gate.meeting, gate.island.number
    if copies == 1:
        return Orders({})
    with gate.together("copies"):
        if book is not None:
            holding, units = holding_of(book)
            for name, members in units.items():
                if meeting.count(f"units/{name}") == 1:
                    meeting.put(f"units-of/{name}", json.dumps(members).encode())
            meeting.put(f"holding/{number}", json.dumps(holding).encode())
        if meeting.rank == 0:
            holdings = [
                json.loads(meeting.get(f"holding/{one}")) for one in range(gate.island.count)
            ]
            distinct = dict.fromkeys(name for holding in holdings for name in holding.values())
            units_of = {name: json.loads(meeting.get(f"units-of/{name}")) for name in distinct}
            for one, order in enumerate(spread(holdings, units_of, copies=copies)):
                meeting.put(f"orders/{one}", json.dumps(order).encode())
        told = json.loads(meeting.get(f"orders/{number}"))
    return Orders({int(source): tuple(files) for source, files in told.items()})


def holding_of(book: Book) -> tuple[dict[str, str], dict[str, list[str]]]:
    """What an island stores, for `spread`. Whole tensors are units of their own: machines may file the same ones differently. The
    fragments of a file are one: they are many, and machines that have the same ones are alike."""
    holding: dict[str, str] = {}
    units: dict[str, list[str]] = {}
    for part, weight_map in book.weight_maps.items():
        members: dict[str, list[str]] = {}
        for fqn, file in weight_map.items():
            members.setdefault(file, []).append(fqn)
        for file, fqns in members.items():
            name = _name([part, sorted(fqns)])
            holding[file] = name
            units[name] = (
                [name] if part.endswith(FRAGMENTS) else [_name([part, fqn]) for fqn in sorted(fqns)]
            )
    return holding, units


def _name(words: object) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32]


def take_copies(
    gate: Gate,
    own: Meeting,
    storage: LocalStorage,
    construction: commit.Construction,
    orders: Orders,
    *,
    fsync: bool,
) -> None:
    """Collective over all islands, whose folders are complete but for their copies. `own`: the meeting of this island, whose ranks share
    the copying, file by file; its first rank serves what others ask for.

    StorageError or IntegrityError on every rank of all islands where one cannot.
    """
    if not orders.files:
        return
    with ExitStack() as owned:  # served until all are through, or one has said why it is not
        with gate.together("copy"):
            if own.rank == 0:
                owned.callback(_serve(gate, storage, construction, orders).close)
            sources = _Sources(gate, construction)
            owned.callback(sources.close)
            if own.rank == 0:
                commit.check_room(
                    storage,
                    construction,
                    sum(_nbytes(sources[n], files) for n, files in orders.files.items()),
                )
            gate.meeting.get(_key(gate.island.number))  # from here on the folders are there
            nearest = sorted(
                orders.files, key=lambda source: (gate.island.number - source) % gate.island.count
            )
            tasks = [
                (n, file)
                for n in nearest
                for file in (names.DIGESTS, names.EXTRA, names.RANK_EXTRA, *orders.files[n])
            ]
            beat = _beat(gate.meeting)
            for source, file in tasks[own.rank :: own.world]:
                _copy(
                    Copy(sources[source], storage, _place(construction, source), fsync, beat),
                    sources[source],
                    file,
                )
        with gate.together("seal"):
            if own.rank == 0:
                for source, files in orders.files.items():
                    _seal(
                        sources[source], files, storage, _place(construction, source), fsync=fsync
                    )
                if fsync:
                    storage.sync_folder(f"{construction.folder}/{names.REPLICAS}")


class _Sources:
    """The folders of other islands, by number, each opened when it is first wanted."""

    def __init__(self, gate: Gate, construction: commit.Construction) -> None:
        self._gate, self._save_id = gate, construction.save_id
        self._opened: dict[int, Folder] = {}

    def __getitem__(self, number: int) -> Folder:
        if number not in self._opened:
            self._opened[number] = self._open(number)
        return self._opened[number]

    def _open(self, number: int) -> Folder:
        """IntegrityError where what is served is not what this island of this save wrote."""
        meeting = self._gate.meeting
        told = json.loads(meeting.get(_key(number)))
        address, seconds = parse_address(told["address"]), meeting.timeout_seconds
        rank = meeting.ranks[told["rank"]]
        folder = open_folder(
            PeerStorage(
                address,
                folder=0,
                root=told["root"],
                rank=rank,
                names=told["files"],
                timeout_seconds=seconds,
            )
        )
        check_source(folder, save_id=self._save_id, number=number)
        return folder

    def close(self) -> None:
        for folder in self._opened.values():
            folder.close()


def check_source(folder: Folder, *, save_id: str, number: int) -> Manifest:
    """The manifest of a folder; IntegrityError unless it is of this save and of the island `number`."""
    manifest = folder.manifest
    found = (
        (manifest.save_id, manifest.island.number)
        if manifest is not None and manifest.island is not None
        else None
    )
    if manifest is None or found != (save_id, number):
        raise IntegrityError(
            f"{folder.storage.root}: is {found}; needed what machine {number} wrote of save {save_id}"
        )
    return manifest


def _serve(
    gate: Gate, storage: LocalStorage, construction: commit.Construction, orders: Orders
) -> Server:
    """Makes the folders for copies, and says where this island's files are to be had."""
    manifest = commit.committed(storage, construction.folder)
    if manifest is None:
        raise AssertionError("it is complete but for its copies")
    files = [*manifest.files(), names.MANIFEST]
    server = Server(
        [(storage.path(construction.folder), files)], timeout_seconds=gate.meeting.timeout_seconds
    )
    try:
        storage.make_folder(f"{construction.folder}/{names.REPLICAS}")
        for source in orders.files:
            storage.make_folder(_place(construction, source))
        told = {
            "address": server.address.encode(),
            "root": storage.path(construction.folder),
            "rank": gate.meeting.rank,
            "files": files,
        }
        gate.meeting.put(_key(gate.island.number), json.dumps(told).encode())
    except BaseException:
        server.close()
        raise
    return server


def _key(number: int) -> str:
    return f"serves/{number}"


def _place(construction: commit.Construction, source: int) -> str:
    return f"{construction.folder}/{names.replica_name(source)}"


def _beat(meeting: Meeting) -> Callable[[int], None]:
    """A sign of life with each block; and the end of it where another rank has failed."""
    since = 0

    def beat(nbytes: int) -> None:
        nonlocal since
        meeting.beat()
        since += nbytes
        if since >= _HEED_NBYTES:
            since = 0
            meeting.heed()

    return beat


def _copy(copy: Copy, folder: Folder, file: str) -> None:
    """One file, if the folder has it."""
    manifest = _manifest(folder)
    for single in manifest.singles():
        if single.file == file:
            copy.single(file, single.nbytes, single.crc)
    for part, record in manifest.parts.items():
        if file in record.files:
            copy.tensors(part, file, record.files[file].header_crc)


def _manifest(folder: Folder) -> Manifest:
    if folder.manifest is None:
        raise AssertionError("checked when it was opened")
    return folder.manifest


def _nbytes(folder: Folder, files: Collection[str]) -> int:
    """Of these files and of those that go with them."""
    manifest = _manifest(folder)
    return sum(single.nbytes for single in manifest.singles()) + sum(
        of.nbytes
        for part in manifest.parts.values()
        for file, of in part.files.items()
        if file in files
    )


def reduced(folder: Folder, files: Collection[str]) -> tuple[Manifest, dict[str, bytes]]:
    """Manifest and indexes of a copy that has only these files of the parts. All else is said as in the folder itself."""
    manifest, parts, indexes = _manifest(folder), {}, {}
    for part, record in manifest.parts.items():
        weight_map = {
            name: folder.file_of(part, name)
            for name in folder.names(part)
            if folder.file_of(part, name) in files
        }
        total = sum(spec.nbytes for spec in folder.specs(part, weight_map).values())
        kept = {file: of for file, of in record.files.items() if file in files}
        body = index.encode_index(total_size=total, weight_map=weight_map) if kept else None
        if body is not None:
            indexes[names.index_name(part)] = body
        parts[part] = Part(
            files=kept,
            index=IndexFile.of(body) if body is not None else None,
            total_nbytes=total,
            aliases=record.aliases,
            codec=record.codec,
        )
    island = (
        manifest.island.model_copy(update={"copies": []}) if manifest.island is not None else None
    )
    return manifest.model_copy(update={"parts": parts, "island": island}), indexes


def _seal(
    folder: Folder, files: Collection[str], storage: LocalStorage, into: str, *, fsync: bool
) -> None:
    """The indexes and the manifest of a copy, all of whose files are there."""
    manifest, indexes = reduced(folder, files)
    for name, body in indexes.items():
        storage.put(f"{into}/{name}", body, fsync=fsync)
    write_manifest(storage, into, manifest, fsync=fsync)
    if fsync:
        storage.sync_folder(into)

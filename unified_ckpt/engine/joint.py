"""One checkpoint out of the folders of several machines: what each holds, whether it is complete between them, and how to read it.

How wrong bytes could be read: a folder of another save with the same name is mixed in; a file is there and damaged; a machine's folder is
older than the others'. So only folders of one save id are joined, and every block that is read is compared with its digest here.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unified_ckpt.core.geometry import Box, intersect, runs, whole
from unified_ckpt.core.islands import FRAGMENTS, parse_fragment, uncovered
from unified_ckpt.core.sharding import TensorSpec
from unified_ckpt.core.tables import listed, short
from unified_ckpt.engine.checkpoint import Folder
from unified_ckpt.engine.source import Catalog, Ledger, Location, Said
from unified_ckpt.errors import CheckpointError, IncompleteError, IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.runtime.storage import Buffer

_LOG = logging.getLogger("unified_ckpt")
Key = tuple[str, str]  # (part, fqn)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that a folder holds as a tensor of its own, `name` of its part `part`. `folder` counts among all that are known."""

    box: Box
    folder: int
    part: str
    name: str
    spec: TensorSpec
    location: Location


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one folder holds, as its machine tells it. `lost`: what of it is not there or damaged, in sentences."""

    root: str
    machine: int
    save_id: str
    created: str
    count: int
    number: int
    ranks: tuple[int, ...]
    files: tuple[str, ...]
    tensors: Mapping[str, Mapping[str, tuple[str, tuple[int, ...], str, int]]]  # part -> name -> dtype, shape, file, first byte
    lost: tuple[str, ...]
    world_size: int
    totals: Mapping[str, Sequence[int]]  # part -> tensors and bytes of the whole save

    def encode(self) -> bytes:
        return zlib.compress(json.dumps({name: getattr(self, name) for name in self.__slots__}).encode(), 1)


def decode_inventory(body: bytes) -> Inventory:
    told = json.loads(zlib.decompress(body))
    tensors = {p: {n: (d, tuple(s), f, at) for n, (d, s, f, at) in of.items()} for p, of in told.pop("tensors").items()}
    lists = {name: tuple(told.pop(name)) for name in ("ranks", "files", "lost")}
    return Inventory(**{**told, **lists, "tensors": tensors})


def take_inventory(folder: Folder, *, machine: int) -> Inventory:
    """Looks at every file's size and header; leaves out, and says, what cannot be read."""
    manifest = folder.manifest
    if manifest is None:
        raise AssertionError("a folder without a manifest is never joined with others")
    island, lost, bad = manifest.island, [], set[str]()
    for file in sorted({folder.file_of(part, name) for part in folder.parts for name in folder.names(part)}):
        try:
            folder.check_files([file])
        except CheckpointError as error:
            bad.add(file)
            lost.append(str(error))
    tensors: dict[str, dict[str, tuple[str, tuple[int, ...], str, int]]] = {}
    for part in folder.parts:
        names = [name for name in folder.names(part) if folder.file_of(part, name) not in bad]
        specs, at = folder.specs(part, names), folder.catalog([(part, name) for name in names]).locations
        tensors[part] = {n: (specs[n].dtype, specs[n].shape, at[part, n].file, at[part, n].start) for n in names}
    return Inventory(
        root=folder.storage.root,
        machine=machine,
        save_id=manifest.save_id,
        created=manifest.created,
        count=island.count if island else 1,
        number=island.number if island else 0,
        ranks=tuple(island.ranks) if island else tuple(range(manifest.world_size)),
        files=(*manifest.files(), *(f"{part}.safetensors.index.json" for part in folder.parts), "unified_checkpoint.json"),
        tensors=tensors,
        lost=tuple(lost),
        world_size=island.world_size if island else manifest.world_size,
        totals=island.totals if island else {p: [len(folder.names(p)), manifest.parts[p].total_nbytes] for p in folder.parts},
    )


@dataclass(slots=True)
class Whole:
    """The tensors of one save, put together. `gaps`: in sentences, what no folder has."""

    specs: dict[Key, TensorSpec] = field(default_factory=dict)
    pieces: dict[Key, list[Piece]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


def put_together(inventories: Sequence[Inventory], members: Sequence[int]) -> Whole:
    """What the folders `members` hold between them, and what is missing. Pure."""
    found = Whole()
    for number in members:
        for stored, tensors in inventories[number].tensors.items():
            for name, (dtype, shape, file, start) in tensors.items():
                parsed = parse_fragment(name) if stored.endswith(FRAGMENTS) else None
                fqn, box, of_all = parsed if parsed is not None else (name, whole(shape), shape)
                key = (stored.removesuffix(FRAGMENTS) if parsed is not None else stored, fqn)
                found.specs.setdefault(key, TensorSpec(dtype, of_all))
                piece = Piece(box, number, stored, name, TensorSpec(dtype, shape), Location(file, start))
                found.pieces.setdefault(key, []).append(piece)
    for key, pieces in sorted(found.pieces.items()):
        holes = uncovered(found.specs[key].shape, (piece.box for piece in pieces))
        if holes:
            spans = ", ".join(f"{low}:{low + n}" for low, n in zip(holes[0].offsets, holes[0].shape, strict=True))
            found.gaps.append(f"{key[0]}:{key[1]}: nobody has [{spans}]{' and more' if len(holes) > 1 else ''}")
    return found


def choose(inventories: Sequence[Inventory], *, where: str) -> tuple[list[int], Whole]:
    """The folders of the newest save that is complete between them. IncompleteError, saying what is missing and who had it."""
    saves: dict[str, list[int]] = {}
    for number, one in enumerate(inventories):
        saves.setdefault(one.save_id, []).append(number)
    errors = []
    for save_id, members in sorted(saves.items(), key=lambda item: inventories[item[1][0]].created, reverse=True):
        found = put_together(inventories, members)
        problems = _problems([inventories[n] for n in members], found)
        if not problems:
            return members, found
        errors.append(listed(f"{where}: save {save_id} is not complete among the machines", problems))
    raise IncompleteError("\n".join(errors) or f"{where}: no machine has a checkpoint there")


def _problems(inventories: Sequence[Inventory], found: Whole) -> list[str]:
    """Why a save is not complete; empty when it is. A folder that is away is no problem if the others have all that it had."""
    problems = list(found.gaps)
    for part, (count, nbytes) in sorted(inventories[0].totals.items()):
        sizes = [spec.nbytes for (of, _), spec in found.specs.items() if of == part]
        if [len(sizes), sum(sizes)] != [count, nbytes]:
            problems.append(f"{part}: nobody names {count - len(sizes)} of {count} tensors, {nbytes - sum(sizes)} of {nbytes} bytes")
    if not problems:
        return []
    here = {one.number for one in inventories}
    away = [number for number in range(inventories[0].count) if number not in here]
    had = sorted(set(range(inventories[0].world_size)) - {rank for one in inventories for rank in one.ranks})
    if away:
        problems.append(
            f"folder(s) {short(away)} of {inventories[0].count} are on no machine here; rank(s) {short(had)} of the save wrote them"
        )
    return [*problems, *(f"machine {one.machine}: {text}" for one in inventories for text in one.lost)]


class Joint:
    """The folders of one save on several machines, as a Source. `folders`: by number, opened here or through a peer, for some ranks."""

    def __init__(self, found: Whole, folders: Mapping[int, Folder], *, own: Collection[int], lost: Sequence[str], turn: int) -> None:
        self._found, self._folders = found, folders
        self._first = next(iter(sorted(folders, key=lambda number: (number not in own, number))))
        self.storage = JointStorage(found, folders, own=own, turn=turn)
        self.storage.ledger.damage.extend(lost)
        self._names: dict[str, dict[str, None]] = {}
        for part, name in found.pieces:
            self._names.setdefault(part, {})[name] = None

    @property
    def format(self) -> str:
        return "unified"

    @property
    def parts(self) -> Sequence[str]:
        return sorted(self._names)

    def names(self, part: str) -> Collection[str]:
        return self._names.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._one.aliases(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        return {name: self._found.specs[part, name] for name in names}

    def read(self, part: str, name: str, box: Box) -> bytes:
        spec = self._found.specs[part, name]
        item = spec.nbytes // max(whole(spec.shape).numel, 1)
        found = bytearray(box.numel * item)
        view = memoryview(found)
        for first, local, count in runs(box, spec.shape, local=whole(box.shape), local_shape=box.shape):
            self.storage.read_at(file_of((part, name)), first * item, view[local * item : (local + count) * item])
        return bytes(found)

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        return Catalog(self.storage, {key: Location(file_of(key), 0) for key in wanted}, self.storage.ledger)

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        return dict.fromkeys(wanted)  # `storage` compares those of the pieces

    def said(self) -> Said:
        said = self._one.said()
        island = self._one.manifest.island if self._one.manifest is not None else None
        return said if island is None else replace(said, rank_extras=island.world_size)

    def rank_extra(self, rank: int) -> Any:
        for folder in self._folders.values():
            island = folder.manifest.island if folder.manifest is not None else None
            if island is None:
                return folder.rank_extra(rank)
            if rank in island.ranks:
                return folder.rank_extra(island.ranks.index(rank))
        return None  # its folder is not here

    def close(self) -> None:
        for folder in self._folders.values():
            folder.close()

    @property
    def _one(self) -> Folder:
        """Any of them: they say the same of the whole."""
        return self._folders[self._first]


def file_of(key: Key) -> str:
    """The file that `JointStorage` makes believe there is: the tensor's bytes, row-major."""
    return f"{key[0]}:{key[1]}"


class JointStorage:
    """Reads whole tensors out of the pieces of several folders: this machine's first, then the others in turn; every block compared.

    Not for two threads at a time.
    """

    def __init__(self, found: Whole, folders: Mapping[int, Folder], *, own: Collection[int], turn: int) -> None:
        self.root, self.ledger = "the machines' folders", Ledger()
        self._found, self._folders, self._turn = found, folders, turn
        self._keys = {file_of(key): key for key in found.pieces}
        self._own = frozenset(own)
        self._digests: dict[int, Mapping[Key, Sequence[int] | None]] = {}  # of a folder, by its own parts and names
        self._last: tuple[Piece, int, bytes] | None = None  # a block that was read for its end, and whose beginning comes next

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fills `into` with bytes from `start` of the tensor. IntegrityError where no folder has them undamaged."""
        key = self._keys[name]
        spec = self._found.specs[key]
        item = spec.nbytes // max(whole(spec.shape).numel, 1)
        stop, done = start + len(into), 0
        row = spec.nbytes // spec.shape[0] if spec.shape and spec.shape[0] else spec.nbytes
        rows = Box((start // row,), (-(-stop // row) - start // row,)) if spec.shape else Box((), ())
        window = Box((*rows.offsets, *(0,) * (len(spec.shape) - 1)), (*rows.shape, *spec.shape[1:])) if spec.shape else whole(())
        for box, owners in self._owners(key).items():
            shared = intersect(box, window) if spec.shape else box
            if shared is None:
                continue
            local = Box(tuple(a - b for a, b in zip(shared.offsets, box.offsets, strict=True)), shared.shape)
            for first, in_piece, count in runs(shared, spec.shape, local=local, local_shape=box.shape):
                low, high = max(first * item, start), min((first + count) * item, stop)
                if low < high:
                    self._copy(owners, in_piece * item + low - first * item, into[low - start : high - start])
                    done += high - low
        if done != len(into):
            raise IntegrityError(f"{name}: {done} of {len(into)} bytes from byte {start} are in the folders; this is a bug")

    def read(self, name: str) -> bytes:
        found = bytearray(self.size(name) or 0)
        self.read_at(name, 0, memoryview(found))
        return bytes(found)

    def size(self, name: str) -> int | None:
        return self._found.specs[self._keys[name]].nbytes if name in self._keys else None

    def names(self) -> list[str]:
        return sorted(self._keys)

    def close(self) -> None:
        """The folders are another's."""

    def _owners(self, key: Key) -> Mapping[Box, list[Piece]]:
        """Who holds each box, the one to ask first in front. A box that lies in another that comes before is left out."""
        by_box: dict[Box, list[Piece]] = {}
        for piece in self._found.pieces[key]:
            by_box.setdefault(piece.box, []).append(piece)
        everything = whole(self._found.specs[key].shape)
        if everything in by_box:
            by_box = {everything: by_box[everything]}
        return {box: sorted(pieces, key=self._rank_of) for box, pieces in by_box.items() if box.numel}

    def _rank_of(self, piece: Piece) -> tuple[bool, int]:
        return piece.folder not in self._own, (piece.folder + self._turn) % (max(self._folders) + 1)

    def _copy(self, owners: Sequence[Piece], start: int, into: Buffer) -> None:
        """Bytes from `start` of a piece, block by block, each from the first owner whose bytes are right."""
        position, stop = start, start + len(into)
        while position < stop:
            block = position // digests.BLOCK_NBYTES
            low, high = block * digests.BLOCK_NBYTES, min((block + 1) * digests.BLOCK_NBYTES, owners[0].spec.nbytes)
            upto = min(high, stop)
            target = into[position - start : upto - start]
            if (position, upto) == (low, high):
                self._read_block(owners, block, target)
            else:
                if self._last is None or self._last[:2] != (owners[0], block):
                    held = bytearray(high - low)
                    self._read_block(owners, block, memoryview(held))
                    self._last = (owners[0], block, bytes(held))
                target[:] = self._last[2][position - low : upto - low]
            position = upto

    def _read_block(self, owners: Sequence[Piece], block: int, into: Buffer) -> None:
        why = []
        for piece in owners:
            folder = self._folders[piece.folder]
            where = f"{folder.storage.root}/{piece.location.file}: block {block} of {piece.part}:{piece.name}"
            try:
                folder.storage.read_at(piece.location.file, piece.location.start + block * digests.BLOCK_NBYTES, into)
                saved = self._saved(folder, piece)
            except CheckpointError as error:
                why.append(str(error))
                continue
            if saved is None or saved[block] == digests.crc(into):
                self.ledger.verified_nbytes += len(into) if saved is not None else 0
                self._report(why)
                return
            why.append(f"{where} has CRC {digests.crc(into):016x}; needed {saved[block]:016x}")
        raise IntegrityError(listed("no machine has these bytes undamaged", why))

    def _report(self, why: Sequence[str]) -> None:
        for text in why:
            self.ledger.damage.append(text)
            _LOG.warning("read from another machine: %s", text)

    def _saved(self, folder: Folder, piece: Piece) -> Sequence[int] | None:
        """The piece's digests; those of the whole folder are read at once, for a request to a peer costs more than bytes do."""
        if piece.folder not in self._digests:
            pieces = (one for of_tensor in self._found.pieces.values() for one in of_tensor if one.folder == piece.folder)
            self._digests[piece.folder] = folder.block_digests({(one.part, one.name) for one in pieces})
        return self._digests[piece.folder][piece.part, piece.name]

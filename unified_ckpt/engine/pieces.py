"""Tensors put together out of pieces that lie in several folders, some with more than one copy: read as if they were whole.

Knows nothing of machines but which folders are on this one. Every block that is read is compared with its digest.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unified_ckpt.core.geometry import Box, intersect, runs, whole
from unified_ckpt.core.islands import without
from unified_ckpt.core.sharding import TensorSpec
from unified_ckpt.core.tables import Key, listed
from unified_ckpt.engine.source import Ledger, Location
from unified_ckpt.errors import CheckpointError, IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.runtime.storage import Buffer, Reader

_LOG = logging.getLogger("unified_ckpt")
_MAX_BLOCKS = 256  # held at a time


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that a folder holds as a tensor of its own, `name` of its part `part`. `folder` counts among all that are known."""

    box: Box
    folder: int
    part: str
    name: str
    spec: TensorSpec
    location: Location


@dataclass(slots=True)
class Whole:
    """The tensors of one save, put together. `gaps`: in sentences, what no folder has."""

    specs: dict[Key, TensorSpec] = field(default_factory=dict)
    pieces: dict[Key, list[Piece]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


class Stock(Protocol):
    """What reading needs of a folder."""

    @property
    def storage(self) -> Reader: ...

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]: ...


def file_of(key: Key) -> str:
    """The file that `JointStorage` makes believe there is: the tensor's bytes, row-major."""
    return f"{key[0]}:{key[1]}"


class JointStorage:
    """Reads whole tensors out of the pieces of several folders: this machine's first, then the others in turn; every block compared.

    Of a block that is damaged or cannot be read the bytes come from any other piece that has them.
    """

    def __init__(self, found: Whole, folders: Mapping[int, Stock], *, own: Collection[int], turn: int) -> None:
        self.root, self.ledger = "the machines' folders", Ledger()
        self._found, self._folders, self._turn = found, folders, turn
        self._keys = {file_of(key): key for key in found.pieces}
        self._own = frozenset(own)
        self._digests: dict[int, Mapping[Key, Sequence[int] | None]] = {}  # of a folder, by its own parts and names
        self._lock = threading.Lock()  # one thread reads ahead while its owner reads, too
        self._tiling: tuple[Key, list[Region]] | None = None  # of the tensor that was read last
        # Blocks of that tensor that were read for a part of them: a line takes a part of one in each region that it crosses.
        self._blocks: OrderedDict[tuple[int, str, int], bytes] = OrderedDict()

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fills `into` with bytes from `start` of the tensor. IntegrityError where no folder has them undamaged."""
        with self._lock:
            key = self._keys[name]
            if self._tiling is None or self._tiling[0] != key:
                self._tiling = key, self._regions(key, frozenset())
                self._blocks.clear()
            done = self._fill(key, self._tiling[1], start, into, frozenset(), [])
            if done != len(into):
                raise IntegrityError(f"{name}: {done} of {len(into)} bytes from byte {start} are in the folders; needed all of them")

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

    def _regions(self, key: Key, spoilt: frozenset[Box]) -> list[Region]:
        """The tensor, as far as the boxes that are not `spoilt` have it, in disjoint regions: each with the box that it is read from.

        Boxes on this machine come first, then whole copies.
        """
        by_box: dict[Box, list[Piece]] = {}
        for piece in self._found.pieces[key]:
            if piece.box.numel and piece.box not in spoilt:
                by_box.setdefault(piece.box, []).append(piece)
        everything = whole(self._found.specs[key].shape)
        owners = {box: sorted(pieces, key=self._rank_of) for box, pieces in by_box.items()}
        if sum(box.numel for box in owners) == everything.numel and not spoilt:
            return [Region(box, box, pieces) for box, pieces in owners.items()]
        regions, left = [], [everything]
        for box in sorted(owners, key=lambda box: (owners[box][0].folder not in self._own, -box.numel, box.offsets)):
            shared = [found for one in left if (found := intersect(one, box)) is not None]
            regions += [Region(one, box, owners[box]) for one in shared]
            left = [piece for one in left for piece in without(one, box)]
            if not left:
                break
        return regions

    def _rank_of(self, piece: Piece) -> tuple[bool, int]:
        return piece.folder not in self._own, (piece.folder + self._turn) % (max(self._folders) + 1)

    def _fill(self, key: Key, regions: Sequence[Region], start: int, into: Buffer, spoilt: frozenset[Box], why: list[str]) -> int:
        """Bytes from `start` of a tensor out of its regions; returns how many they have. `why`: what was wrong with the spoilt boxes."""
        spec = self._found.specs[key]
        if not len(into):
            return 0
        item, stop, done = spec.nbytes // whole(spec.shape).numel, start + len(into), 0
        window = _rows(spec, start, stop)
        for region in regions:
            shared = intersect(region.box, window)
            if shared is None and spec.shape:
                continue
            shared = shared or region.box
            local = Box(tuple(a - b for a, b in zip(shared.offsets, region.of.offsets, strict=True)), shared.shape)
            for first, in_piece, count in runs(shared, spec.shape, local=local, local_shape=region.of.shape):
                low, high = max(first * item, start), min((first + count) * item, stop)
                if low < high:
                    run = _Run(key, low, (in_piece - first) * item + low, spoilt, why)
                    self._copy(region, run, into[low - start : high - start], keep=len(regions) + 1)
                    done += high - low
        return done

    def _copy(self, region: Region, run: _Run, into: Buffer, *, keep: int) -> None:
        """A run out of a region's box, block by block, each from the first owner whose bytes are right."""
        nbytes = region.owners[0].spec.nbytes
        position, stop = run.in_piece, run.in_piece + len(into)
        while position < stop:
            block = position // digests.BLOCK_NBYTES
            low, high = block * digests.BLOCK_NBYTES, min((block + 1) * digests.BLOCK_NBYTES, nbytes)
            upto = min(high, stop)
            target = into[position - run.in_piece : upto - run.in_piece]
            why: list[str] = []
            if (position, upto) == (low, high):
                fine = self._read_block(region.owners, block, target, why)
            else:
                held = self._part_of_block(region.owners, block, high - low, why, keep=keep)
                fine = held is not None
                if held is not None:
                    target[:] = held[position - low : upto - low]
            if not fine:
                self._from_elsewhere(region, run, run.low + position - run.in_piece, target, why)
            self._report(why)
            position = upto

    def _from_elsewhere(self, region: Region, run: _Run, start: int, into: Buffer, why: list[str]) -> None:
        """Bytes of a block that no copy of its box has undamaged, out of boxes that overlap it."""
        spoilt, told = run.spoilt | {region.of}, [*run.why, *why]
        if self._fill(run.key, self._regions(run.key, spoilt), start, into, spoilt, told) != len(into):
            raise IntegrityError(listed("no machine has these bytes undamaged", told))

    def _part_of_block(self, owners: Sequence[Piece], block: int, nbytes: int, why: list[str], *, keep: int) -> bytes | None:
        """A whole block, of which only a part is wanted now, and more of it soon."""
        name = (owners[0].folder, owners[0].name, block)
        if name not in self._blocks:
            held = bytearray(nbytes)
            if not self._read_block(owners, block, memoryview(held), why):
                return None
            self._blocks[name] = bytes(held)
            while len(self._blocks) > min(keep, _MAX_BLOCKS):
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(name)
        return self._blocks[name]

    def _read_block(self, owners: Sequence[Piece], block: int, into: Buffer, why: list[str]) -> bool:
        """Whether an owner's bytes are right. `why`: what was wrong with those before."""
        for piece in owners:
            folder = self._folders[piece.folder]
            where = f"{folder.storage.root}/{piece.location.file}: block {block} of {piece.part}:{piece.name}"
            try:
                folder.storage.read_at(piece.location.file, piece.location.start + block * digests.BLOCK_NBYTES, into)
                saved = self._saved(folder, piece)
            except CheckpointError as error:
                why.append(str(error))
                continue
            if saved is None or (block < len(saved) and saved[block] == digests.crc(into)):
                self.ledger.verified_nbytes += len(into) if saved is not None else 0
                return True
            needed = f"{saved[block]:016x}" if block < len(saved) else "one that is not in the digests"
            why.append(f"{where} has CRC {digests.crc(into):016x}; needed {needed}")
        return False

    def _report(self, why: Sequence[str]) -> None:
        for text in why:
            if text not in self.ledger.damage:
                self.ledger.damage.append(text)
                _LOG.warning("read from another machine: %s", text)

    def _saved(self, folder: Stock, piece: Piece) -> Sequence[int] | None:
        """The piece's digests; those of the whole folder are read at once, for a request to a peer costs more than bytes do."""
        if piece.folder not in self._digests:
            pieces = (one for of_tensor in self._found.pieces.values() for one in of_tensor if one.folder == piece.folder)
            self._digests[piece.folder] = folder.block_digests({(one.part, one.name) for one in pieces})
        return self._digests[piece.folder][piece.part, piece.name]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor, and the stored box that it is read from: the pieces that hold that one, the one to ask first in front."""

    box: Box
    of: Box
    owners: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes from `low` of a tensor, from `in_piece` of a piece. `spoilt`: boxes that did not have them, and `why`."""

    key: Key
    low: int
    in_piece: int
    spoilt: frozenset[Box]
    why: Sequence[str]


def _rows(spec: TensorSpec, start: int, stop: int) -> Box:
    """The rows of a tensor that some of its bytes lie in."""
    if not spec.shape:
        return whole(())
    row = spec.nbytes // spec.shape[0]
    first = start // row
    return Box((first, *(0,) * (len(spec.shape) - 1)), (-(-stop // row) - first, *spec.shape[1:]))

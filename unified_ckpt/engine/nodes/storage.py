"""Tensors put together out of pieces that lie in several folders, some with more than one copy: read as if they were whole.

Knows nothing of machines but which folders are on this one. Every block that is read is compared with its digest, unless told otherwise.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

import numpy as np

from unified_ckpt.core.nodes.node_groups import without
from unified_ckpt.core.nodes.write_alignment import is_slow
from unified_ckpt.core.sharding.boxes import Box, intersect, runs, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.nodes.coverage import Family, Whole
from unified_ckpt.engine.nodes.locations import Places, Stock
from unified_ckpt.engine.nodes.tiling import (
    LONG_RUN_NBYTES,
    Band,
    Pieces,
    Region,
    Run,
    band_of,
    blocks_of,
    rows_around,
    whole_rows,
    widened,
)
from unified_ckpt.engine.source.protocol import Ledger
from unified_ckpt.errors import CheckpointError, IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.runtime.storage.storage import Buffer

_LOG = logging.getLogger("unified_ckpt")
_MAX_BLOCKS = 256  # held at a time
_LOOKS = 16  # at blocks that were held last
_ROWS_NBYTES = 4 << 20  # of a piece, read at once to be put in their places
_MAX_REGIONS = 1 << 16  # remembered


class Stocks(Protocol):
    """Folders by number."""

    def __getitem__(self, number: int, /) -> Stock: ...


def file_of(key: Key) -> str:
    """The file that `JointStorage` makes believe there is: the tensor's bytes, row-major."""
    return f"{key[0]}:{key[1]}"


class JointStorage:
    """Reads whole tensors out of the pieces of several folders: this machine's first, then the others in turn; every block compared.

    Of a block that is damaged or cannot be read the bytes come from any other piece that has them. `proved`: whether it is known that the
    folders have every element between them.
    """

    def __init__(
        self, found: Whole, folders: Stocks, *, own: Collection[int], turn: int, proved: bool
    ) -> None:
        self.root, self.ledger = "the machines' folders", Ledger()
        self._found, self._folders, self._turn, self._proved = found, folders, turn, proved
        self._keys = {file_of(key): key for key in found.specs}
        self._own = frozenset(own)
        self._verifying = True
        self._places: dict[int, Places] = {}  # by folder
        self._lock = threading.Lock()  # one thread reads ahead while its owner reads, too
        self._edges: dict[int, list[int]] = {}  # by family
        self._tilings: dict[
            tuple[int, Box], list[Region]
        ] = {}  # by family and window: most tensors have many of the same family
        self._tiled = 0  # regions in them
        self._tensor: Key | None = None  # that was read last
        # Blocks of that tensor that were read for a part of them: a line takes a part of one in each region that it crosses.
        self._blocks: OrderedDict[tuple[int, bool, Box, int], tuple[bytes, Band | None]] = (
            OrderedDict()
        )
        self._mates: dict[
            int, list[int]
        ] = {}  # folders that are one and the same, seen by several machines, which read it for each other

    def share(self, *, slow_only: bool) -> None:
        """From now on each block of a folder that several machines see is read by one of them, and the others get it from there.
        `slow_only`: not of file systems that serve many machines at once as fast as one."""
        by_volume: dict[str, list[int]] = {}
        for number, one in enumerate(self._found.folders):
            if one.volume and (not slow_only or is_slow(one.volume.split()[0])):
                by_volume.setdefault(one.volume, []).append(number)
        self._mates = {
            number: mates for mates in by_volume.values() if len(mates) > 1 for number in mates
        }

    def trust(self) -> None:
        """From now on no block is compared with its digest, and no digests are read."""
        self._verifying = False

    def _in_turn(
        self, owners: Sequence[tuple[int, bool]], stored: Key, block: int
    ) -> Sequence[tuple[int, bool]]:
        """The owners, the one in front that reads this block for all."""
        mates = self._mates.get(owners[0][0], ())
        sharing = sorted(owner for owner in owners if owner[0] in mates)
        if len(sharing) < 2:
            return owners
        first = sharing[zlib.crc32(f"{file_of(stored)}/{block}".encode()) % len(sharing)]
        return [first, *(owner for owner in owners if owner != first)]

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fills `into` with bytes from `start` of the tensor. IntegrityError where no folder has them undamaged."""
        with self._lock:
            key = self._keys[name]
            if self._tensor != key:
                self._tensor = key
                self._blocks.clear()
            elif len(into) < LONG_RUN_NBYTES and self._fill_from_held(start, into):
                return
            done = self._fill(key, start, into, frozenset(), [])
            if done != len(into):
                raise IntegrityError(
                    f"{name}: {done} of {len(into)} bytes from byte {start} are in the folders; needed all of them"
                )

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

    def _regions(self, key: Key, window: Box, spoilt: frozenset[Box]) -> list[Region]:
        """At least a window of the tensor, as far as the boxes that are not `spoilt` have it, in disjoint regions.

        Boxes on this machine come first, then whole copies. Windows between the same edges of boxes share the regions between those.
        """
        number = self._found.numbers[key]
        if number not in self._edges:
            self._edges[number] = self._found.family(key).edges()
        known = number, (window := widened(window, self._edges[number]))
        if spoilt or known not in self._tilings:
            tiling = self._tile(self._found.family(key), window, spoilt)
            if spoilt:
                return tiling
            self._tiled += len(tiling)
            if self._tiled > _MAX_REGIONS:
                self._tilings, self._tiled = {}, len(tiling)
            self._tilings[known] = tiling
        return self._tilings[known]

    def _tile(self, family: Family, window: Box, spoilt: frozenset[Box]) -> list[Region]:
        rows = (window.offsets[0], window.offsets[0] + window.shape[0]) if window.shape else (0, 1)
        by_box: dict[Box, list[tuple[int, bool]]] = {}
        for box, folder, fragment in family.crossing(*rows):
            if box not in spoilt:
                by_box.setdefault(box, []).append((folder, fragment))
        owners = {box: sorted(held, key=self._rank_of) for box, held in by_box.items()}
        shares = {box: shared for box in owners if (shared := intersect(box, window)) is not None}
        if (
            self._proved
            and not spoilt
            and sum(shared.numel for shared in shares.values()) == window.numel
        ):  # then no two overlap
            return [Region(shared, box, owners[box]) for box, shared in shares.items()]
        regions, left = [], [window]
        for box in sorted(
            shares, key=lambda box: (owners[box][0][0] not in self._own, -box.numel, box.offsets)
        ):
            regions += [
                Region(found, box, owners[box])
                for one in left
                if (found := intersect(one, box)) is not None
            ]
            left = [piece for one in left for piece in without(one, box)]
            if not left:
                break
        return regions

    def _rank_of(self, owner: tuple[int, bool]) -> tuple[bool, int]:
        return owner[0] not in self._own, (owner[0] + self._turn) % len(self._found.folders)

    def _fill(
        self, key: Key, start: int, into: Buffer, spoilt: frozenset[Box], why: list[str]
    ) -> int:
        """Bytes from `start` of a tensor; returns how many the boxes have that are not spoilt. `why`: what was wrong with those."""
        spec = self._found.specs[key]
        if not len(into):
            return 0
        item, stop, done = spec.nbytes // whole(spec.shape).numel, start + len(into), 0
        window = rows_around(spec, start, stop)
        regions = self._regions(key, window, spoilt)
        for region in regions:
            shared = intersect(region.box, window)
            if shared is None:
                continue
            pieces = Pieces(key, spec, region, region.of.numel * item)
            inner, outer = whole_rows(shared, spec, start, stop)
            if inner is not None and self._fill_rows(
                pieces, inner, start, into, keep=len(regions) + 1
            ):
                done += inner.numel * item
            elif inner is not None:
                outer = [shared]
            for box in outer:
                local = Box(
                    tuple(a - b for a, b in zip(box.offsets, region.of.offsets, strict=True)),
                    box.shape,
                )
                for first, in_piece, count in runs(
                    box, spec.shape, local=local, local_shape=region.of.shape
                ):
                    low, high = max(first * item, start), min((first + count) * item, stop)
                    if low < high:
                        run = Run(low, (in_piece - first) * item + low, spoilt, why)
                        self._copy(
                            pieces, run, into[low - start : high - start], keep=len(regions) + 1
                        )
                        done += high - low
        return done

    def _fill_rows(self, pieces: Pieces, box: Box, start: int, into: Buffer, *, keep: int) -> bool:
        """Rows of a box, all of them in `into`: read as they lie in the piece, then put in their place at once. False where a block of
        them is damaged everywhere."""
        spec, of = pieces.spec, pieces.region.of
        item, row = spec.nbytes // whole(spec.shape).numel, spec.nbytes // spec.shape[0]
        width = pieces.nbytes // of.shape[0]
        target = np.frombuffer(into, dtype=np.uint8)
        at_once = max(_ROWS_NBYTES // width, 1)
        for first in range(box.offsets[0], box.offsets[0] + box.shape[0], at_once):
            count = min(at_once, box.offsets[0] + box.shape[0] - first)
            held = np.empty(count * width, dtype=np.uint8)
            if not self._read_piece(pieces, (first - of.offsets[0]) * width, held.data, keep=keep):
                return False
            there = target[first * row - start : (first + count) * row - start].reshape(
                count, *spec.shape[1:], item
            )
            here = held.reshape(count, *of.shape[1:], item)
            dims = list(zip(box.offsets[1:], of.offsets[1:], box.shape[1:], strict=True))
            into_there = tuple(slice(low, low + n) for low, _, n in dims)
            there[(slice(None), *into_there)] = here[
                (slice(None), *(slice(low - base, low - base + n) for low, base, n in dims))
            ]
        return True

    def _read_piece(self, pieces: Pieces, start: int, into: Buffer, *, keep: int) -> bool:
        """Bytes from `start` of a piece. False where some of them are right on no machine."""
        for position, target in blocks_of(pieces, start, into):
            why: list[str] = []
            fine = self._take(pieces, position, target, why, keep=keep)
            self._report(why)
            if not fine:
                return False
        return True

    def _copy(self, pieces: Pieces, run: Run, into: Buffer, *, keep: int) -> None:
        """A run out of a region's box, block by block, each from the first owner whose bytes are right."""
        for position, target in blocks_of(pieces, run.in_piece, into):
            why: list[str] = []
            if not self._take(pieces, position, target, why, keep=keep):
                self._from_elsewhere(pieces, run, run.low + position - run.in_piece, target, why)
            self._report(why)

    def _take(
        self, pieces: Pieces, position: int, into: Buffer, why: list[str], *, keep: int
    ) -> bool:
        """Bytes of one block of a piece, from the first owner whose bytes are right; False where there is none."""
        block = position // digests.BLOCK_NBYTES
        low, high = (
            block * digests.BLOCK_NBYTES,
            min((block + 1) * digests.BLOCK_NBYTES, pieces.nbytes),
        )
        if (position, position + len(into)) == (low, high):
            return self._read_block(pieces, block, into, why)
        held = self._part_of_block(pieces, block, high - low, why, keep=keep)
        if held is not None:
            into[:] = held[position - low : position - low + len(into)]
        return held is not None

    def _from_elsewhere(
        self, pieces: Pieces, run: Run, start: int, into: Buffer, why: list[str]
    ) -> None:
        """Bytes of a block that no copy of its box has undamaged, out of boxes that overlap it."""
        spoilt, told = run.spoilt | {pieces.region.of}, [*run.why, *why]
        if self._fill(pieces.key, start, into, spoilt, told) != len(into):
            raise IntegrityError(listed("no machine has these bytes undamaged", told))

    def _fill_from_held(self, start: int, into: Buffer) -> bool:
        """Bytes that lie in one of the blocks that were held last: they need no look at who has what."""
        for name, (held, band) in islice(reversed(self._blocks.items()), _LOOKS):
            position = band.position(start, len(into)) if band is not None else None
            at = -1 if position is None else position - name[-1] * digests.BLOCK_NBYTES
            if 0 <= at <= len(held) - len(into):
                into[:] = held[at : at + len(into)]
                self._blocks.move_to_end(name)
                return True
        return False

    def _part_of_block(
        self, pieces: Pieces, block: int, nbytes: int, why: list[str], *, keep: int
    ) -> bytes | None:
        """A whole block, of which only a part is wanted now, and more of it soon."""
        name = (*pieces.region.owners[0], pieces.region.of, block)
        if name not in self._blocks:
            held = bytearray(nbytes)
            if not self._read_block(pieces, block, memoryview(held), why):
                return None
            self._blocks[name] = bytes(held), band_of(pieces.region.of, pieces.spec)
            while len(self._blocks) > min(keep, _MAX_BLOCKS):
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(name)
        return self._blocks[name][0]

    def _read_block(self, pieces: Pieces, block: int, into: Buffer, why: list[str]) -> bool:
        """Whether an owner's bytes are right. `why`: what was wrong with those before."""
        name = pieces.stored(fragment=pieces.region.owners[0][1])
        for number, fragment in self._in_turn(pieces.region.owners, name, block):
            stored = pieces.stored(fragment=fragment)
            try:
                places = self._places_in(number)
                saved = places.digests(stored) if self._verifying else None
                at = places.location(stored) or places.look_up(
                    self._folders[number], partial(self._found.stored_in, number), stored
                )
                places.storage.read_at(at.file, at.start + block * digests.BLOCK_NBYTES, into)
            except CheckpointError as error:
                why.append(str(error))
                continue
            if saved is None or (block < len(saved) and int(saved[block]) == digests.crc(into)):
                self.ledger.verified_nbytes += len(into) if saved is not None else 0
                return True
            needed = (
                f"{int(saved[block]):016x}"
                if block < len(saved)
                else "one that is not in the digests"
            )
            where = f"{places.storage.root}/{at.file}: block {block} of {file_of(stored)}"
            why.append(f"{where} has CRC {digests.crc(into):016x}; needed {needed}")
        return False

    def _report(self, why: Sequence[str]) -> None:
        for text in why:
            if text not in self.ledger.damage:
                self.ledger.damage.append(text)
                _LOG.warning("read from another machine: %s", text)

    def _places_in(self, number: int) -> Places:
        """With its digests, as far as they are wanted. The folder itself may be closed and opened again: see `Folders`."""
        if number not in self._places:
            self._places[number] = Places(
                self._folders[number].storage, self._found.stored_in(number)
            )
        places = self._places[number]
        if self._verifying and not places.asked:
            places.prove(self._folders[number], self._found.stored_in(number))
        return places

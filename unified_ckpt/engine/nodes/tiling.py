"""Windows of a tensor, and the stored boxes that their bytes come from: which rows, which runs, which blocks. No effects."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from unified_ckpt.core.sharding.boxes import Box, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.nodes.inventory import stored_as
from unified_ckpt.format import digests
from unified_ckpt.runtime.storage.storage import Buffer

LONG_RUN_NBYTES = 64 << 10  # copied one by one


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor, and the stored box that it is read from: in these folders, the one to ask first in front, as a fragment or not."""

    box: Box
    of: Box
    owners: Sequence[tuple[int, bool]]


@dataclass(frozen=True, slots=True)
class Band:
    """A box as lines of its tensor, of `line` bytes each: of those from `first` up to `last`, bytes [left, right)."""

    line: int
    first: int
    last: int
    left: int
    right: int

    def position(self, start: int, nbytes: int) -> int | None:
        """Where bytes of the tensor lie among the bytes of the box; None of those that are not in one of its lines."""
        number, at = divmod(start, self.line)
        if not (self.first <= number < self.last and self.left <= at and at + nbytes <= self.right):
            return None
        return (number - self.first) * (self.right - self.left) + at - self.left


def band_of(box: Box, spec: TensorSpec) -> Band | None:
    """None of a box that is cut along several dims other than dim 0, or has no element."""
    if not box.numel:
        return None
    item = spec.nbytes // whole(spec.shape).numel
    cut = max((d for d, size in enumerate(spec.shape) if box.shape[d] != size), default=0)
    if box.shape[1:cut] != spec.shape[1:cut]:
        return None
    inner = prod(spec.shape[cut + 1 :]) * item
    if cut == 0:
        low, high = (box.offsets[0], box.offsets[0] + box.shape[0]) if box.shape else (0, 1)
        return Band(spec.nbytes, 0, 1, low * inner, high * inner)
    lines = prod(spec.shape[1:cut])
    first, left = box.offsets[0] * lines, box.offsets[cut] * inner
    return Band(
        spec.shape[cut] * inner,
        first,
        first + box.shape[0] * lines,
        left,
        left + box.shape[cut] * inner,
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """The copies of a region's box of one tensor. `nbytes`: of each."""

    key: Key
    spec: TensorSpec
    region: Region
    nbytes: int

    def stored(self, *, fragment: bool) -> Key:
        return stored_as(self.key, self.region.of, self.spec.shape, fragment=fragment)


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes from `low` of a tensor, from `in_piece` of a piece. `spoilt`: boxes that did not have them, and `why`."""

    low: int
    in_piece: int
    spoilt: frozenset[Box]
    why: Sequence[str]


def blocks_of(pieces: Pieces, start: int, into: Buffer) -> Iterator[tuple[int, Buffer]]:
    """`into`, from byte `start` of a piece, cut where its blocks are: (first byte, what of it lies in one block)."""
    position, stop = start, start + len(into)
    while position < stop:
        upto = min(
            (position // digests.BLOCK_NBYTES + 1) * digests.BLOCK_NBYTES, pieces.nbytes, stop
        )
        yield position, into[position - start : upto - start]
        position = upto


def whole_rows(box: Box, spec: TensorSpec, start: int, stop: int) -> tuple[Box | None, list[Box]]:
    """The rows of a box that lie in [start, stop) of the tensor as a whole, where it is worth while to move them at once; and the rest."""
    if len(spec.shape) < 2 or not box.numel:
        return None, [box]
    row, item = spec.nbytes // spec.shape[0], spec.nbytes // whole(spec.shape).numel
    low, high = (
        max(box.offsets[0], -(-start // row)),
        min(box.offsets[0] + box.shape[0], stop // row),
    )
    if high - low < 2 or box.shape[-1] * item >= LONG_RUN_NBYTES or box.shape[1:] == spec.shape[1:]:
        return None, [box]

    def rows(first: int, last: int) -> Box:
        return Box((first, *box.offsets[1:]), (last - first, *box.shape[1:]))

    around = [rows(box.offsets[0], low), rows(high, box.offsets[0] + box.shape[0])]
    return rows(low, high), [one for one in around if one.numel]


def widened(window: Box, edges: Sequence[int]) -> Box:
    """The window up to the edges around it, along dim 0."""
    if not window.shape:
        return window
    low, high = window.offsets[0], window.offsets[0] + window.shape[0]
    first, last = edges[bisect_right(edges, low) - 1], edges[bisect_left(edges, high)]
    return Box((first, *window.offsets[1:]), (last - first, *window.shape[1:]))


def rows_around(spec: TensorSpec, start: int, stop: int) -> Box:
    """The rows of a tensor that some of its bytes lie in."""
    if not spec.shape:
        return whole(())
    row = spec.nbytes // spec.shape[0]
    first = start // row
    return Box((first, *(0,) * (len(spec.shape) - 1)), (-(-stop // row) - first, *spec.shape[1:]))

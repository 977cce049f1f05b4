"""Windows of a tensor, and the stored boxes that their bytes come from: which rows, which runs,
which blocks. No effects.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.nodes.inventory import stored_key
from unified_ckpt.format import digests
from unified_ckpt.runtime.storage.storage import Buffer

LONG_RUN_NBYTES = 64 << 10  # copied one by one


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor, and the stored box that it is read from: in these folders, the one to ask
    first in front, as a fragment or not.
    """

    box: Box
    stored_box: Box
    holders: Sequence[tuple[int, bool]]


@dataclass(frozen=True, slots=True)
class SlabRange:
    """A box as lines of its tensor, of `slab_nbytes` bytes each: of those from `first` up to
    `last`, bytes [left, right).
    """

    slab_nbytes: int
    first: int
    last: int
    left: int
    right: int

    def position(self, start: int, nbytes: int) -> int | None:
        """Where bytes of the tensor lie among the bytes of the box; None of those that are not in
        one of its lines.
        """
        number, slab_offset = divmod(start, self.slab_nbytes)
        if not (
            self.first <= number < self.last
            and self.left <= slab_offset
            and slab_offset + nbytes <= self.right
        ):
            return None
        return (number - self.first) * (self.right - self.left) + slab_offset - self.left


def slab_range_of(box: Box, spec: TensorSpec) -> SlabRange | None:
    """None of a box that is cut along several dims other than dim 0, or has no element."""
    if not box.numel:
        return None
    item_nbytes = spec.nbytes // full_box(spec.shape).numel
    shard_dim = max((d for d, size in enumerate(spec.shape) if box.shape[d] != size), default=0)
    if box.shape[1:shard_dim] != spec.shape[1:shard_dim]:
        return None
    inner_nbytes = prod(spec.shape[shard_dim + 1 :]) * item_nbytes
    if shard_dim == 0:
        low, high = (box.offsets[0], box.offsets[0] + box.shape[0]) if box.shape else (0, 1)
        return SlabRange(spec.nbytes, 0, 1, low * inner_nbytes, high * inner_nbytes)
    slabs_per_row = prod(spec.shape[1:shard_dim])
    first, left = box.offsets[0] * slabs_per_row, box.offsets[shard_dim] * inner_nbytes
    return SlabRange(
        spec.shape[shard_dim] * inner_nbytes,
        first,
        first + box.shape[0] * slabs_per_row,
        left,
        left + box.shape[shard_dim] * inner_nbytes,
    )


@dataclass(frozen=True, slots=True)
class ShardCopies:
    """The copies of a region's box of one tensor. `nbytes`: of each."""

    key: Key
    spec: TensorSpec
    region: Region
    nbytes: int

    def stored_key(self, *, is_shard: bool) -> Key:
        return stored_key(self.key, self.region.stored_box, self.spec.shape, is_shard=is_shard)


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes from `start` of a tensor, from `shard_offset` of a piece. `corrupt`: boxes that did not
    have them, and `errors`.
    """

    start: int
    shard_offset: int
    corrupt: frozenset[Box]
    errors: Sequence[str]


def split_by_block(copies: ShardCopies, start: int, buffer: Buffer) -> Iterator[tuple[int, Buffer]]:
    """`buffer`, from byte `start` of a piece, cut where its blocks are: (first byte, what of it
    lies in one block).
    """
    position, stop = start, start + len(buffer)
    while position < stop:
        block_end = min(
            (position // digests.BLOCK_NBYTES + 1) * digests.BLOCK_NBYTES, copies.nbytes, stop
        )
        yield position, buffer[position - start : block_end - start]
        position = block_end


def split_whole_rows(
    box: Box, spec: TensorSpec, start: int, stop: int
) -> tuple[Box | None, list[Box]]:
    """The rows of a box that lie in [start, stop) of the tensor as a whole, where it is worth while
    to move them at once; and the rest.
    """
    if len(spec.shape) < 2 or not box.numel:
        return None, [box]
    row_nbytes, item_nbytes = (
        spec.nbytes // spec.shape[0],
        spec.nbytes // full_box(spec.shape).numel,
    )
    low, high = (
        max(box.offsets[0], -(-start // row_nbytes)),
        min(box.offsets[0] + box.shape[0], stop // row_nbytes),
    )
    if (
        high - low < 2
        or box.shape[-1] * item_nbytes >= LONG_RUN_NBYTES
        or box.shape[1:] == spec.shape[1:]
    ):
        return None, [box]

    def rows(first: int, last: int) -> Box:
        return Box((first, *box.offsets[1:]), (last - first, *box.shape[1:]))

    outer = [rows(box.offsets[0], low), rows(high, box.offsets[0] + box.shape[0])]
    return rows(low, high), [rest for rest in outer if rest.numel]


def snap_to_edges(window: Box, edges: Sequence[int]) -> Box:
    """The window up to the edges around it, along dim 0."""
    if not window.shape:
        return window
    low, high = window.offsets[0], window.offsets[0] + window.shape[0]
    first, last = edges[bisect_right(edges, low) - 1], edges[bisect_left(edges, high)]
    return Box((first, *window.offsets[1:]), (last - first, *window.shape[1:]))


def enclosing_rows(spec: TensorSpec, start: int, stop: int) -> Box:
    """The rows of a tensor that some of its bytes lie in."""
    if not spec.shape:
        return full_box(())
    row_nbytes = spec.nbytes // spec.shape[0]
    first = start // row_nbytes
    return Box(
        (first, *(0,) * (len(spec.shape) - 1)), (-(-stop // row_nbytes) - first, *spec.shape[1:])
    )

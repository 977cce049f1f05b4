"""Map a range of a tensor to the shards that hold it: regions, runs and blocks. No effects."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.cluster.inventory import stored_key
from unified_ckpt.format import digests
from unified_ckpt.runtime.storage.protocol import Buffer

LONG_RUN_NBYTES = 64 << 10  # longer runs are read one by one


@dataclass(frozen=True, slots=True)
class Region:
    """A box to read and the stored box that contains it.

    `holders`: (folder, is shard), preferred folder first.
    """

    box: Box
    stored_box: Box
    holders: Sequence[tuple[int, bool]]


@dataclass(frozen=True, slots=True)
class SlabRange:
    """A box as slabs of its tensor: bytes [left, right) of slabs [first, last)."""

    slab_nbytes: int
    first: int
    last: int
    left: int
    right: int

    def position(self, start: int, nbytes: int) -> int | None:
        """Return the offset within the box of bytes of the tensor; None if they leave one slab."""
        number, slab_offset = divmod(start, self.slab_nbytes)
        if not (
            self.first <= number < self.last
            and self.left <= slab_offset
            and slab_offset + nbytes <= self.right
        ):
            return None
        return (number - self.first) * (self.right - self.left) + slab_offset - self.left


def slab_range_of(box: Box, spec: TensorSpec) -> SlabRange | None:
    """Return a box as slabs; None if it is empty or split along several dims besides dim 0."""
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
    """The copies of a region's stored box. `nbytes`: the size of each.

    `corrupt`: boxes of the tensor that no folder has intact; `errors`: why. `max_cached_blocks`:
    as many as one row of the tensor crosses.
    """

    key: Key
    spec: TensorSpec
    region: Region
    nbytes: int
    corrupt: frozenset[Box]
    errors: Sequence[str]
    max_cached_blocks: int

    def stored_key(self, *, is_shard: bool) -> Key:
        """Return the part and name that a folder stores the box under."""
        return stored_key(self.key, self.region.stored_box, self.spec.shape, is_shard=is_shard)


def split_by_block(copies: ShardCopies, start: int, buffer: Buffer) -> Iterator[tuple[int, Buffer]]:
    """Yield (offset, view) for each block that `buffer`, from byte `start` of a shard, touches."""
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
    """Return the rows of a box that lie in bytes [start, stop) completely, and the rest.

    The first result is None if reading rows at once does not pay.
    """
    if len(spec.shape) < 2 or not box.numel:
        return None, [box]
    row_nbytes, item_nbytes = (
        spec.nbytes // spec.shape[0],
        spec.nbytes // full_box(spec.shape).numel,
    )
    low = max(box.offsets[0], -(-start // row_nbytes))
    high = min(box.offsets[0] + box.shape[0], stop // row_nbytes)
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
    """Extend a window along dim 0 to the edges around it."""
    if not window.shape:
        return window
    low, high = window.offsets[0], window.offsets[0] + window.shape[0]
    first, last = edges[bisect_right(edges, low) - 1], edges[bisect_left(edges, high)]
    return Box((first, *window.offsets[1:]), (last - first, *window.shape[1:]))


def enclosing_rows(spec: TensorSpec, start: int, stop: int) -> Box:
    """Return the rows of a tensor that contain bytes [start, stop)."""
    if not spec.shape:
        return full_box(())
    row_nbytes = spec.nbytes // spec.shape[0]
    first = start // row_nbytes
    return Box(
        (first, *(0,) * (len(spec.shape) - 1)), (-(-stop // row_nbytes) - first, *spec.shape[1:])
    )

"""What one rank writes of the boxes that it declares: its shares of their bytes, as extents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unified_ckpt.core.intervals import Interval
from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.planning.io_assignment import COARSE_GRAIN_NBYTES, round_to_step
from unified_ckpt.core.sharding.boxes import Box, full_box, runs
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize

ClassRun = tuple[int, int]  # a class, and how many boxes in `box_order` belong to it


def share_extents(
    decls: Sequence[TensorDecl], classes: Sequence[ClassRun], shares: Mapping[int, Interval]
) -> Iterator[Extent]:
    """Yield what one rank writes of the boxes that it declares, `decls` in `box_order`.

    `shares`: bytes of the boxes of a class, one after the other; without an entry, all of them.
    Borders are rounded to multiples of 64 KiB in a box, so that a small box has one writer.
    """
    ends: dict[int, int] = {}
    numbers = (number for number, count in classes for _ in range(count))
    for index, (decl, number) in enumerate(zip(decls, numbers, strict=True)):
        box, item_nbytes = decl.sharding.box, itemsize(decl.spec.dtype)
        assert box is not None  # of a box
        start, nbytes = ends.get(number, 0), box.numel * item_nbytes
        ends[number] = start + nbytes
        low, high = 0, nbytes
        if number in shares:
            low, high = (
                round_to_step(border - start, COARSE_GRAIN_NBYTES, nbytes)
                for border in shares[number]
            )
        if low < high:
            yield from _extents(index, decl, box, low, high)


def _extents(index: int, decl: TensorDecl, box: Box, low: int, high: int) -> Iterator[Extent]:
    """Yield bytes [low, high) of a local box as extents."""
    item_nbytes = itemsize(decl.spec.dtype)
    for first, local, count in runs(
        box, decl.spec.shape, local=full_box(box.shape), local_shape=box.shape
    ):
        start, local_start = first * item_nbytes, local * item_nbytes
        skipped = max(low - local_start, 0)
        nbytes = min(count * item_nbytes, high - local_start)
        if skipped < nbytes:
            yield Extent(index, start + skipped, start + nbytes, local_start + skipped)

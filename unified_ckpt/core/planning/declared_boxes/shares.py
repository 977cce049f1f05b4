"""What one rank writes of the boxes that it declares: its shares of their bytes, as extents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unified_ckpt.core.intervals import Interval
from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.sharding.boxes import full_box, runs
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize

ClassRun = tuple[int, int]  # a class, and how many boxes in `box_order` belong to it


def share_extents(
    decls: Sequence[TensorDecl], classes: Sequence[ClassRun], shares: Mapping[int, Interval]
) -> Iterator[Extent]:
    """Yield what one rank writes of the boxes that it declares, `decls` in `box_order`.

    `shares`: bytes of the boxes of a class, one after the other; without an entry, all of them. A
    box is written whole, by the rank whose share has its middle: replicas may differ.
    """
    ends: dict[int, int] = {}
    numbers = (number for number, count in classes for _ in range(count))
    for index, (decl, number) in enumerate(zip(decls, numbers, strict=True)):
        box, item_nbytes = decl.sharding.box, itemsize(decl.spec.dtype)
        assert box is not None  # of a box
        start, nbytes = ends.get(number, 0), box.numel * item_nbytes
        ends[number] = start + nbytes
        low, high = shares.get(number, (start, start + nbytes))
        if low <= start + nbytes // 2 < high:
            for first, local, count in runs(
                box, decl.spec.shape, local=full_box(box.shape), local_shape=box.shape
            ):
                offset = first * item_nbytes
                yield Extent(index, offset, offset + count * item_nbytes, local * item_nbytes)

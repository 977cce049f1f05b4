"""The boxes that a rank declares, as one message to rank 0.

Names, dtypes and shapes are apart from the boxes: many ranks hold other boxes of the same tensors.
Tensors that are cut alike, such as the optimizer state of a parameter, share one set of boxes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from unified_ckpt.core.sharding.boxes import Box, strides
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import TensorSpec, spec_of

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class BoxNames:
    """The tensors of which some ranks declare boxes, sorted by key.

    `sets`: by tensor, the number of its set of boxes. Tensors with one set have one shape.
    """

    tensors: tuple[tuple[Key, TensorSpec], ...]
    sets: tuple[int, ...]

    @cached_property
    def set_count(self) -> int:
        """The number of sets."""
        return len(set(self.sets))


@dataclass(frozen=True, slots=True)
class BoxTable:
    """The boxes that a rank declares: of set `i`, the next `counts[i]` rows of `corners`.

    `corners`: the first and the last element of each box, counted in row-major order. With the
    shape of the tensor, they determine the box.
    """

    names: BoxNames
    counts: Numbers
    corners: Numbers  # [boxes, 2]


def has_elements(decl: TensorDecl) -> bool:
    """Return whether a declaration is of a box that is not empty."""
    return decl.sharding.box is not None and decl.sharding.box.numel > 0


def box_order(decl: TensorDecl) -> tuple[Key, tuple[int, ...], tuple[int, ...]]:
    """Return the sort key of declared boxes, in which all ranks count them."""
    box = decl.sharding.box
    assert box is not None  # a rule has no box
    return decl.key, box.offsets, box.shape


def split_boxes(decls: Iterable[TensorDecl]) -> tuple[list[TensorDecl], list[TensorDecl]]:
    """Return the declarations with a rule, and those of boxes, in `box_order`."""
    rules, boxes = list[TensorDecl](), list[TensorDecl]()
    for decl in decls:
        (rules if decl.sharding.box is None else boxes).append(decl)
    return rules, sorted(boxes, key=box_order)


def encode_boxes(decls: Sequence[TensorDecl]) -> tuple[bytes, bytes]:
    """Encode declared boxes, in `box_order`: their tensors, and the boxes."""
    rows, sets = list[object](), dict[tuple[tuple[int, ...], tuple[int, ...]], int]()
    numbers = list[int]()
    for (part, fqn), boxes in groupby(decls, key=attrgetter("key")):
        corners = list[int]()
        for decl in boxes:
            if decl.sharding.box is not None and decl.sharding.box.numel:
                corners += _corners(decl.sharding.box, decl.spec.shape)
        number = sets.setdefault((decl.spec.shape, tuple(corners)), len(sets))
        rows.append([part, fqn, decl.spec.dtype, decl.spec.shape, number])
    numbers += (len(corners) // 2 for _, corners in sets)
    numbers += chain.from_iterable(corners for _, corners in sets)
    names = json.dumps(rows, separators=(",", ":")).encode()
    return zlib.compress(names, 1), zlib.compress(np.array(numbers, "<i8").tobytes(), 1)


def decode_names(data: bytes) -> BoxNames:
    """Decode the tensors of `encode_boxes`."""
    rows = json.loads(zlib.decompress(data))
    tensors = (((part, fqn), spec_of(dtype, tuple(shape))) for part, fqn, dtype, shape, _ in rows)
    return BoxNames(tuple(tensors), tuple(row[-1] for row in rows))


def decode_boxes(names: BoxNames, data: bytes) -> BoxTable:
    """Decode the boxes of `encode_boxes`."""
    numbers = np.frombuffer(zlib.decompress(data), "<i8").astype(np.int64, copy=False)
    return BoxTable(names, numbers[: names.set_count], numbers[names.set_count :].reshape(-1, 2))


def _corners(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last element of a box."""
    first = last = 0
    for offset, size, step in zip(box.offsets, box.shape, strides(shape), strict=True):
        first += offset * step
        last += (offset + size - 1) * step
    return first, last


def box_at(first: int, last: int, shape: Sequence[int]) -> Box:
    """Return the box with this first and last element."""
    offsets, sizes = list[int](), list[int]()
    for step in strides(shape):
        (low, first), (high, last) = divmod(first, step), divmod(last, step)
        offsets.append(low)
        sizes.append(high - low + 1)
    return Box(tuple(offsets), tuple(sizes))


def box_sizes(corners: Numbers, shape: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return offsets and sizes of boxes with these corners, each [dims, boxes]."""
    rest, offsets, sizes = corners, list[Numbers](), list[Numbers]()
    for step in strides(shape):
        index, rest = rest // step, rest % step
        offsets.append(index[:, 0])
        sizes.append(index[:, 1] - index[:, 0] + 1)
    empty = np.zeros((0, len(corners)), np.int64)
    return np.array(offsets or empty), np.array(sizes or empty)

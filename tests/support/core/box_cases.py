"""Draws boxes that ranks declare, and counts in numpy how often they have each element."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from unified_ckpt.core.sharding.box_tables import (
    BoxNames,
    BoxTable,
    box_order,
    decode_boxes,
    decode_names,
    encode_boxes,
)
from unified_ckpt.core.sharding.boxes import Box, range_to_boxes
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple) | st.sampled_from(
    [(700, 90), (90_000,)]
)


@st.composite
def tiling(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that tile a tensor: cut at planes, or ranges of the flattened tensor."""
    numel = prod(shape)
    if draw(st.booleans()):
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=4))})
        return [box for low, high in pairwise(cuts) for box in range_to_boxes(shape, low, high)]
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        boxes += cut_at(box, dim, draw(st.integers(0, box.shape[dim])))
    return boxes


def cut_at(box: Box, dim: int, length: int) -> list[Box]:
    """Cut a box after `length` elements of a dim; parts without elements are left out."""
    halves = []
    for low, size in ((0, length), (length, box.shape[dim] - length)):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[dim], shape[dim] = offsets[dim] + low, size
        halves.append(Box(tuple(offsets), tuple(shape)))
    return [half for half in halves if half.numel]


def times_covered(shape: Sequence[int], boxes: Iterable[Box]) -> NDArray[Any]:
    """Return how many boxes have each element."""
    counts = np.zeros(tuple(shape), int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


def declared(fqn: str, spec: TensorSpec, boxes: Iterable[Box]) -> list[TensorDecl]:
    """Return the declarations of one rank's boxes of a tensor."""
    return [TensorDecl("model", fqn, spec, Sharding(box=box)) for box in boxes]


@st.composite
def declarations(draw: st.DrawFn, world: int) -> list[list[TensorDecl]]:
    """Draw by rank, in `box_order`: tilings with replicas. Some tensors are cut alike."""
    by_rank: list[list[TensorDecl]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(1, 3))):
        shape = draw(SHAPES)
        boxes = draw(tiling(shape))
        holders = [
            draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=draw(st.integers(1, 3))))
            for _ in boxes
        ]
        for suffix in ("", "/exp_avg")[: draw(st.integers(1, 2))]:
            spec = TensorSpec(draw(st.sampled_from(["F32", "BF16", "U8"])), shape)
            for rank in range(world):
                held = [box for box, ranks in zip(boxes, holders, strict=True) if rank in ranks]
                by_rank[rank] += declared(f"{number}{suffix}", spec, held)
    return [sorted(decls, key=box_order) for decls in by_rank]


def tables_of(
    by_rank: Sequence[Sequence[TensorDecl]],
) -> tuple[dict[str, BoxTable], dict[str, list[int]]]:
    """Return the tables of all ranks, and the ranks of each, as rank 0 decodes them."""
    tables, ranks = dict[str, BoxTable](), dict[str, list[int]]()
    names = dict[bytes, BoxNames]()
    for rank, decls in enumerate(by_rank):
        if not decls:
            continue
        names_body, body = encode_boxes(sorted(decls, key=box_order))
        table_names = names.setdefault(names_body, decode_names(names_body))
        table_id = f"{names_body.hex()}{body.hex()}"
        tables[table_id] = decode_boxes(table_names, body)
        ranks.setdefault(table_id, []).append(rank)
    return tables, ranks

"""Reads of declared boxes, compared with slices by numpy."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.planning import box_reads
from unified_ckpt.core.planning.box_reads import plan_box_reads
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, spec_of

Span = tuple[int, int]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        drawn.append(Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)))
    return shape, drawn


def decls_of(shape: tuple[int, ...], held: list[Box]) -> list[TensorDecl]:
    spec = spec_of("I16", shape)
    return [TensorDecl("model", "w", spec, Sharding(box=box)) for box in held]


@given(
    case=boxes(),
    contiguous=st.sets(st.integers(0, 2)),
    gap=st.sampled_from([0, 4, 16, 1 << 10]),
    limit=st.integers(2, 400),
    long=st.sampled_from([2, 12, 1 << 20]),
)
def test_reads_fill_each_box_once(
    case: tuple[tuple[int, ...], list[Box]],
    contiguous: set[int],
    gap: int,
    limit: int,
    long: int,
) -> None:
    shape, held = case
    if not shape:
        contiguous = {0, 1, 2}
    array = np.arange(prod(shape), dtype=np.int16).reshape(shape)
    stored = array.tobytes()
    filled = [np.full(box.shape, -1, dtype=np.int16) for box in held]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_reads, "MAX_GAP_NBYTES", gap)
        patch.setattr(box_reads, "SMALL_NBYTES", long)
        plan = plan_box_reads(decls_of(shape, held), contiguous=contiguous, limit_nbytes=limit)
    for extent in plan.extents:
        assert extent.decl_index in contiguous
        into = filled[extent.decl_index].reshape(-1).view(np.uint8)
        span = slice(extent.local_offset, extent.local_offset + extent.stop - extent.start)
        assert (into[span] == 255).all(), "bytes are read twice"
        into[span] = np.frombuffer(stored[extent.start : extent.stop], np.uint8)
    strides = tuple(2 * prod(shape[dim + 1 :]) for dim in range(len(shape)))
    for read in plan.box_reads:
        assert 0 < read.stop - read.start <= max(limit, 2)
        part = np.ndarray(read.part.shape, np.int16, stored[read.start : read.stop], 0, strides)
        last = sum((n - 1) * step for n, step in zip(read.part.shape, strides, strict=True))
        assert read.stop - read.start == last + 2, "reads beyond the last element"
        target = filled[read.decl_index][read.part.slices]
        assert (target == -1).all(), "an element is read twice"
        target[...] = part
    for box, values in zip(held, filled, strict=True):
        assert np.array_equal(values, array[box.slices])


def spans_of(shape: tuple[int, ...], *held: Box) -> list[Span]:
    plan = plan_box_reads(decls_of(shape, [*held]), contiguous=(), limit_nbytes=1 << 20)
    return [(read.start, read.stop) for read in plan.box_reads]


def test_short_runs_are_read_together() -> None:
    row = 2 * 4096
    column = Box((0, 100), (16, 8))
    assert spans_of((16, 4096), column) == [(200, 15 * row + 216)]
    assert len(spans_of((16, 1 << 20), column)) == 16, "a gap is too long"


def test_tensors_read_twice_are_named() -> None:
    columns = [Box((0, 100), (16, 8)), Box((0, 200), (16, 8)), Box((17, 0), (1, 4096))]
    decls = decls_of((32, 4096), columns)
    other = TensorDecl("model", "other", spec_of("I16", (4,)), Sharding(box=Box((0,), (4,))))
    plan = plan_box_reads([*decls, other], contiguous=(), limit_nbytes=1 << 20)
    assert plan.overlapping == {0, 1, 2}
    assert not plan_box_reads(decls[1:], contiguous=(), limit_nbytes=1 << 20).overlapping

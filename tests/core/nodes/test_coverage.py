"""Gaps and differences of boxes, compared with a mask of elements."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.engine.cluster.node_folders import boxes_of
from tests.support.oracles import where
from unified_ckpt.core.nodes.coverage import coverage_gaps, subtract_box
from unified_ckpt.core.sharding.boxes import Box


@st.composite
def covers(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw arbitrary boxes, or a tiling, sometimes with overlaps or without one box."""
    shape = draw(st.sampled_from([(), (6,), (0,), (3, 0), (4, 5), (6, 1), (3, 4, 2)]))
    drawn = draw(st.lists(boxes_of(shape), max_size=5))
    if draw(st.booleans()):
        tiling = [Box((0,) * len(shape), shape)]
        for added in draw(st.lists(boxes_of(shape), max_size=3)):
            tiling = [piece for box in tiling for piece in [*subtract_box(box, added)]] + [added]
        drawn = [*tiling, *drawn[: draw(st.integers(0, 2))]]
        if drawn and draw(st.booleans()):
            drawn.pop(draw(st.integers(0, len(drawn) - 1)))
    return shape, draw(st.permutations(drawn))


@given(covers())
@settings(max_examples=200)
@example(
    ((4,), [Box((0,), (3,)), Box((0,), (1,))])
)  # as many elements as the tensor has, yet a gap
@example(((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((1, 2), (2, 2))]))
@example(((2,), [Box((0,), (1,)), Box((1,), (1,)), Box((1,), (0,))]))
def test_gaps_cover_each_missing_element_once(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    mask = np.zeros(shape, dtype=bool)
    for box in boxes:
        mask[where(box)] = True
    gaps = list(coverage_gaps(shape, iter(boxes)))
    counted = np.zeros(shape, dtype=int)
    for gap in gaps:
        assert gap.numel > 0
        counted[where(gap)] += 1
    assert np.array_equal(counted, (~mask).astype(int)), "each missing element once"


def test_gaps_of_missing_nodes_are_merged_and_lazy() -> None:
    """Three missing nodes out of 2,048 are one gap, not one for each rank or row."""
    boxes = [
        Box((4 * m, 100 * t), (4, 100)) for m in range(2048) for t in range(8) if m not in (7, 8, 9)
    ]
    assert list(coverage_gaps((8192, 800), boxes)) == [Box((28, 0), (12, 800))]
    assert next(
        coverage_gaps((1 << 20, 4), [Box((2 * i, 0), (1, 4)) for i in range(1 << 12)])
    ) == Box((1, 0), (1, 4))


@given(st.data(), st.sampled_from([(), (5,), (4, 3), (3, 2, 4)]))
def test_subtract_box_leaves_the_other_elements_once(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    box, removed = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    counted, expected = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
    expected[where(box)] = 1
    expected[where(removed)] = 0
    for piece in subtract_box(box, removed):
        counted[where(piece)] += 1
    assert np.array_equal(counted, expected)

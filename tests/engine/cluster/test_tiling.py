"""The regions that a window of a tensor is read from, compared with masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.engine.cluster.node_folders import SPECS, BoxesByKey, boxes_of, whole_of
from tests.support.oracles import where
from unified_ckpt.core.nodes.coverage import subtract_box
from unified_ckpt.core.sharding.boxes import Box, full_box, intersect
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.cluster.folders import FolderCache
from unified_ckpt.engine.cluster.storage import ShardReader
from unified_ckpt.engine.cluster.tiling import slab_range_of


@st.composite
def covered(draw: st.DrawFn) -> tuple[Key, list[BoxesByKey]]:
    """Draw folders that cover a tensor by tiles, as a whole or both, with any further boxes."""
    key = draw(st.sampled_from([key for key in sorted(SPECS) if SPECS[key].nbytes]))
    shape = SPECS[key].shape
    tiles = [full_box(shape)]
    for drawn_box in draw(st.lists(boxes_of(shape), max_size=3)):
        cut = [box for box in tiles if intersect(box, drawn_box) is not None]
        tiles = [piece for box in tiles for piece in subtract_box(box, drawn_box)] + [
            overlap for box in cut if (overlap := intersect(box, drawn_box)) is not None
        ]
    stored: list[BoxesByKey] = [{key: []} for _ in range(draw(st.integers(1, 4)))]
    for box in [*tiles, *draw(st.lists(boxes_of(shape), max_size=3))]:
        for number in draw(st.sets(st.sampled_from(range(len(stored))), min_size=1)):
            if box not in stored[number][key]:
                stored[number][key].append(box)
    return key, [folder if folder[key] else {} for folder in stored]


def check_regions(
    storage: ShardReader,
    key: Key,
    save: Sequence[BoxesByKey],
    window: Box,
    spoilt: frozenset[Box],
    local: frozenset[int],
) -> None:
    """Check that one region has each intact element, in a local folder if possible."""
    shape = SPECS[key].shape
    needed, local_mask, counts, local_counts = (np.zeros(shape, dtype=int) for _ in range(4))
    for number, folder_boxes in enumerate(save):
        for box in folder_boxes.get(key, ()):
            if box not in spoilt and (shared := intersect(box, window)) is not None:
                needed[where(shared)] = 1
                local_mask[where(shared)] |= number in local
    for region in storage._regions(key, window, spoilt):
        assert intersect(region.box, region.stored_box) == region.box
        assert {folder for folder, _ in region.holders} == {
            n
            for n, folder_boxes in enumerate(save)
            if region.stored_box in folder_boxes.get(key, ())
        }
        assert [folder in local for folder, _ in region.holders] == sorted(
            (folder in local for folder, _ in region.holders), reverse=True
        )
        if (shared := intersect(region.box, window)) is not None:
            counts[where(shared)] += 1
            local_counts[where(shared)] += region.holders[0][0] in local
    assert np.array_equal(counts, needed)
    assert np.array_equal(local_counts, local_mask)


def test_tile_buffers_between_the_same_edges_share_regions() -> None:
    """A tensor that is read row by row resolves its regions once per stored box."""
    key = ("model", "w")
    storage = ShardReader(
        whole_of([{key: [Box((0, 0), (3, 4))]}, {key: [Box((3, 0), (3, 4))]}]),
        FolderCache([]),
        local=[],
        rotation=0,
        complete=True,
    )
    regions = [storage._regions(key, Box((row, 0), (1, 4)), frozenset()) for row in range(6)]
    assert [regions[row] is regions[row - 1] for row in range(1, 6)] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert [region.box for region in regions[4]] == [Box((3, 0), (3, 4))]


@given(st.data())
@settings(max_examples=300)
def test_box_as_slabs_of_its_tensor(data: st.DataObject) -> None:
    """Positions of bytes in a box, compared with numpy; bytes outside have none."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    box, spec = data.draw(boxes_of(shape)), TensorSpec("I16", shape)
    band = slab_range_of(box, spec)
    if band is None:
        assert (
            not box.numel
            or sum(n != size for n, size in zip(box.shape[1:], shape[1:], strict=True)) > 0
        )
        return
    # each byte holds its offset in the tensor
    numbers = np.arange(spec.nbytes, dtype=np.int64).reshape(*shape, 2)
    inside = numbers[where(box)].reshape(-1).tolist()
    for start in range(spec.nbytes):
        for nbytes in (1, 2, 5):
            expected, position = list(range(start, start + nbytes)), band.position(start, nbytes)
            assert position is None or inside[position : position + nbytes] == expected
            assert position is not None or nbytes > 1 or start not in inside


@st.composite
def partly(draw: st.DrawFn) -> tuple[Key, list[BoxesByKey]]:
    """Draw folders with any boxes of a tensor; boxes may overlap, and elements may be missing."""
    key = draw(st.sampled_from([key for key in sorted(SPECS) if SPECS[key].nbytes]))
    boxes = st.lists(boxes_of(SPECS[key].shape), min_size=1, max_size=4, unique=True)
    return key, [
        {key: folder_boxes} for folder_boxes in draw(st.lists(boxes, min_size=1, max_size=4))
    ]


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@given(
    st.one_of(st.tuples(covered(), st.just(True)), st.tuples(partly(), st.just(False))), st.data()
)
@settings(max_examples=100)
@example(
    ((("model", "line"), [{("model", "line"): [Box((0,), (3,)), Box((1,), (2,))]}]), False), None
)
def test_window_in_disjoint_regions(
    part: int, drawn: tuple[tuple[Key, list[BoxesByKey]], bool], data: st.DataObject | None
) -> None:
    """Of saves with all elements, or any: counting elements does not prove that none is missing."""
    check_windows(*drawn[0], data, proved=drawn[1])


def check_windows(
    key: Key, save: list[BoxesByKey], data: st.DataObject | None, *, proved: bool
) -> None:
    if data is None:
        storage = ShardReader(
            whole_of(save), FolderCache([]), local=(), rotation=0, complete=proved
        )
        check_regions(storage, key, save, full_box(SPECS[key].shape), frozenset(), frozenset())
        return
    index, shape = whole_of(save), SPECS[key].shape
    local = frozenset(data.draw(st.sets(st.sampled_from(range(len(save))))))
    storage = ShardReader(
        index, FolderCache([]), local=local, rotation=data.draw(st.integers(0, 5)), complete=proved
    )
    for _ in range(3):
        window = full_box(shape)
        if shape:
            low = data.draw(st.integers(0, shape[0] - 1))
            window = Box(
                (low, *(0,) * (len(shape) - 1)),
                (data.draw(st.integers(1, shape[0] - low)), *shape[1:]),
            )
        boxes = sorted(
            {box for folder in save for box in folder.get(key, ())},
            key=lambda box: (box.offsets, box.shape),
        )
        for spoilt in (frozenset[Box](), frozenset(data.draw(st.sets(st.sampled_from(boxes))))):
            check_regions(storage, key, save, window, spoilt, local)

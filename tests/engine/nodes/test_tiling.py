"""The stored boxes that a window of a tensor is read from, against masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.node_folders import SPECS, Held, boxes_of, whole_of
from tests.support.oracles import where
from unified_ckpt.core.nodes.coverage import subtract_box
from unified_ckpt.core.sharding.boxes import Box, full_box, intersect
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.nodes.folders import FolderCache
from unified_ckpt.engine.nodes.storage import ShardedStorage
from unified_ckpt.engine.nodes.tiling import slab_range_of


@st.composite
def covered(draw: st.DrawFn) -> tuple[Key, list[Held]]:
    """A tensor that some folders hold between them: in boxes that tile it, whole, or both, with any
    others.
    """
    key = draw(st.sampled_from([key for key in sorted(SPECS) if SPECS[key].nbytes]))
    shape = SPECS[key].shape
    tiles = [full_box(shape)]
    for one in draw(st.lists(boxes_of(shape), max_size=3)):
        cut = [box for box in tiles if intersect(box, one) is not None]
        tiles = [piece for box in tiles for piece in subtract_box(box, one)] + [
            found for box in cut if (found := intersect(box, one)) is not None
        ]
    held: list[Held] = [{key: []} for _ in range(draw(st.integers(1, 4)))]
    for box in [*tiles, *draw(st.lists(boxes_of(shape), max_size=3))]:
        for number in draw(st.sets(st.sampled_from(range(len(held))), min_size=1)):
            if box not in held[number][key]:
                held[number][key].append(box)
    return key, [one if one[key] else {} for one in held]


def check_regions(
    storage: ShardedStorage,
    key: Key,
    save: Sequence[Held],
    window: Box,
    spoilt: frozenset[Box],
    own: frozenset[int],
) -> None:
    """Each element of the window that a box has which is not corrupt is in one region, that of a
    folder here where one has it.
    """
    shape = SPECS[key].shape
    needed, here, told, told_here = (np.zeros(shape, dtype=int) for _ in range(4))
    for number, held in enumerate(save):
        for box in held.get(key, ()):
            if box not in spoilt and (shared := intersect(box, window)) is not None:
                needed[where(shared)] = 1
                here[where(shared)] |= number in own
    for region in storage._regions(key, window, spoilt):
        assert intersect(region.box, region.stored_box) == region.box
        assert {folder for folder, _ in region.holders} == {
            n for n, held in enumerate(save) if region.stored_box in held.get(key, ())
        }
        assert [folder in own for folder, _ in region.holders] == sorted(
            (folder in own for folder, _ in region.holders), reverse=True
        )
        if (shared := intersect(region.box, window)) is not None:
            told[where(shared)] += 1
            told_here[where(shared)] += region.holders[0][0] in own
    assert np.array_equal(told, needed)
    assert np.array_equal(told_here, here)


def test_tile_buffers_between_the_same_edges_share_regions() -> None:
    """A tensor that is read row by row is not put together for each row."""
    key = ("model", "w")
    storage = ShardedStorage(
        whole_of([{key: [Box((0, 0), (3, 4))]}, {key: [Box((3, 0), (3, 4))]}]),
        FolderCache([]),
        local=[],
        rotation=0,
        complete=True,
    )
    found = [storage._regions(key, Box((row, 0), (1, 4)), frozenset()) for row in range(6)]
    assert [found[row] is found[row - 1] for row in range(1, 6)] == [True, True, False, True, True]
    assert [region.box for region in found[4]] == [Box((3, 0), (3, 4))]


@given(st.data())
@settings(max_examples=300)
def test_box_as_slabs_of_its_tensor(data: st.DataObject) -> None:
    """What a band says of the place of bytes, against numpy; what it does not say is in no line of
    the box.
    """
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    box, spec = data.draw(boxes_of(shape)), TensorSpec("I16", shape)
    band = slab_range_of(box, spec)
    if band is None:
        assert (
            not box.numel
            or sum(n != size for n, size in zip(box.shape[1:], shape[1:], strict=True)) > 0
        )
        return
    numbers = np.arange(spec.nbytes, dtype=np.int64).reshape(
        *shape, 2
    )  # of each byte its place in the tensor
    inside = numbers[where(box)].reshape(-1).tolist()
    for start in range(spec.nbytes):
        for nbytes in (1, 2, 5):
            wanted, position = list(range(start, start + nbytes)), band.position(start, nbytes)
            assert position is None or inside[position : position + nbytes] == wanted
            assert position is not None or nbytes > 1 or start not in inside


@st.composite
def partly(draw: st.DrawFn) -> tuple[Key, list[Held]]:
    """A tensor of which some folders hold any boxes, of which some may overlap and none may have
    some elements.
    """
    key = draw(st.sampled_from([key for key in sorted(SPECS) if SPECS[key].nbytes]))
    boxes = st.lists(boxes_of(SPECS[key].shape), min_size=1, max_size=4, unique=True)
    return key, [{key: held} for held in draw(st.lists(boxes, min_size=1, max_size=4))]


@given(covered(), st.data())
@settings(max_examples=400)
def test_window_in_disjoint_regions(drawn: tuple[Key, list[Held]], data: st.DataObject) -> None:
    check_windows(*drawn, data, proved=True)


@given(partly(), st.data())
@settings(max_examples=400)
@example((("model", "line"), [{("model", "line"): [Box((0,), (3,)), Box((1,), (2,))]}]), None)
def test_regions_are_disjoint_where_elements_are_missing(
    drawn: tuple[Key, list[Held]], data: st.DataObject | None
) -> None:
    """As many elements in boxes as in the tensor say nothing: they may be the same ones."""
    check_windows(*drawn, data, proved=False)


def check_windows(key: Key, save: list[Held], data: st.DataObject | None, *, proved: bool) -> None:
    if data is None:
        storage = ShardedStorage(
            whole_of(save), FolderCache([]), local=(), rotation=0, complete=proved
        )
        check_regions(storage, key, save, full_box(SPECS[key].shape), frozenset(), frozenset())
        return
    found, shape = whole_of(save), SPECS[key].shape
    own = frozenset(data.draw(st.sets(st.sampled_from(range(len(save))))))
    storage = ShardedStorage(
        found, FolderCache([]), local=own, rotation=data.draw(st.integers(0, 5)), complete=proved
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
            {box for held in save for box in held.get(key, ())},
            key=lambda box: (box.offsets, box.shape),
        )
        for spoilt in (frozenset[Box](), frozenset(data.draw(st.sets(st.sampled_from(boxes))))):
            check_regions(storage, key, save, window, spoilt, own)

"""The cluster index against masks of elements, and the selection of a save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.cluster.node_folders import (
    SPECS,
    BoxesByKey,
    boxes_of,
    inventory,
    stored_of,
    whole_of,
)
from tests.support.oracles import where
from unified_ckpt.core.nodes.node_groups import shard_name
from unified_ckpt.core.sharding.boxes import Box, intersect
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.cluster.coverage import (
    ClusterIndex,
    build_index,
    decode_cluster_index,
    missing_boxes,
    select_save,
)
from unified_ckpt.engine.cluster.inventory import Inventory

# A save is a list of folders (tensor -> boxes). A box of the full shape is a whole tensor.


@st.composite
def saves(draw: st.DrawFn) -> list[BoxesByKey]:
    """Draw folders with any boxes; half of the time, tensors of one shape share their boxes."""
    folders: list[BoxesByKey] = []
    for _ in range(draw(st.integers(1, 4))):
        boxes_by_key: BoxesByKey = {}
        before: dict[tuple[int, ...], list[Box]] = {}
        for key in draw(st.sets(st.sampled_from(sorted(SPECS)))):
            shape = SPECS[key].shape
            if shape not in before or draw(st.booleans()):
                before[shape] = list(
                    dict.fromkeys(draw(st.lists(boxes_of(shape), min_size=1, max_size=3)))
                )
            boxes_by_key[key] = before[shape]
        folders.append(boxes_by_key)
    return folders


def same(first: ClusterIndex, second: ClusterIndex) -> bool:
    families = zip(first.layouts, second.layouts, strict=True)
    return (
        (first.folders, first.specs, first.layout_numbers, first.rank_extras, first.problems)
        == (
            second.folders,
            second.specs,
            second.layout_numbers,
            second.rank_extras,
            second.problems,
        )
    ) and all(a.shape == b.shape and np.array_equal(a.boxes, b.boxes) for a, b in families)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@given(saves(), st.data())
@settings(max_examples=60)
@example(
    [
        {("model", "w"): [Box((0, 0), (3, 4))], ("model", "v"): [Box((0, 0), (3, 4))]},
        {("model", "w"): [Box((3, 0), (3, 4))]},
    ],
    None,
)
def test_coverage_matches_a_mask_of_each_tensor(
    part: int, save: list[BoxesByKey], data: st.DataObject | None
) -> None:
    """Compare index, coverage and holders with numpy masks; `data` draws windows, if any."""
    index = whole_of(save)
    assert index.specs == {key: SPECS[key] for folder in save for key in folder}
    assert same(decode_cluster_index(index.encode()), index)
    messages = missing_boxes(index)
    for key, spec in index.specs.items():
        mask = np.zeros(spec.shape, dtype=bool)
        for folder in save:
            for box in folder.get(key, ()):
                mask[where(box)] = True
        some = [text for text in messages if text.startswith(f"{key[0]}:{key[1]}: no node has [")]
        assert len(some) == (not mask.all()), key
        holders = {
            (box, i, box.shape != spec.shape)
            for i, folder in enumerate(save)
            for box in folder.get(key, ())
        }
        assert {
            holder for i in range(len(save)) for holder in index.layout(key).boxes_in_folder(i)
        } == holders
        if data is not None and spec.shape and spec.shape[0]:
            low = data.draw(st.integers(0, spec.shape[0] - 1))
            window = Box(
                (low, *(0,) * (len(spec.shape) - 1)),
                (data.draw(st.integers(1, spec.shape[0] - low)), *spec.shape[1:]),
            )
            crossing = index.layout(key).boxes_in_rows(low, low + window.shape[0])
            assert set(crossing) == {
                holder for holder in holders if intersect(holder[0], window) is not None
            }
    for i, folder in enumerate(save):
        assert sorted(index.keys_in_folder(i)) == sorted(
            (part, name) for part, tensors in stored_of(folder).items() for name in tensors
        )


def test_tensors_sharded_alike_share_one_layout() -> None:
    """Coverage is checked once per layout, and its boxes are stored once."""
    rows = [[Box((low, 0), (3, 4))] for low in (0, 3)]
    index = whole_of(
        [{key: boxes for key in SPECS if SPECS[key].shape == (6, 4)} for boxes in rows]
    )
    assert len(index.specs) == 4
    assert len(index.layouts) == 1
    assert index.layouts[0].boxes.tolist() == [[0, 1, 0, 0, 3, 4], [1, 1, 3, 0, 3, 4]]


def test_index_size_grows_with_nodes_only_by_their_addresses() -> None:
    def nbytes(nodes: int, layers: int) -> int:
        shape = (nodes, 4)
        stored = [
            {
                "model_shards": {
                    shard_name(f"l{n}", Box((m, 0), (1, 4)), shape): TensorSpec("F32", (1, 4))
                    for n in range(layers)
                }
            }
            for m in range(nodes)
        ]
        return len(
            build_index(
                [inventory(parts, number=m, count=nodes) for m, parts in enumerate(stored)]
            ).encode()
        )

    assert nbytes(200, 50) - nbytes(100, 50) <= nbytes(200, 1) - nbytes(100, 1) + 20


def test_first_folder_decides_dtype_and_shape() -> None:
    half = TensorSpec("F32", (3, 4))
    first = inventory({"model_shards": {"w@0:3/6,0:4/4": half}}, number=0, count=2)
    for other in ({"w@3:6/6,0:4/4": TensorSpec("BF16", (3, 4))}, {"w@3:6/9,0:4/4": half}):
        index = build_index([first, inventory({"model_shards": other}, number=1, count=2)])
        assert index.specs == {("model", "w"): TensorSpec("F32", (6, 4))}
        assert missing_boxes(index) == ["model:w: no node has [3:6, 0:4]"]
        assert index.keys_in_folder(1) == []


# selection of a save

HALVES = [{("model", "w"): [Box((low, 0), (3, 4))]} for low in (0, 3)]


def save_of(save_id: str, created: str, folders: Sequence[int]) -> list[Inventory]:
    totals = {"model": [1, 96]}
    inventories = [
        inventory(stored_of(HALVES[i]), number=i, count=2, save_id=save_id, lost=(f"{i}: is bad",))
        for i in folders
    ]
    return [replace(item, created=created, totals=totals) for item in inventories]


def test_select_save_prefers_the_latest_complete() -> None:
    old, new = save_of("a" * 16, "2025", [0, 1]), save_of("b" * 16, "2026", [1, 0])
    assert [folder.root for folder in select_save([*old, *new], label="x").folders] == ["/1", "/0"]
    selected = select_save([*old, *new[:1]], label="x")
    assert [folder.root for folder in selected.folders] == ["/0", "/1"]
    assert selected.problems == ("node 0: 0: is bad", "node 1: 1: is bad")


def test_error_when_no_save_is_complete() -> None:
    """The error names each save: what it lacks, why, and which ranks wrote it."""
    old, new = save_of("a" * 16, "2025", [0]), save_of("b" * 16, "2026", [1])
    with pytest.raises(uc.IncompleteError, match=r"x: save b{16} is incomplete") as caught:
        select_save([*old, *new], label="x")
    first, second = str(caught.value).split("x: save ")[1:]
    assert "folder(s) 0 of 2 are on no node present; rank(s) 0-1 of the save wrote them" in first
    assert "node 1: 1: is bad" in first
    assert "model:w: no node has [0:3, 0:4]" in first
    assert "model:w: no node has [3:6, 0:4]" in second
    with pytest.raises(uc.IncompleteError, match="no node has a checkpoint there"):
        select_save([], label="x")

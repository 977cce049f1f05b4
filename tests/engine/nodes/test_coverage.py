"""The cluster index against masks of elements, and the selection of a save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.node_folders import SPECS, Held, boxes_of, inventory, stored_of, whole_of
from tests.support.oracles import where
from unified_ckpt.core.nodes.node_groups import shard_name
from unified_ckpt.core.sharding.boxes import Box, intersect
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.nodes.coverage import (
    ClusterIndex,
    build_index,
    decode_cluster_index,
    missing_boxes,
    select_save,
)
from unified_ckpt.engine.nodes.inventory import Inventory

# a save, as (tensor -> boxes) of each folder; the whole tensor counts as stored whole


@st.composite
def saves(draw: st.DrawFn) -> list[Held]:
    """Folders that hold any boxes; tensors of one shape get the same ones half of the time."""
    found: list[Held] = []
    for _ in range(draw(st.integers(1, 4))):
        held: Held = {}
        before: dict[tuple[int, ...], list[Box]] = {}
        for key in draw(st.sets(st.sampled_from(sorted(SPECS)))):
            shape = SPECS[key].shape
            if shape not in before or draw(st.booleans()):
                before[shape] = list(
                    dict.fromkeys(draw(st.lists(boxes_of(shape), min_size=1, max_size=3)))
                )
            held[key] = before[shape]
        found.append(held)
    return found


def same(one: ClusterIndex, other: ClusterIndex) -> bool:
    families = zip(one.layouts, other.layouts, strict=True)
    return (
        (one.folders, one.specs, one.layout_numbers, one.rank_extras, one.problems)
        == (other.folders, other.specs, other.layout_numbers, other.rank_extras, other.problems)
    ) and all(a.shape == b.shape and np.array_equal(a.boxes, b.boxes) for a, b in families)


@given(saves(), st.data())
@settings(max_examples=400)
@example(
    [
        {("model", "w"): [Box((0, 0), (3, 4))], ("model", "v"): [Box((0, 0), (3, 4))]},
        {("model", "w"): [Box((3, 0), (3, 4))]},
    ],
    None,
)
def test_coverage_matches_a_mask_of_each_tensor(
    save: list[Held], data: st.DataObject | None
) -> None:
    found = whole_of(save)
    assert found.specs == {key: SPECS[key] for held in save for key in held}
    assert same(decode_cluster_index(found.encode()), found)
    told = missing_boxes(found)
    for key, spec in found.specs.items():
        mask = np.zeros(spec.shape, dtype=bool)
        for held in save:
            for box in held.get(key, ()):
                mask[where(box)] = True
        some = [text for text in told if text.startswith(f"{key[0]}:{key[1]}: no node has [")]
        assert len(some) == (not mask.all()), key
        holders = {
            (box, i, box.shape != spec.shape)
            for i, held in enumerate(save)
            for box in held.get(key, ())
        }
        assert {
            one for i in range(len(save)) for one in found.layout(key).boxes_in_folder(i)
        } == holders
        if data is not None and spec.shape and spec.shape[0]:
            low = data.draw(st.integers(0, spec.shape[0] - 1))
            window = Box(
                (low, *(0,) * (len(spec.shape) - 1)),
                (data.draw(st.integers(1, spec.shape[0] - low)), *spec.shape[1:]),
            )
            crossing = found.layout(key).boxes_in_rows(low, low + window.shape[0])
            assert set(crossing) == {
                one for one in holders if intersect(one[0], window) is not None
            }
    for i, held in enumerate(save):
        assert sorted(found.keys_in_folder(i)) == sorted(
            (part, name) for part, tensors in stored_of(held).items() for name in tensors
        )


def test_tensors_sharded_alike_share_one_layout() -> None:
    """Coverage is proved once for it, and its boxes are told once."""
    rows = [[Box((low, 0), (3, 4))] for low in (0, 3)]
    found = whole_of(
        [{key: boxes for key in SPECS if SPECS[key].shape == (6, 4)} for boxes in rows]
    )
    assert len(found.specs) == 4
    assert len(found.layouts) == 1
    assert found.layouts[0].boxes.tolist() == [[0, 1, 0, 0, 3, 4], [1, 1, 3, 0, 3, 4]]


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
                [inventory(one, number=m, count=nodes) for m, one in enumerate(stored)]
            ).encode()
        )

    assert nbytes(200, 50) - nbytes(100, 50) <= nbytes(200, 1) - nbytes(100, 1) + 20


def test_first_folder_decides_dtype_and_shape() -> None:
    half = TensorSpec("F32", (3, 4))
    one = inventory({"model_shards": {"w@0:3/6,0:4/4": half}}, number=0, count=2)
    for other in ({"w@3:6/6,0:4/4": TensorSpec("BF16", (3, 4))}, {"w@3:6/9,0:4/4": half}):
        found = build_index([one, inventory({"model_shards": other}, number=1, count=2)])
        assert found.specs == {("model", "w"): TensorSpec("F32", (6, 4))}
        assert missing_boxes(found) == ["model:w: no node has [3:6, 0:4]"]
        assert found.keys_in_folder(1) == []


# which save

HALVES = [{("model", "w"): [Box((low, 0), (3, 4))]} for low in (0, 3)]


def save_of(save_id: str, created: str, folders: Sequence[int]) -> list[Inventory]:
    totals = {"model": [1, 96]}
    made = [
        inventory(stored_of(HALVES[i]), number=i, count=2, save_id=save_id, lost=(f"{i}: is bad",))
        for i in folders
    ]
    return [replace(one, created=created, totals=totals) for one in made]


def test_newest_complete_save_is_selected() -> None:
    old, new = save_of("a" * 16, "2025", [0, 1]), save_of("b" * 16, "2026", [1, 0])
    assert [one.root for one in select_save([*old, *new], label="x").folders] == ["/1", "/0"]
    found = select_save([*old, *new[:1]], label="x")
    assert [one.root for one in found.folders] == ["/0", "/1"]
    assert found.problems == ("node 0: 0: is bad", "node 1: 1: is bad")


def test_error_when_no_save_is_complete() -> None:
    """Every save is told of, what it lacks, why, and who had it."""
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

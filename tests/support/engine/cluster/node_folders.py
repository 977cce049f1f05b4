"""Inventories of folders that exist only as declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, shard_name
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.cluster.coverage import ClusterIndex, build_index
from unified_ckpt.engine.cluster.inventory import Inventory, classify

Stored = Mapping[str, Mapping[str, TensorSpec]]


def inventory(
    stored: Stored,
    *,
    number: int = 0,
    count: int = 1,
    lost: tuple[str, ...] = (),
    save_id: str = "a" * 16,
) -> Inventory:
    listing, spans = classify(stored)
    return Inventory(
        root=f"/{number}",
        node=number,
        folder_id="",
        save_id=save_id,
        created="2026-01-01T00:00:00+00:00",
        group_count=count,
        group_number=number,
        ranks=(2 * number, 2 * number + 1),
        files=("model.safetensors",),
        tensor_list=listing,
        spans=spans,
        problems=lost,
        world_size=2 * count,
        totals={},
        rank_extras=0,
    )


SPECS = {
    ("model", "w"): TensorSpec("F32", (6, 4)),
    ("model", "v"): TensorSpec("F32", (6, 4)),  # like `w`: often cut the same way
    ("model", "x"): TensorSpec("BF16", (6, 4)),
    ("optimizer", "w"): TensorSpec("F32", (6, 4)),
    ("model", "line"): TensorSpec("I64", (5,)),
    ("model", "cube"): TensorSpec("I8", (2, 3, 4)),
    ("model", "zero"): TensorSpec("F32", ()),
    ("model", "empty"): TensorSpec("F32", (0, 3)),
}
BoxesByKey = dict[Key, list[Box]]


def stored_of(boxes_by_key: BoxesByKey) -> Stored:
    stored: dict[str, dict[str, TensorSpec]] = {}
    for (part, fqn), boxes in boxes_by_key.items():
        spec = SPECS[part, fqn]
        for box in boxes:
            if box.shape == spec.shape:
                stored.setdefault(part, {})[fqn] = spec
            else:
                stored.setdefault(part + SHARD_SUFFIX, {})[shard_name(fqn, box, spec.shape)] = (
                    TensorSpec(spec.dtype, box.shape)
                )
    return stored


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    if draw(st.booleans()):
        return Box((0,) * len(shape), shape)
    spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


def whole_of(save: Sequence[BoxesByKey]) -> ClusterIndex:
    return build_index(
        [
            inventory(stored_of(boxes_by_key), number=i, count=len(save))
            for i, boxes_by_key in enumerate(save)
        ]
    )

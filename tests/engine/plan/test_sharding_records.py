"""How ranks held tensors, as the manifest records it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.engine.plan.sharding_records import decode_rule, encode_shardings
from unified_ckpt.format.manifest_fields import ShardingRecords

dims = st.lists(
    st.builds(
        ShardDim,
        dim=st.integers(0, 2),
        size=st.integers(1, 4),
        stride=st.integers(1, 8),
        sections=st.integers(1, 3) | st.tuples(st.integers(1, 4), st.integers(1, 4)),
        chunk_length=st.integers(0, 3),
        name=st.sampled_from(["", "dp", "tp"]),
    ),
    max_size=2,
).map(tuple)
grids = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), max_size=3)


@st.composite
def rank_tuples(draw: st.DrawFn) -> tuple[int, ...]:
    ranks = [draw(st.integers(0, 9))]
    for size, stride in draw(grids):
        ranks = [rank + i * stride for rank in ranks for i in range(size)]
    return tuple(ranks)


@given(held=st.lists(st.tuples(dims, rank_tuples(), rank_tuples()), min_size=1, max_size=6))
def test_rules_come_back(
    held: list[tuple[tuple[ShardDim, ...], tuple[int, ...], tuple[int, ...]]],
) -> None:
    named = [
        ("model", f"t{i}", Sharding(shard_dims, mesh), holders)
        for i, (shard_dims, mesh, holders) in enumerate(held)
    ]
    records = encode_shardings(reversed(named))
    if records is None:
        return  # ranks that lie on one another are no grid
    records = ShardingRecords.model_validate_json(records.model_dump_json())
    rules = [decode_rule(rule) for rule in records.rules]
    by_name = [rules[rule] for rule, count in records.parts["model"] for _ in range(count)]
    assert by_name == [(sharding, list(holders)) for _, _, sharding, holders in named]


def test_record_of_16384_ranks_is_small() -> None:
    """FSDP over 128 x TP over 8 in each of 16 pipeline stages, 2400 tensors."""
    held = [
        (
            "model",
            f"stage.{stage:02}.{i:03}",
            Sharding(
                (ShardDim(0, 8, 1, name="tp"), ShardDim(0, 128, 8, name="dp")),
                tuple(range(stage * 1024, (stage + 1) * 1024)),
            ),
            tuple(range(stage * 1024, (stage + 1) * 1024)),
        )
        for stage in range(16)
        for i in range(150)
    ]
    records = encode_shardings(held)
    assert len(records.rules) == 16
    assert len(json.dumps(records.model_dump())) < 8000

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracles import World, make_decl, worlds
from unified_ckpt.core.sharding.declarations import (
    TensorDecl,
    check_complete,
    check_consistent,
    decode_table,
    describe_sharding,
    encode_table,
    group_tensors,
)
from unified_ckpt.core.sharding.shardings import ShardDim
from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import LayoutError, MismatchError

TP = ShardDim(0, 2, 1, name="tp")


@given(worlds(), st.integers())
@settings(max_examples=60)
def test_tables_round_trip_and_equal_tables_are_equal_bytes(world: World, seed: int) -> None:
    shuffled = list(world.decls)
    random.Random(seed).shuffle(shuffled)
    encoded = encode_table(shuffled)
    assert encoded == encode_table(world.decls)
    assert decode_table(encoded) == world.decls
    assert encode_table(decode_table(encoded)) == encoded


def test_each_sharding_is_encoded_once() -> None:
    rows = [
        make_decl((8, 8), ShardDim(0, 2048, 1), fqn=f"layers.{i}.w", ranks=range(2048))
        for i in range(50)
    ]
    assert len(json.loads(encode_table(rows))["shardings"]) == 1
    assert len(encode_table(rows)) < len(encode_table(rows[:1])) + 50 * 60


# groups


@given(st.randoms(), st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=5))
def test_groups_do_not_depend_on_order_or_on_table_ids(
    rng: random.Random, contents: list[set[int]]
) -> None:
    tables = {
        f"{i}": [make_decl((4,), fqn=f"w{n}") for n in sorted(names)]
        for i, names in enumerate(contents)
    }
    roll = {f"{i}": [i] for i in range(len(contents))}
    groups = group_tensors(tables, roll)
    order = list(tables)
    rng.shuffle(order)
    again = group_tensors({f"x{t}": tables[t] for t in order}, {f"x{t}": roll[t] for t in order})
    assert [(g.index, tuple("x" + t for t in g.table_ids), g.decls) for g in groups] == [
        (g.index, g.table_ids, g.decls) for g in again
    ]
    assert sorted(r.fqn for g in groups for r in g.decls) == sorted(
        {f"w{n}" for names in contents for n in names}
    )
    for group in groups:
        for decl in group.decls:
            assert set(group.table_ids) == {t for t, rows in tables.items() if decl in rows}


def test_one_name_with_two_shardings_is_in_two_groups() -> None:
    whole, cut = make_decl((4, 2)), make_decl((4, 2), TP)
    groups = group_tensors(
        {"a": [whole], "b": [cut], "c": [whole]}, {"a": [0], "b": [1, 2], "c": [3]}
    )
    assert [(g.table_ids, g.decls) for g in groups] == [(("a", "c"), (whole,)), (("b",), (cut,))]


# claims that contradict each other


def test_ranks_must_choose_one_encoding() -> None:
    plain, encoded = make_decl((4, 64)), make_decl((4, 64))._replace(encoding="log-8")
    assert decode_table(encode_table([encoded])) == [encoded] != [plain]
    with pytest.raises(MismatchError, match="model:w: got the encoding '' on rank 0 and 'log-8'"):
        check_consistent({"x": [plain], "y": [encoded]}, {"x": [0], "y": [1]})


def test_differing_specs_are_all_listed() -> None:
    first = [make_decl((4, 2), fqn="a"), make_decl((4,), fqn="b"), make_decl((1,), fqn="c")]
    second = [
        make_decl((5, 2), fqn="a"),
        make_decl((4,), fqn="b", dtype="BF16"),
        make_decl((1,), fqn="c"),
    ]
    with pytest.raises(MismatchError, match=r"ranks disagree on shapes or dtypes \(2\)") as caught:
        check_consistent({"x": first, "y": second}, {"x": [0, 1], "y": [2]})
    assert len(caught.value.wrong) == 2
    assert caught.value.wrong[0].startswith(
        "model:a: got F32 (4, 2) on rank 0 and F32 (5, 2) on rank 2"
    )
    assert caught.value.wrong[1].startswith(
        "model:b: got F32 (4,) on rank 0 and BF16 (4,) on rank 2"
    )
    assert all(text in str(caught.value) for text in caught.value.wrong)


def test_mesh_dim_names_do_not_distinguish_shardings() -> None:
    tables = {
        "x": [make_decl((4, 2), TP)],
        "y": [make_decl((4, 2), ShardDim(0, 2, 1, name="model"))],
    }
    check_consistent(tables, {"x": [0, 1], "y": [2, 3]})
    assert len(group_tensors(tables, {"x": [0, 1], "y": [2, 3]})) == 1


def test_long_lists_are_truncated_and_counted() -> None:
    tables = {
        "x": [make_decl((4,), fqn=f"w{i:02}") for i in range(30)],
        "y": [make_decl((5,), fqn=f"w{i:02}") for i in range(30)],
    }
    with pytest.raises(MismatchError, match=r"… and 10 more") as caught:
        check_consistent(tables, {"x": [0], "y": [1]})
    assert len(caught.value.wrong) == 30
    assert str(caught.value).count("\n") == 21


# whole copies


def complete(rows: list[TensorDecl], holders: list[int]) -> None:
    (group,) = group_tensors({"t": rows}, {"t": holders})
    check_complete(group, holders)


def test_a_missing_shard_is_refused() -> None:
    rows = [make_decl((4, 4), ShardDim(0, 2, 1, name="tp"), fqn="a"), make_decl((4,), fqn="b")]
    with pytest.raises(
        LayoutError,
        match=r"missing shards \(1\):\n  model:a: no rank holds the shard at \(1,\) "
        r"of \(tp of 2\); ranks 0, 2 declare",
    ):
        complete(rows, [0, 2])
    with pytest.raises(LayoutError, match=r"at \(1,\) of \(tp of 2\); ranks 0-2 declare"):
        complete(rows[:1], [0, 1, 2])  # beside a complete replica


# texts of errors


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([8, 0, 2, 1], "0-2, 8"),
        (range(2816), "0-2815"),
        (range(0, 80, 2), ", ".join(map(str, range(0, 40, 2))) + " (and 20 more)"),
    ],
)
def test_format_ranks(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_describe_sharding() -> None:
    assert describe_sharding(make_decl((4,)).sharding) == "a whole copy on each rank"
    text = describe_sharding(
        make_decl(
            (4, 4),
            ShardDim(0, 2, 1, (3, 1), 0, "tp"),
            ShardDim(1, 3, 2, 1, 2),
            ranks=(1, 2, 3, 4, 5, 0),
        ).sharding
    )
    assert (
        text == "dim 0 over 2 (tp, stride 1, sections (3, 1)); "
        "dim 1 over 3 (mesh dim, stride 2, padded to 2) on ranks 0-5"
    )

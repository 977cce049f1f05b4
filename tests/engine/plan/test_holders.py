"""What rank 0 tells each rank of its holder groups, against sets; and how much it has to think for
that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ckpt.core.sharding.declarations import HolderGroup, TensorDecl, group_tables
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.plan import holders as declarations
from unified_ckpt.engine.plan.holders import (
    Declarations,
    gather_declarations,
    publish_groups_by_node,
    read_memberships,
)
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import run_ranks

ROWS = [TensorDecl("model", name, TensorSpec("F32", (4, 2)), Sharding()) for name in "abcd"]


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from(range(len(ROWS)))), st.integers(0, 2)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60)
def test_ranks_of_a_node_with_equal_declarations_are_grouped(
    ranks: list[tuple[set[int], int]],
) -> None:
    """Whatever ranks of other nodes name, and in whatever order the tables are announced."""
    held, nodes = (
        [{ROWS[i] for i in named} for named, _ in ranks],
        [node for _, node in ranks],
    )

    def act(comm: Comm) -> list[tuple[int, tuple[int, ...], tuple[TensorDecl, ...]]]:
        meeting = comm.begin_collective("declarations", cached=False, timeout_seconds=20)
        rows = sorted(held[comm.rank], key=lambda row: row.key)
        with meeting.step("declarations"):
            table, found = gather_declarations(meeting, rows)
            if found is not None:
                publish_groups_by_node(meeting, found, nodes)
        members, _ = read_memberships(meeting, table, rows, prefix=f"{nodes[comm.rank]}/")
        return [(one.index, one.holders, one.decls) for one in members]

    told: dict[tuple[int, int], tuple[object, object]] = {}
    for rank, groups in enumerate(run_ranks(len(ranks), act)):
        assert sorted(row.fqn for _, _, rows in groups for row in rows) == sorted(
            row.fqn for row in held[rank]
        ), "each row once"
        for index, holders, rows in groups:
            assert told.setdefault((nodes[rank], index), (holders, rows)) == (holders, rows), (
                "all members know the same group"
            )
            for row in rows:
                assert set(holders) == {
                    at for at, there in enumerate(held) if nodes[at] == nodes[rank] and row in there
                }


class Told:
    """What rank 0 says, of as many nodes as a test likes."""

    def __init__(self) -> None:
        self.words: dict[str, bytes] = {}
        self.beats = 0

    def put(self, key: str, value: bytes) -> None:
        assert key not in self.words
        self.words[key] = value

    def heartbeat(self) -> None:
        self.beats += 1


def thought(monkeypatch: pytest.MonkeyPatch, *, nodes: int, tables: int) -> tuple[Told, list[int]]:
    """What rank 0 tells nodes of 8 ranks that hold `tables` tables in turn, and how many rows it
    looked at for each grouping.
    """
    world = 8 * nodes
    rows = [
        TensorDecl(
            "model", f"w{i}", TensorSpec("F32", (64, 64)), Sharding((ShardDim(0, world, 1),))
        )
        for i in range(50)
    ]
    own = {
        f"t{t}": [*rows, TensorDecl("model", f"own{t}", TensorSpec("F32", ()), Sharding())]
        for t in range(tables)
    }
    looked: list[int] = []

    def counted(
        named: Mapping[str, Sequence[TensorDecl]], roll: Mapping[str, Sequence[int]]
    ) -> list[HolderGroup]:
        looked.append(sum(map(len, named.values())))
        return group_tables(named, roll)

    monkeypatch.setattr(declarations, "group_tables", counted)
    told: Any = Told()
    publish_groups_by_node(
        told,
        Declarations(own, {f"t{t}": list(range(t, world, tables)) for t in range(tables)}),
        [r // 8 for r in range(world)],
    )
    return told, looked


@pytest.mark.parametrize("tables", [1, 2, 16])
def test_equal_nodes_are_grouped_once(monkeypatch: pytest.MonkeyPatch, tables: int) -> None:
    few, once = thought(monkeypatch, nodes=4, tables=tables)
    many, looked = thought(monkeypatch, nodes=64, tables=tables)
    assert looked == once, "nodes x tensors"
    assert sum(looked) <= tables * 51
    assert (few.beats, many.beats) == (4, 64), "a sign of life for each"
    assert len(many.words) == 64 * min(tables, 8)

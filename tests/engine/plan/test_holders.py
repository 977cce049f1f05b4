"""Holder groups that rank 0 publishes, compared with sets; and the rows that it reads for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.harness import run_ranks
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import HolderGroup, TensorDecl, group_tensors
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.plan import holders as declarations
from unified_ckpt.engine.plan.holders import (
    Declarations,
    gather_declarations,
    read_memberships,
    send_groups_by_node,
)
from unified_ckpt.runtime.comm.comm import Comm

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
    """Other nodes' declarations and the order of announcements have no effect."""
    declared, nodes = (
        [{ROWS[i] for i in named} for named, _ in ranks],
        [node for _, node in ranks],
    )

    def act(comm: Comm) -> list[tuple[int, tuple[int, ...], tuple[TensorDecl, ...]]]:
        meeting = comm.begin_collective("declarations", cached=False, timeout_seconds=20)
        rows = sorted(declared[comm.rank], key=lambda row: row.key)
        with meeting.step("declarations"):
            table, gathered = gather_declarations(meeting, rows)
            if gathered is not None:
                send_groups_by_node(meeting, gathered, nodes)
        members = read_memberships(meeting, table, rows, prefix=f"{nodes[comm.rank]}/")
        return [(group.index, group.holders, group.decls) for group in members]

    known_groups: dict[tuple[int, int], tuple[object, object]] = {}
    for rank, groups in enumerate(run_ranks(len(ranks), act)):
        assert sorted(row.fqn for _, _, rows in groups for row in rows) == sorted(
            row.fqn for row in declared[rank]
        ), "each row once"
        for index, holders, rows in groups:
            assert known_groups.setdefault((nodes[rank], index), (holders, rows)) == (
                holders,
                rows,
            ), "all members know the same group"
            for row in rows:
                assert set(holders) == {
                    peer
                    for peer, peer_rows in enumerate(declared)
                    if nodes[peer] == nodes[rank] and row in peer_rows
                }


class RecordedCollective:
    """Records the keys and heartbeats of rank 0, for any number of nodes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.heartbeats = 0

    def put(self, key: str, value: bytes) -> None:
        assert key not in self.values
        self.values[key] = value

    def heartbeat(self) -> None:
        self.heartbeats += 1


def published_groups(
    monkeypatch: pytest.MonkeyPatch, *, nodes: int, tables: int
) -> tuple[RecordedCollective, list[int]]:
    """Publish groups for nodes of 8 ranks, which hold `tables` tables in rotation.

    Returns the recorded keys, and the number of rows that each grouping read.
    """
    world = 8 * nodes
    rows = [
        TensorDecl(
            "model", f"w{i}", TensorSpec("F32", (64, 64)), Sharding((ShardDim(0, world, 1),))
        )
        for i in range(50)
    ]
    rows_by_table = {
        f"t{t}": [*rows, TensorDecl("model", f"own{t}", TensorSpec("F32", ()), Sharding())]
        for t in range(tables)
    }
    row_counts: list[int] = []

    def counted(
        named: Mapping[str, Sequence[TensorDecl]], roll: Mapping[str, Sequence[int]]
    ) -> list[HolderGroup]:
        row_counts.append(sum(map(len, named.values())))
        return group_tensors(named, roll)

    monkeypatch.setattr(declarations, "group_tensors", counted)
    collective: Any = RecordedCollective()
    send_groups_by_node(
        collective,
        Declarations(
            rows_by_table, {f"t{t}": list(range(t, world, tables)) for t in range(tables)}
        ),
        [r // 8 for r in range(world)],
    )
    return collective, row_counts


@pytest.mark.parametrize("tables", [1, 2, 16])
def test_equal_nodes_are_grouped_once(monkeypatch: pytest.MonkeyPatch, tables: int) -> None:
    few, few_row_counts = published_groups(monkeypatch, nodes=4, tables=tables)
    many, many_row_counts = published_groups(monkeypatch, nodes=64, tables=tables)
    assert many_row_counts == few_row_counts, "the rows read depend on the number of nodes"
    assert sum(many_row_counts) <= tables * 51
    assert (few.heartbeats, many.heartbeats) == (4, 64), "a heartbeat for each node"
    assert len(many.values) == 64 * min(tables, 8)


def test_ranks_name_tensors_that_they_hold_nothing_of_once() -> None:
    """Each rank has a box of one tensor of three. Its own table does not grow with the others."""
    spec, nothing = TensorSpec("F32", (4,)), Box((0,), (0,))

    def act(comm: Comm) -> Declarations | None:
        held = [nothing] * 3
        held[comm.rank] = Box((0,), (4,))
        boxes = [
            TensorDecl("model", f"w{n}", spec, Sharding(box=box)) for n, box in enumerate(held)
        ]
        meeting = comm.begin_collective("declarations", cached=False, timeout_seconds=20)
        with meeting.step("declarations"):
            return gather_declarations(meeting, [], boxes)[1]

    gathered, *_ = run_ranks(3, act)
    assert gathered is not None
    tables = {
        tuple(gathered.ranks_by_box_table[table_id]): (len(table.names.tensors), len(table.corners))
        for table_id, table in gathered.box_tables.items()
    }
    assert tables == {(0, 1, 2): (3, 0), (0,): (1, 1), (1,): (1, 1), (2,): (1, 1)}

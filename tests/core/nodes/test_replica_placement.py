"""Replica placement: every unit is on enough nodes, and all nodes send about the same amount."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.nodes.replica_placement import place_replicas


@st.composite
def stored(draw: st.DrawFn) -> tuple[list[dict[str, str]], dict[str, list[str]], int]:
    count = draw(st.integers(1, 6))
    units_of: dict[str, list[str]] = {}
    holdings = []
    for _ in range(count):
        files = draw(
            st.lists(st.frozensets(st.sampled_from("abcdefgh"), min_size=1, max_size=3), max_size=4)
        )
        holding, copied = {}, set[str]()
        for number, units in enumerate(files):
            stored = sorted(units - copied)
            copied |= units
            if stored:
                holding[f"file-{number}"] = "".join(stored)
                units_of["".join(stored)] = stored
        holdings.append(holding)
    return holdings, units_of, draw(st.integers(1, count))


@given(stored())
def test_every_unit_is_on_enough_nodes(
    drawn: tuple[list[dict[str, str]], dict[str, list[str]], int],
) -> None:
    holdings, units_of, copies = drawn
    orders = place_replicas(holdings, units_of, copies=copies)
    count = len(holdings)
    assert len(orders) == count
    where: dict[str, set[int]] = {}
    for number, holding in enumerate(holdings):
        for name in holding.values():
            for unit in units_of[name]:
                where.setdefault(unit, set()).add(number)
    before = {unit: len(on) for unit, on in where.items()}
    for number, order in enumerate(orders):
        assert number not in order
        assert {(number - step) % count for step in range(1, copies)} <= set(order), (
            "what is the ranks' own"
        )
        for source, files in order.items():
            for file in files:
                units = units_of[holdings[source][file]]
                assert any(before[unit] < copies for unit in units), "no need to"
                for unit in units:
                    where[unit].add(number)
    assert all(len(on) >= copies for on in where.values())


def test_shards_are_copied_around_a_ring() -> None:
    holdings = [{"a": f"a{i}", "b": f"b{i}", "whole": "whole"} for i in range(4)]
    units = {name: [name] for holding in holdings for name in holding.values()}
    for i, order in enumerate(place_replicas(holdings, units, copies=3)):
        assert order == {(i - 1) % 4: ["a", "b"], (i - 2) % 4: ["a", "b"]}


def test_two_holders_share_the_sending() -> None:
    """Nodes hold shards in pairs, and the pairs are replicas of each other."""
    holdings = [{f"file-{n}": f"{i % 2}/{n}" for n in range(64)} for i in range(4)]
    units = {name: [name] for holding in holdings for name in holding.values()}
    orders = place_replicas(holdings, units, copies=3)
    sent = [sum(len(order.get(i, ())) for order in orders) for i in range(4)]
    assert sum(sent) == 2 * 64
    assert min(sent) > 16
    assert place_replicas(holdings, units, copies=2) == [{(i - 1) % 4: []} for i in range(4)]

"""Merge plans: every byte has one writer, and a node writes the tensors it has whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.planning.merge_plan import node_spans, plan_merge
from unified_ckpt.core.sharding.declarations import Key

BLOCK = 8


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[Key, int], dict[Key, dict[int, int]]]:
    keys = draw(
        st.lists(
            st.tuples(st.sampled_from(["model", "optimizer"]), st.sampled_from("abcdefgh")),
            unique=True,
        )
    )
    sizes = {key: draw(st.sampled_from([0, 1, 7, 8, 9, 40, 100])) for key in keys}
    amounts = {
        key: st.sampled_from([0, 1, sizes[key]]).map(lambda n, key=key: min(n, sizes[key]))
        for key in keys
    }
    return sizes, {key: {m: n for m in range(4) if (n := draw(amounts[key]))} for key in keys}


@given(states(), st.integers(1, 200), st.integers(1, 4), st.data())
def test_every_byte_is_written_once_by_the_node_of_its_file(
    state: tuple[dict[Key, int], dict[Key, dict[int, int]]],
    max_file_bytes: int,
    count: int,
    data: st.DataObject,
) -> None:
    sizes, stored_nbytes = state
    writers = sorted(data.draw(st.sets(st.sampled_from(range(4)), min_size=1)))
    files = plan_merge(sizes, stored_nbytes, writers=writers, max_file_bytes=max_file_bytes)
    assert sorted(key for file in files for key in file.keys) == sorted(sizes)
    for part in {file.part for file in files}:
        those = [file for file in files if file.part == part]
        assert [file.number for file in those] == list(range(1, len(those) + 1))
        assert {file.count for file in those} == {len(those)}
    for file in files:
        assert file.node in writers
        assert {part for part, _ in file.keys} == {file.part}
        assert len(file.keys) == 1 or sum(sizes[key] for key in file.keys) <= max_file_bytes
    of_ranks = [
        list(node_spans(files, sizes, node=node, count=count, block_nbytes=BLOCK))
        for node in range(4)
    ]
    for node in range(4):
        indices = [index for index, _ in of_ranks[node]]
        assert indices == sorted(indices), "rank by rank"
        assert set(indices) <= set(range(count))
        amounts = [
            sum(
                span.stop - span.start for file_index, span in of_ranks[node] if file_index == index
            )
            for index in range(count)
        ]
        even = sum(amounts) / count  # each border is up to one block later
        assert all(abs(amount - even) < BLOCK + 1 for amount in amounts)
    spans = [(span.key, span.start, span.stop) for of_node in of_ranks for _, span in of_node]
    ends = dict.fromkeys(sizes, 0)
    for key, start, stop in sorted(spans):
        assert start == ends[key] < stop
        assert start % BLOCK == 0
        ends[key] = stop
    assert ends == sizes


def test_a_node_writes_what_it_has_whole() -> None:
    sizes = {("model", name): 100 for name in "abcd"}
    amounts = {"a": {0: 100}, "b": {1: 100}, "c": {0: 60, 1: 40}, "d": {0: 49, 1: 51}}
    stored_nbytes = {("model", name): nbytes for name, nbytes in amounts.items()}
    files = plan_merge(sizes, stored_nbytes, writers=[0, 1], max_file_bytes=100)
    assert {file.keys[0][1]: file.node for file in files} == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert {
        file.node for file in plan_merge(sizes, stored_nbytes, writers=[1], max_file_bytes=100)
    } == {1}
    assert [
        len(file.keys)
        for file in plan_merge(sizes, stored_nbytes, writers=[0, 1], max_file_bytes=1000)
    ] == [2, 1, 1], "a and b are apart"


def test_tensors_of_all_nodes_are_divided_evenly() -> None:
    sizes = {("model", f"{i:02}"): 10 for i in range(12)}
    files = plan_merge(
        sizes,
        {key: dict.fromkeys(range(4), 10) for key in sizes},
        writers=range(4),
        max_file_bytes=10,
    )
    assert sorted(file.node for file in files) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]

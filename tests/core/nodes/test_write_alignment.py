"""Write alignment: every byte is written once, and no block by two nodes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.nodes.write_alignment import (
    _MAX_WRITERS,
    ANY_BYTE,
    WHOLE_FILES,
    WriteAlignment,
    choose_alignment,
)
from unified_ckpt.runtime.comm.topology import file_system_type

NBYTES = 800  # of the file
NODES = st.lists(st.integers(0, 4), min_size=1, max_size=9)
BORDERS = st.lists(st.integers(1, NBYTES), min_size=0, max_size=12, unique=True)


@given(NODES, BORDERS, st.integers(1, 240), st.data())
def test_a_block_is_written_by_one_node(
    nodes: list[int], borders: list[int], block: int, data: st.DataObject
) -> None:
    """The ranges of a file belong to arbitrary ranks and are written in any chunks."""
    volume, stops = WriteAlignment(tuple(nodes), block), [0, *sorted(borders), NBYTES]
    written: dict[int, set[int]] = {}  # byte -> writers
    for low, high in itertools.pairwise(stops):
        rank = data.draw(st.integers(0, len(nodes) - 1))
        chunk = data.draw(st.integers(1, NBYTES))
        for start in range(low, high, chunk):
            pieces = list(
                volume.split_by_writer(
                    "f", start, min(start + chunk, high), exclusive_range=(low, high), rank=rank
                )
            )
            assert [piece[0] for piece in pieces] + [min(start + chunk, high)] == [
                start,
                *(piece[1] for piece in pieces),
            ]
            for first, stop, writer in pieces:
                for byte in range(first, stop):
                    written.setdefault(byte, set()).add(writer)
    assert sorted(written) == list(range(NBYTES))
    for first in range(0, NBYTES, block):
        writers = set().union(*(written[byte] for byte in range(first, min(first + block, NBYTES))))
        assert len({nodes[writer] for writer in writers}) == 1


def test_a_block_that_one_rank_fills_is_not_sent() -> None:
    volume = WriteAlignment((0, 1, 2, 3), 100)
    pieces = list(volume.split_by_writer("f", 250, 1150, exclusive_range=(250, 1150), rank=3))
    assert (300, 1100, 3) in pieces
    assert [stop - start for start, stop, _ in pieces] == [50, 800, 50]
    inner = list(volume.split_by_writer("f", 420, 660, exclusive_range=(250, 1150), rank=3))
    assert inner == [(420, 660, 3)], (
        "a chunk in the middle, though its own borders are none of a block's"
    )


def test_alignment_of_file_system_types() -> None:
    assert list(
        WriteAlignment((0, 1), ANY_BYTE).split_by_writer(
            "f", 3, 17, exclusive_range=(3, 17), rank=1
        )
    ) == [(3, 17, 1)]
    files = {
        name: {
            w
            for _, _, w in WriteAlignment((0, 1), WHOLE_FILES).split_by_writer(
                name, 3, 17, exclusive_range=(3, 17), rank=1
            )
        }
        for name in "abcdefgh"
    }
    assert set().union(*files.values()) == {0, 1}, "files are spread over nodes"
    assert choose_alignment(["ext4", "lustre"]) == ANY_BYTE
    assert choose_alignment(["ext4", "nfs4"]) == 1 << 20
    assert choose_alignment(["nfs4", "fuse.gcsfuse"]) == WHOLE_FILES
    assert choose_alignment(["unknown"]) == WHOLE_FILES


def test_a_rank_sends_to_few_ranks() -> None:
    """The number of connections is limited for any number of nodes and blocks."""
    volume = WriteAlignment(tuple(rank // 8 for rank in range(16_384)), 1 << 20)
    writers = {
        w
        for i in range(3000)
        for _, _, w in volume.split_by_writer(
            f"f{i % 7}", i << 22, (i << 22) + 5, exclusive_range=(i << 22, (i << 22) + 5), rank=77
        )
    }
    assert len(writers) <= _MAX_WRITERS


def test_ranks_of_a_node_take_turns() -> None:
    volume = WriteAlignment((0, 0, 0, 0, 1, 1, 1, 1), 10)
    writers = {
        (rank, w)
        for rank in (4, 5, 6, 7)
        for i in range(40)
        for _, _, w in volume.split_by_writer(
            "f", i * 10, i * 10 + 1, exclusive_range=(0, 1), rank=rank
        )
    }
    assert {w for _, w in writers} == set(range(8))


@pytest.mark.parametrize(
    ("path", "kind"), [("/proc", "proc"), ("/dev/shm", "tmpfs"), ("/proc/self/fd", "proc")]
)
def test_file_system_type_comes_from_the_kernel(path: str, kind: str) -> None:
    assert file_system_type(path) == kind
    assert file_system_type("/nowhere/at/all") == file_system_type("/")

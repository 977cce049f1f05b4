"""Which machine writes which block of a file: every byte once, and no block by two machines, however ranks' bytes lie."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.nodes.write_alignment import (
    _MAX_WRITERS,
    NO_BLOCKS,
    WHOLE_FILES,
    Volume,
    block_nbytes_of,
)
from unified_ckpt.runtime.comm.topology import file_system

MACHINES = st.lists(st.integers(0, 4), min_size=1, max_size=9)
BORDERS = st.lists(st.integers(1, 5000), min_size=0, max_size=12, unique=True)


@given(MACHINES, BORDERS, st.integers(1, 1500), st.data())
def test_a_block_has_one_machine(
    machines: list[int], borders: list[int], block: int, data: st.DataObject
) -> None:
    """A file of 5,000 bytes, its stretches owned by any ranks, each written in any chunks."""
    volume, stops = Volume(tuple(machines), block), [0, *sorted(borders), 5000]
    written: dict[int, set[int]] = {}  # byte -> writers
    for low, high in itertools.pairwise(stops):
        rank = data.draw(st.integers(0, len(machines) - 1))
        chunk = data.draw(st.integers(1, 5000))
        for start in range(low, high, chunk):
            pieces = list(
                volume.cut("f", start, min(start + chunk, high), alone=(low, high), rank=rank)
            )
            assert [piece[0] for piece in pieces] + [min(start + chunk, high)] == [
                start,
                *(piece[1] for piece in pieces),
            ]
            for first, stop, writer in pieces:
                for byte in range(first, stop):
                    written.setdefault(byte, set()).add(writer)
    assert sorted(written) == list(range(5000))
    for first in range(0, 5000, block):
        writers = set().union(*(written[byte] for byte in range(first, min(first + block, 5000))))
        assert len({machines[writer] for writer in writers}) == 1


def test_a_block_that_one_rank_fills_goes_to_nobody() -> None:
    volume = Volume((0, 1, 2, 3), 100)
    pieces = list(volume.cut("f", 250, 1150, alone=(250, 1150), rank=3))
    assert (300, 1100, 3) in pieces
    assert [stop - start for start, stop, _ in pieces] == [50, 800, 50]
    inner = list(volume.cut("f", 420, 660, alone=(250, 1150), rank=3))
    assert inner == [(420, 660, 3)], (
        "a chunk in the middle, though its own borders are none of a block's"
    )


def test_kinds() -> None:
    assert list(Volume((0, 1), NO_BLOCKS).cut("f", 3, 17, alone=(3, 17), rank=1)) == [(3, 17, 1)]
    files = {
        name: {w for _, _, w in Volume((0, 1), WHOLE_FILES).cut(name, 3, 17, alone=(3, 17), rank=1)}
        for name in "abcdefgh"
    }
    assert set().union(*files.values()) == {0, 1}, "files are spread over machines"
    assert block_nbytes_of(["ext4", "lustre"]) == NO_BLOCKS
    assert block_nbytes_of(["ext4", "nfs4"]) == 1 << 20
    assert block_nbytes_of(["nfs4", "fuse.gcsfuse"]) == WHOLE_FILES
    assert block_nbytes_of(["unknown"]) == WHOLE_FILES


def test_a_rank_sends_to_few_others() -> None:
    """However many machines there are, and however many blocks: so many connections at most."""
    volume = Volume(tuple(rank // 8 for rank in range(16_384)), 1 << 20)
    writers = {
        w
        for i in range(3000)
        for _, _, w in volume.cut(
            f"f{i % 7}", i << 22, (i << 22) + 5, alone=(i << 22, (i << 22) + 5), rank=77
        )
    }
    assert len(writers) <= _MAX_WRITERS


def test_ranks_of_a_machine_take_turns() -> None:
    volume = Volume((0, 0, 0, 0, 1, 1, 1, 1), 10)
    found = {
        (rank, w)
        for rank in (4, 5, 6, 7)
        for i in range(40)
        for _, _, w in volume.cut("f", i * 10, i * 10 + 1, alone=(0, 1), rank=rank)
    }
    assert {w for _, w in found} == set(range(8))


@pytest.mark.parametrize(
    ("path", "kind"), [("/proc", "proc"), ("/dev/shm", "tmpfs"), ("/proc/self/fd", "proc")]
)
def test_the_kernel_says_what_a_file_system_is(path: str, kind: str) -> None:
    assert file_system(path) == kind
    assert file_system("/nowhere/at/all") == file_system("/")

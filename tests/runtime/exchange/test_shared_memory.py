from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from unified_ckpt.errors import RankError, StorageError
from unified_ckpt.runtime.comm.error_spread import Spread, spread_of
from unified_ckpt.runtime.exchange.shared_memory import (
    SLOTS,
    PeerWait,
    TileBuffer,
    create_tile_buffer,
    marking_failed,
    open_tile_buffer,
)

TILE = 8192
SECONDS = 30.0  # far more than any of this needs


@pytest.fixture
def make() -> Iterator[Callable[[int], TileBuffer]]:
    created: list[tuple[TileBuffer, int]] = []

    def create(world: int) -> TileBuffer:
        created.append(create_tile_buffer(world=world, tile_nbytes=TILE))
        return created[-1][0]

    yield create
    for tile_buffer, fd in created:
        tile_buffer.close()
        os.close(fd)


def opened(tile_buffer: TileBuffer, *, world: int) -> TileBuffer:
    return open_tile_buffer(tile_buffer.token, world=world, tile_nbytes=TILE)


def test_memory_is_shared(make: Callable[[int], TileBuffer]) -> None:
    owned = make(3)
    view = opened(owned, world=3)
    view.tile(1)[:] = torch.arange(TILE, dtype=torch.int64).to(torch.uint8)
    assert owned.tile(1).tolist() == [i % 256 for i in range(TILE)]
    assert owned.tile(0).sum() == 0
    view.set_done(2, 5)
    assert [owned.done(rank) for rank in range(3)] == [0, 0, 5]
    view.close()
    assert owned.tile(1)[1] == 1, "closing one view of it leaves the others alone"


def test_tiles_use_slots_in_turn() -> None:
    tile_buffer, fd = create_tile_buffer(world=2, tile_nbytes=TILE)
    for number in range(2 * SLOTS):
        tile_buffer.tile(number)[:] = number + 1
    assert [int(tile_buffer.tile(number)[0]) for number in range(SLOTS)] == [
        SLOTS + 1 + i for i in range(SLOTS)
    ]
    assert tile_buffer.tile(0).data_ptr() == tile_buffer.tile(SLOTS).data_ptr()
    assert all(tile_buffer.tile(number).data_ptr() % 4096 == 0 for number in range(SLOTS)), (
        "aligned for any dtype and for the disk"
    )
    assert tile_buffer.tile(0).numel() == TILE
    tile_buffer.close()
    os.close(fd)


@pytest.mark.parametrize("world", [1, 8, 4096])
def test_counters_of_many_ranks_leave_tiles_untouched(world: int) -> None:
    tile_buffer, fd = create_tile_buffer(world=world, tile_nbytes=TILE)
    tile_buffer.tile(0)[:] = 7
    tile_buffer.tile(1)[:] = 7
    tile_buffer.open_for(3)
    tile_buffer.advance(9)
    for rank in range(world):
        tile_buffer.set_done(rank, rank + 1)
    assert [tile_buffer.done(rank) for rank in range(world)] == list(range(1, world + 1))
    assert tile_buffer.current_exchange() == 3
    assert tile_buffer.progress() == 9
    assert not tile_buffer.failed()
    assert (tile_buffer.tile(0) == 7).all()
    assert (tile_buffer.tile(1) == 7).all()
    tile_buffer.close()
    os.close(fd)


def test_open_for_resets_counters(make: Callable[[int], TileBuffer]) -> None:
    tile_buffer = make(2)
    tile_buffer.open_for(1)
    tile_buffer.advance(4)
    tile_buffer.set_done(1, 4)
    tile_buffer.open_for(2)
    assert (
        tile_buffer.current_exchange(),
        tile_buffer.progress(),
        tile_buffer.done(0),
        tile_buffer.done(1),
    ) == (
        2,
        0,
        0,
        0,
    )


def test_tokens_are_unique() -> None:
    first, fd = create_tile_buffer(world=2, tile_nbytes=TILE)
    first.close()
    os.close(fd)
    second, fd = create_tile_buffer(world=2, tile_nbytes=2 * TILE)
    second.close()
    os.close(fd)
    assert first.token != second.token, "else a rank that has opened the first keeps talking to it"


def test_close_releases_memory() -> None:
    before = len(os.listdir("/proc/self/fd"))
    tile_buffer, fd = create_tile_buffer(world=2, tile_nbytes=TILE)
    other = opened(tile_buffer, world=2)
    mapped = f" {os.fstat(fd).st_ino} "
    assert Path("/proc/self/maps").read_text().count(mapped) == 2
    other.close()
    tile_buffer.close()
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert mapped not in Path("/proc/self/maps").read_text()


# the two ways of an exchange


def waiting(tile_buffers: dict[int, TileBuffer], *, seconds: float = SECONDS) -> PeerWait:
    return PeerWait(
        timeout_seconds=seconds,
        tile_buffers=tile_buffers,
        raise_if_failed=lambda: None,
        progress=lambda: 0,
    )


WORLD, COUNT, SHARE = 3, 7, TILE // 3


def own_tiles(rank: int) -> slice:
    return slice(rank * SHARE, (rank + 1) * SHARE)


def fill(tile_buffers: dict[int, TileBuffer], rank: int) -> list[list[int]]:
    """Each rank fills its part of rank 0's tiles. Rank 0 returns their contents."""
    tile_buffer, wait, contents = tile_buffers[0], waiting(tile_buffers), []
    if rank == 0:
        tile_buffer.open_for(1)
    for number in range(COUNT):
        wait.until_progress(0, exchange=1, tiles=number - SLOTS + 1)
        tile_buffer.tile(number)[own_tiles(rank)] = 10 * number + rank
        tile_buffer.set_done(rank, number + 1)
        if rank == 0:
            wait.until_done(tile_buffer, range(WORLD), number + 1)
            contents.append(
                [int(tile_buffer.tile(number)[own_tiles(r)].unique()) for r in range(WORLD)]
            )
            tile_buffer.advance(number + 1)
    return contents


def empty(tile_buffers: dict[int, TileBuffer], rank: int) -> list[int]:
    """Rank 0 fills its tiles; the others return their contents."""
    tile_buffer, wait, contents = tile_buffers[0], waiting(tile_buffers), []
    if rank == 0:
        tile_buffer.open_for(2)
    for number in range(COUNT):
        if rank == 0:
            wait.until_done(tile_buffer, range(1, WORLD), number - SLOTS + 1)
            tile_buffer.tile(number)[:] = 100 + number
            tile_buffer.advance(number + 1)
        else:
            wait.until_progress(0, exchange=2, tiles=number + 1)
            contents.append(int(tile_buffer.tile(number).unique()))
            tile_buffer.set_done(rank, number + 1)
    return contents


def test_ranks_fill_and_empty_tiles_of_another_rank(make: Callable[[int], TileBuffer]) -> None:
    tile_buffers = {rank: make(WORLD) for rank in range(WORLD)}
    with ThreadPoolExecutor(WORLD) as pool:
        filled, emptied = zip(
            *pool.map(
                lambda rank: (fill(tile_buffers, rank), empty(tile_buffers, rank)), range(WORLD)
            ),
            strict=True,
        )
    assert filled[0] == [[10 * number + rank for rank in range(WORLD)] for number in range(COUNT)]
    assert emptied[1] == emptied[2] == [100 + number for number in range(COUNT)]


# another process

CHILD = """
import os, sys
from unified_ckpt.runtime.exchange.shared_memory import PeerWait, create_tile_buffer, open_tile_buffer

held, fd = create_tile_buffer(world=2, tile_nbytes=8192)
tile = held.tile(0)
tile[:] = 3
held.close()
os.close(fd)
print(int(tile.sum()), flush=True)

ours, fd = create_tile_buffer(world=2, tile_nbytes=8192)
print(ours.token, flush=True)
theirs = open_tile_buffer(sys.stdin.readline().strip(), world=2, tile_nbytes=8192)
wait = PeerWait(
    timeout_seconds=60,
    tile_buffers={0: theirs, 1: ours},
    raise_if_failed=lambda: None,
    progress=lambda: 0,
)
for number in range(6):
    wait.until_progress(0, exchange=1, tiles=number - 1)
    theirs.tile(number)[:] = number + 1
    theirs.set_done(1, number + 1)
ours.open_for(5)
ours.tile(0)[:] = 99
ours.advance(1)
wait.until_done(ours, (0,), 1)
print("through", flush=True)
sys.stdin.read()
"""  # noqa: E501


class Child:
    """Another process: a rank with a tile buffer of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@pytest.fixture
def child() -> Iterator[Child]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield Child(process)
        process.kill()


def test_another_process_shares_memory_and_dies(
    make: Callable[[int], TileBuffer], child: Child
) -> None:
    """One test for all, because a process that imports torch starts slowly."""
    tile_buffer = make(2)
    assert child.says() == str(3 * TILE), (
        "a view of a closed window that is still held stays readable"
    )
    view = open_tile_buffer(child.says(), world=2, tile_nbytes=TILE)
    wait = waiting({0: tile_buffer, 1: view})
    tile_buffer.open_for(1)
    child.tell(tile_buffer.token)
    observed = []
    for number in range(6):
        wait.until_done(tile_buffer, (1,), number + 1)
        observed.append(int(tile_buffer.tile(number).unique()))
        tile_buffer.advance(number + 1)
    wait.until_progress(1, exchange=5, tiles=1)
    assert observed == [1, 2, 3, 4, 5, 6]
    assert int(view.tile(0).unique()) == 99
    view.set_done(0, 1)
    assert child.says() == "through"

    child.process.kill()  # nobody has waited for it yet: it is a zombie
    pid, started = child.process.pid, time.monotonic()
    with pytest.raises(
        RankError, match=rf"rank 1 \(process {pid}\) has exited before tile 2 of exchange 6"
    ):
        wait.until_progress(1, exchange=6, tiles=3)
    assert time.monotonic() - started < SECONDS / 2, "long before the time-out"
    view.close()
    with pytest.raises(
        StorageError,
        match=rf"shared memory of process {pid}: .*; (run the ranks of a node|keep every rank "
        rf"running)",
    ):
        open_tile_buffer(view.token, world=2, tile_nbytes=TILE)


# waiting


def test_wait_names_a_missing_rank(make: Callable[[int], TileBuffer]) -> None:
    tile_buffers = {0: make(3), 2: make(3)}
    wait = waiting(tile_buffers, seconds=0.2)
    tile_buffers[2].open_for(4)
    tile_buffers[2].advance(1)
    with pytest.raises(RankError, match=r"rank 2 did not reach tile 1 of exchange 4 within 0.2 s"):
        wait.until_progress(2, exchange=4, tiles=2)
    with pytest.raises(RankError, match=r"rank 2 did not reach tile 0 of exchange 5 within 0.2 s"):
        wait.until_progress(2, exchange=5, tiles=1)
    tile_buffers[0].set_done(0, 1)
    with pytest.raises(RankError, match=r"rank 2 did not reach its part of tile 0 within 0.2 s"):
        wait.until_done(tile_buffers[0], (0, 2), 1)


def test_wait_returns_for_a_rank_in_a_later_exchange(
    make: Callable[[int], TileBuffer],
) -> None:
    tile_buffers = {1: make(2)}
    tile_buffers[1].open_for(8)
    waiting(tile_buffers, seconds=0.2).until_progress(1, exchange=7, tiles=100)
    tile_buffers[1].set_done(0, 9)
    waiting(tile_buffers, seconds=0.2).until_done(tile_buffers[1], (), 100)


def test_failed_rank_ends_all_waits(make: Callable[[int], TileBuffer]) -> None:
    tile_buffers = {0: make(2), 1: make(2)}
    wait = waiting(tile_buffers)
    threading.Timer(0.1, tile_buffers[1].mark_failed).start()
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 failed during the exchange"):
        wait.until_progress(1, exchange=1, tiles=1)
    with pytest.raises(RankError, match=r"rank 1 failed during the exchange"):
        wait.until_done(tile_buffers[0], (1,), 1)
    with pytest.raises(RankError, match=r"rank 1 failed during the exchange") as caught:
        wait.until_done(tile_buffers[0], (1,), 1)
    assert spread_of(caught.value) is Spread.SECONDARY, "the failed rank reports why"
    assert time.monotonic() - started < SECONDS / 2


def test_timeout_counts_from_the_last_heartbeat(make: Callable[[int], TileBuffer]) -> None:
    """Three heartbeats, then none."""
    tile_buffer, signs = make(2), iter([1, 2, 3, 3])
    wait = PeerWait(
        timeout_seconds=0.2,
        tile_buffers={1: tile_buffer},
        raise_if_failed=lambda: None,
        progress=lambda: next(signs),
    )
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 did not reach tile 0 of exchange 1 within 0.2 s"):
        wait.until_progress(1, exchange=1, tiles=1)
    assert time.monotonic() - began > 0.8


def test_tiles_done_before_a_failure_count(make: Callable[[int], TileBuffer]) -> None:
    tile_buffer = make(2)
    tile_buffer.open_for(1)
    tile_buffer.advance(1)
    tile_buffer.mark_failed()
    waiting({1: tile_buffer}).until_progress(1, exchange=1, tiles=1)


def test_marking_failed_marks_on_errors(make: Callable[[int], TileBuffer]) -> None:
    tile_buffer = make(2)
    with marking_failed(tile_buffer):
        pass
    assert not tile_buffer.failed()
    with pytest.raises(ZeroDivisionError, match="oh"), marking_failed(tile_buffer):
        raise ZeroDivisionError("oh")
    assert tile_buffer.failed()
    with pytest.raises(ZeroDivisionError, match="oh"), marking_failed(None):
        raise ZeroDivisionError("oh")

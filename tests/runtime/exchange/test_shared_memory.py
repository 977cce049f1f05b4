from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from unified_ckpt.errors import RankError, StorageError
from unified_ckpt.runtime.comm.error_spread import Spread, spread_of
from unified_ckpt.runtime.exchange.shared_memory import (
    PeerWait,
    RemoteTileBuffer,
    TileBuffer,
    TileImage,
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
    return open_tile_buffer(tile_buffer.handle, world=world, tile_nbytes=TILE)


@pytest.mark.parametrize("world", [3, 4096])
def test_memory_and_counters_are_shared(make: Callable[[int], TileBuffer], world: int) -> None:
    """The counters of many ranks leave the tiles alone."""
    owned = make(world)
    view = opened(owned, world=world)
    view.tile(1)[:] = torch.arange(TILE, dtype=torch.int64).to(torch.uint8)
    owned.open_for(3)
    owned.advance(9)
    for rank in range(world):
        view.set_done(rank, rank + 1)
    assert [owned.done(rank) for rank in range(world)] == list(range(1, world + 1))
    assert (view.current_exchange_id(), view.progress(), view.failed()) == (3, 9, False)
    view.close()
    assert owned.tile(1).tolist() == [i % 256 for i in range(TILE)], "a closed view leaves it"
    assert owned.tile(0).sum() == 0


def test_handles_are_unique() -> None:
    first, fd = create_tile_buffer(world=2, tile_nbytes=TILE)
    first.close()
    os.close(fd)
    second, fd = create_tile_buffer(world=2, tile_nbytes=2 * TILE)
    second.close()
    os.close(fd)
    assert first.handle != second.handle, (
        "else a rank that has opened the first keeps talking to it"
    )


# the two directions of an exchange


def waiting(tile_buffers: dict[int, TileBuffer], *, seconds: float = SECONDS) -> PeerWait:
    return PeerWait(
        timeout_seconds=seconds,
        tile_buffers=tile_buffers,
        raise_if_failed=lambda: None,
        progress=lambda: 0,
    )


# another process

CHILD = """
import os, sys
from unified_ckpt.runtime.exchange import shared_memory
from unified_ckpt.runtime.exchange.shared_memory import create_tile_buffer, open_tile_buffer

closed, fd = create_tile_buffer(world=2, tile_nbytes=8192)
tile = closed.tile(0)
tile[:] = 3
closed.close()
os.close(fd)
print(int(tile.sum()), flush=True)

local, fd = create_tile_buffer(world=2, tile_nbytes=8192)
print(local.handle, flush=True)
remote = open_tile_buffer(sys.stdin.readline().strip(), world=2, tile_nbytes=8192)
wait = shared_memory.PeerWait(
    timeout_seconds=60,
    tile_buffers={0: remote, 1: local},
    raise_if_failed=lambda: None,
    progress=lambda: 0,
)
for number in range(6):
    wait.until_progress(0, exchange_id=1, tiles=number - 1)
    remote.tile(number)[:] = number + 1
    remote.set_done(1, number + 1)
local.open_for(5)
local.tile(0)[:] = 99
local.advance(1)
wait.until_done(local, (0,), 1)
print("through", flush=True)
sys.stdin.read()
"""


class Child:
    """Another process: a rank with a tile buffer of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write_line(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@pytest.fixture
def child() -> Iterator[Child]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
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
    assert child.read_line() == str(3 * TILE), (
        "a view of a closed window that is still held stays readable"
    )
    view = open_tile_buffer(child.read_line(), world=2, tile_nbytes=TILE)
    wait = waiting({0: tile_buffer, 1: view})
    tile_buffer.open_for(1)
    child.write_line(tile_buffer.handle)
    observed = []
    for number in range(6):
        wait.until_done(tile_buffer, (1,), number + 1)
        observed.append(int(tile_buffer.tile(number).unique()))
        tile_buffer.advance(number + 1)
    wait.until_progress(1, exchange_id=5, tiles=1)
    assert observed == [1, 2, 3, 4, 5, 6]
    assert int(view.tile(0).unique()) == 99
    view.set_done(0, 1)
    assert child.read_line() == "through"

    child.process.kill()  # no wait has reaped it: it is a zombie
    pid, started = child.process.pid, time.monotonic()
    with pytest.raises(
        RankError, match=rf"rank 1 \(process {pid}\) has exited before tile 2 of exchange 6"
    ):
        wait.until_progress(1, exchange_id=6, tiles=3)
    assert time.monotonic() - started < SECONDS / 2, "long before the time-out"
    view.close()
    with pytest.raises(
        StorageError,
        match=rf"shared memory of process {pid}: cannot be opened: .*; "
        "run the ranks of a node in one PID namespace, as one user",
    ):
        open_tile_buffer(view.handle, world=2, tile_nbytes=TILE)


# waiting


def test_wait_names_a_missing_rank(make: Callable[[int], TileBuffer]) -> None:
    tile_buffers = {0: make(3), 2: make(3)}
    wait = waiting(tile_buffers, seconds=0.2)
    tile_buffers[2].open_for(4)
    tile_buffers[2].advance(1)
    wait.until_progress(2, exchange_id=3, tiles=100)  # it is in a later exchange
    for exchange_id, tiles in ((4, 2), (5, 1)):
        text = rf"rank 2 did not reach tile {tiles - 1} of exchange {exchange_id} within 0.2 s"
        with pytest.raises(RankError, match=text):
            wait.until_progress(2, exchange_id=exchange_id, tiles=tiles)
    tile_buffers[0].set_done(0, 1)
    wait.until_done(tile_buffers[0], (), 100)
    with pytest.raises(RankError, match=r"rank 2 did not reach its part of tile 0 within 0.2 s"):
        wait.until_done(tile_buffers[0], (0, 2), 1)


def test_failed_rank_ends_all_waits(make: Callable[[int], TileBuffer]) -> None:
    tile_buffers = {0: make(2), 1: make(2)}
    wait = waiting(tile_buffers)
    threading.Timer(0.1, tile_buffers[1].mark_failed).start()
    started = time.monotonic()
    for act in (
        lambda: wait.until_progress(1, exchange_id=1, tiles=1),
        lambda: wait.until_done(tile_buffers[0], (1,), 1),
    ):
        with pytest.raises(RankError, match=r"rank 1 failed during the exchange") as caught:
            act()
        assert spread_of(caught.value) is Spread.SECONDARY, "the failed rank reports why"
    tile_buffers[1].open_for(1)
    tile_buffers[1].advance(1)
    wait.until_progress(1, exchange_id=1, tiles=1)  # what it did before counts
    error = RankError("rank 7 failed elsewhere")
    wait = PeerWait(
        timeout_seconds=SECONDS,
        tile_buffers={1: make(2)},
        raise_if_failed=lambda: (_ for _ in ()).throw(error),
        progress=lambda: 0,
    )
    with pytest.raises(RankError, match="rank 7 failed elsewhere"):
        wait.until_progress(1, exchange_id=1, tiles=1)
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
        wait.until_progress(1, exchange_id=1, tiles=1)
    assert time.monotonic() - began > 0.8


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


def test_tiles_made_in_inference_mode_are_filled_outside(make: Callable[[int], TileBuffer]) -> None:
    """Later saves reuse them, and threads that serve other nodes fill them."""
    with torch.inference_mode():
        tile, image = make(1).tile(0), TileImage().tile(8)
    for memory in (tile, image):
        assert memory.fill_(7)[:8].tolist() == [7] * 8


def test_tiles_for_other_nodes_share_one_image() -> None:
    """A rank may have hundreds of partners on other nodes."""
    image, sent = TileImage(), list[int]()

    def send(buffer: RemoteTileBuffer, **_: object) -> None:
        sent.append(buffer.rank)

    buffers = [
        RemoteTileBuffer(
            send,
            rank,
            f"handle {rank}",
            image=image,
            tile_nbytes=1000 * (rank + 1),
        )
        for rank in range(3)
    ]
    for number, buffer in enumerate(buffers):
        assert len(buffer.tile(number)) == buffer.tile_nbytes
        buffer.finish_tile(number, rank=9, exchange_id=1, spans=[])
        buffer.close()
    assert sent == [0, 1, 2]
    assert image.nbytes == 3000
    image.release()
    assert image.nbytes == 0

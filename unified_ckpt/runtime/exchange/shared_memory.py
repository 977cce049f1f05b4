"""Host buffers that ranks of one machine share: each rank owns a window of tiles, and its parties
fill or empty them.

The memory is a memfd, found through /proc: `/dev/shm` has 64 MB in containers. A window starts with
counters. Each has one writer and only rises during one serving, so no locks are needed: data is
written before its counter, and the interpreter's own lock orders them.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from unified_ckpt.errors import RankError, StorageError

SLOTS = 2  # tiles of a window that is filled and emptied in turn
_PAGE = 4096
_EXCHANGE, _PROGRESS, _FAILED, _DONE = range(
    4
)  # counters: which exchange, tiles moved, gave up; then one per rank


class TileBuffer:
    """One rank's shared buffer: `world` counters and SLOTS tiles of `tile_nbytes`. `token` lets the
    others open it.
    """

    def __init__(self, memory: mmap.mmap, *, world: int, tile_nbytes: int, token: str) -> None:
        self.token, self.tile_nbytes, self._world = token, tile_nbytes, world
        self._memory = memory
        self._counters = np.frombuffer(memory, dtype=np.int64, count=_DONE + world)
        # By way of numpy, which keeps the mapping in place as long as a view of it lives;
        # torch.frombuffer does not.
        self.bytes = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))  # [header + tiles]
        self._tiles_start = _header_nbytes(world)

    def tile(self, number: int) -> torch.Tensor:
        """The memory of tile `number`, uint8 [tile_nbytes]."""
        start = self._tiles_start + number % SLOTS * self.tile_nbytes
        return self.bytes[start : start + self.tile_nbytes]

    def open_for(self, exchange: int) -> None:
        """Opens the window for exchange number `exchange`, all counters at zero."""
        self._counters[_PROGRESS] = 0
        self._counters[_DONE:] = 0
        self._counters[_EXCHANGE] = exchange

    def current_exchange(self) -> int:
        return int(self._counters[_EXCHANGE])

    def progress(self) -> int:
        return int(self._counters[_PROGRESS])

    def advance(self, tiles: int) -> None:
        """Owner only: this many tiles are moved."""
        self._counters[_PROGRESS] = tiles

    def done(self, rank: int) -> int:
        return int(self._counters[_DONE + rank])

    def set_done(self, rank: int, tiles: int) -> None:
        """Party `rank` only: it is through with all its tiles below this number."""
        self._counters[_DONE + rank] = tiles

    def mark_failed(self) -> None:
        """Owner only: tells all who wait for it that it will not come."""
        self._counters[_FAILED] = 1

    def reset_failed(self) -> None:
        """Owner only: a new call begins."""
        self._counters[_FAILED] = 0

    def failed(self) -> bool:
        return bool(self._counters[_FAILED])

    def is_owner_alive(self) -> bool:
        """Whether the owner's process runs."""
        return _is_process_alive(int(self.token.split(":")[0]))

    @property
    def nbytes(self) -> int:
        """Of the tiles; pages that were never touched take no memory."""
        return SLOTS * self.tile_nbytes

    def close(self) -> None:
        """Gives the memory back once no view of it is left."""
        del self._counters, self.bytes
        try:
            self._memory.close()
        except BufferError:
            pass  # a view is still held by a caller; the memory goes with it


class RemoteTileBuffer:
    """A window of a rank on another machine. A party of its tiles fills an image of them here, and
    hands that in.
    """

    def __init__(self, rank: int, token: str, *, tile_nbytes: int) -> None:
        self.rank, self.token, self.tile_nbytes = rank, token, tile_nbytes
        self._memory: torch.Tensor | None = None

    def tile(self, number: int) -> torch.Tensor:
        """The image of tile `number`, uint8 [tile_nbytes]; memory that is never touched is never
        taken.
        """
        if self._memory is None:
            self._memory = torch.from_numpy(np.empty(SLOTS * self.tile_nbytes, dtype=np.uint8))
        start = number % SLOTS * self.tile_nbytes
        return self._memory[start : start + self.tile_nbytes]

    @property
    def nbytes(self) -> int:
        return SLOTS * self.tile_nbytes if self._memory is not None else 0

    def current_exchange(self) -> int:
        """Who hands in an image waits over there until there is room for it."""
        return sys.maxsize

    def progress(self) -> int:
        return sys.maxsize

    def failed(self) -> bool:
        """Nobody here knows; `PeerWait` asks the ranks' store."""
        return False

    def is_owner_alive(self) -> bool:
        return True

    def close(self) -> None:
        self._memory = None


def _header_nbytes(world: int) -> int:
    return -(-(_DONE + world) * 8 // _PAGE) * _PAGE


def create_tile_buffer(*, world: int, tile_nbytes: int) -> tuple[TileBuffer, int]:
    """A new window of this process and its file descriptor, which must stay open as long as others
    may open it.
    """
    fd = os.memfd_create("unified_ckpt", os.MFD_CLOEXEC)
    nbytes = _header_nbytes(world) + SLOTS * tile_nbytes
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    # The inode tells a window from an older one that had the same descriptor.
    token = f"{os.getpid()}:{fd}:{os.fstat(fd).st_ino}"
    return TileBuffer(memory, world=world, tile_nbytes=tile_nbytes, token=token), fd


def open_tile_buffer(token: str, *, world: int, tile_nbytes: int) -> TileBuffer:
    """Another rank's window. StorageError where its memory cannot be reached: then the ranks are
    not on one machine.
    """
    pid, fd, inode = token.split(":")
    nbytes = _header_nbytes(world) + SLOTS * tile_nbytes
    try:
        shared_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"cannot open the shared memory of process {pid}: {error.strerror}; needed ranks that share memory"
        ) from error
    try:
        if os.fstat(shared_fd).st_ino != int(inode):
            raise StorageError(
                f"the shared memory of process {pid} is no longer there; needed ranks that stay until all are through"
            )
        return TileBuffer(
            mmap.mmap(shared_fd, nbytes), world=world, tile_nbytes=tile_nbytes, token=token
        )
    finally:
        os.close(shared_fd)


class PeerWait:
    """Waits for counters of other ranks, in bounded time, and learns when one of them gave up or
    died.

    `timeout_seconds`: of silence; `signs`: a number that grows as long as some rank gets on, asked
    for when the time is out.
    `heed`: raises what any rank has failed with, if one has: those on other machines, and those
    that came to no exchange, mark no window.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        tile_buffers: Mapping[int, TileBuffer | RemoteTileBuffer],
        raise_if_failed: Callable[[], object],
        progress: Callable[[], int],
    ) -> None:
        self._timeout_seconds, self._tile_buffers, self._raise_if_failed, self._progress = (
            timeout_seconds,
            tile_buffers,
            raise_if_failed,
            progress,
        )

    def until_done(self, tile_buffer: TileBuffer, ranks: Sequence[int], tiles: int) -> None:
        """Until all these parties are through with `tiles` tiles of the window."""
        for rank in ranks:
            for _ in self._pauses(rank, f"its part of tile {tiles - 1}"):
                if tile_buffer.done(rank) >= tiles:
                    break

    def until_progress(self, rank: int, *, exchange: int, tiles: int) -> None:
        """Until the rank serves this exchange and has moved this many tiles."""
        tile_buffer = self._tile_buffers[rank]
        for _ in self._pauses(rank, f"tile {tiles - 1} of exchange {exchange}"):
            if tile_buffer.current_exchange() > exchange or (
                tile_buffer.current_exchange() == exchange and tile_buffer.progress() >= tiles
            ):
                break

    def until(self, rank: int, event: str, ready: Callable[[], bool]) -> None:
        """Until `ready`, which the rank brings about."""
        for _ in self._pauses(rank, event):
            if ready():
                break

    def _pauses(self, rank: int, event: str) -> Iterator[None]:
        started, pause, last_check, last_progress = time.monotonic(), 0.0, 0.0, 0
        tile_buffer = self._tile_buffers[rank]
        while True:
            yield
            if tile_buffer.failed():
                error = RankError(f"rank {rank} gave up in the middle of the exchange")
                error.echo = True
                raise error
            time.sleep(pause)
            pause = min(pause + 20e-6, 1e-3)
            waited = time.monotonic() - started
            if waited > last_check + 1:
                last_check = waited
                self._raise_if_failed()
                if not tile_buffer.is_owner_alive():
                    raise RankError(
                        f"rank {rank} (process {tile_buffer.token.split(':')[0]}) is gone; waited for {event}"
                    )
            if waited > self._timeout_seconds:
                if (progress := self._progress()) > last_progress:
                    started, last_check, last_progress = time.monotonic(), 0.0, progress
                    continue
                raise RankError(
                    f"rank {rank} did not come to {event} within {self._timeout_seconds:g} s"
                )


def _is_process_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def marking_failed(tile_buffer: TileBuffer | None) -> Iterator[None]:
    """Tells the waiting ranks when the block fails, so that they fail at once and not after their
    time-out.
    """
    try:
        yield
    except BaseException:
        if tile_buffer is not None:
            tile_buffer.mark_failed()
        raise

"""Shares tiles in host memory between the ranks of one node.

Each rank owns a buffer of tiles, which it and other ranks fill or empty. The memory is a memfd,
opened through /proc, because `/dev/shm` has 64 MB in containers. A buffer starts with counters.
Each has one writer and only grows during an exchange, so no locks are shared. A rank that sees a
counter must also see the data written before it: each access of a counter is fenced.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from unified_ckpt.errors import RankError, StorageError
from unified_ckpt.runtime.comm.error_spread import Spread, mark

SLOTS = 2  # tiles of a buffer, used in turn
_PAGE = 4096
# Counters: current exchange, tiles moved, owner failed; then, per rank, tiles done.
_EXCHANGE, _PROGRESS, _FAILED, _DONE = range(4)
CHANGED = -1  # in place of the number of tiles done: the bytes of a tile changed in transit

TileSpan = tuple[int, int, int, int]  # strided bytes of a tile: start, nbytes, step, count


def _fence() -> None:
    """Order all reads and writes of memory before it and after it, for other processes too.

    ARM reorders plain stores, and plain loads. A release of a lock followed by an acquire orders
    what precedes the release before what follows the acquire. Costs less than a microsecond.
    """
    lock = threading.Lock()  # of this call: a signal handler may interrupt it, and fence too
    with lock:
        pass
    with lock:
        pass


def _as_tensor(memory: np.ndarray) -> torch.Tensor:
    """Return an alias that any thread may fill, also if this one is in inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(memory)


class TileBuffer:
    """One rank's shared memory: counters, and SLOTS tiles of `tile_nbytes` bytes.

    `world`: the number of ranks, each with a counter. `handle`: lets other ranks open the buffer.
    """

    def __init__(self, memory: mmap.mmap, *, world: int, tile_nbytes: int, handle: str) -> None:
        self.handle, self.tile_nbytes, self._world = handle, tile_nbytes, world
        self._memory = memory
        self._counters = np.frombuffer(memory, dtype=np.int64, count=_DONE + world)
        # numpy keeps the mapping as long as a view exists; torch.frombuffer does not.
        self.bytes = _as_tensor(np.frombuffer(memory, dtype=np.uint8))  # [header + tiles]
        self._tiles_start = _header_nbytes(world)

    def tile(self, number: int) -> torch.Tensor:
        """Return the memory of tile `number`, uint8 [tile_nbytes]."""
        start = self._tiles_start + number % SLOTS * self.tile_nbytes
        return self.bytes[start : start + self.tile_nbytes]

    def open_for(self, exchange_id: int) -> None:
        """Reset all counters and open the buffer for an exchange. Owner only."""
        self._counters[_PROGRESS] = 0
        self._counters[_DONE:] = 0
        self._store(_EXCHANGE, exchange_id)

    def current_exchange_id(self) -> int:
        """Return the id of the exchange that the buffer is open for."""
        return self._load(_EXCHANGE)

    def progress(self) -> int:
        """Return how many tiles the owner has moved."""
        return self._load(_PROGRESS)

    def advance(self, tiles: int) -> None:
        """Set how many tiles the owner has moved. Owner only."""
        self._store(_PROGRESS, tiles)

    def done(self, rank: int) -> int:
        """Return how many tiles a member has finished."""
        return self._load(_DONE + rank)

    def set_done(self, rank: int, tiles: int) -> None:
        """Set how many tiles member `rank` has finished. That member only."""
        self._store(_DONE + rank, tiles)

    def finish_tile(
        self, number: int, *, rank: int, exchange_id: int, spans: Iterable[TileSpan]
    ) -> None:
        """Signal the owner, which sees the bytes."""
        del exchange_id, spans  # for other nodes
        self.set_done(rank, number + 1)

    def mark_failed(self) -> None:
        """Signal waiting ranks that the owner has failed. Owner only."""
        self._store(_FAILED, 1)

    def reset_failed(self) -> None:
        """Clear the failure mark when a new operation begins. Owner only."""
        self._store(_FAILED, 0)

    def failed(self) -> bool:
        """Return whether the owner has failed."""
        return bool(self._load(_FAILED))

    def _store(self, index: int, value: int) -> None:
        _fence()
        self._counters[index] = value

    def _load(self, index: int) -> int:
        value = int(self._counters[index])
        _fence()
        return value

    def is_owner_alive(self) -> bool:
        """Return whether the owner's process is running."""
        return _is_process_alive(int(self.handle.split(":")[0]))

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles. Pages that were never touched use no memory."""
        return SLOTS * self.tile_nbytes

    def close(self) -> None:
        """Release the memory once no view of it is left."""
        del self._counters, self.bytes
        try:
            self._memory.close()
        except BufferError:
            pass  # a view still exists; the memory is released with it


class TileImage:
    """Memory in which a rank fills tiles of other nodes, each of which is sent before the next."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def tile(self, nbytes: int) -> torch.Tensor:
        """Return the memory, uint8 [nbytes], allocated on first use."""
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = _as_tensor(np.empty(nbytes, dtype=np.uint8))
        return self._memory[:nbytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return 0 if self._memory is None else len(self._memory)

    def release(self) -> None:
        """Release the memory."""
        self._memory = None


class RemoteTileBuffer:
    """A tile buffer of a rank on another node.

    A member fills an image of a tile, which `finish_tile` sends by `PeerTransport.send_tile`. A
    rank has one image: it may have hundreds of partners.
    """

    def __init__(
        self,
        send: Callable[..., None],
        rank: int,
        handle: str,
        *,
        image: TileImage,
        tile_nbytes: int,
    ) -> None:
        self._send, self._image, self.rank = send, image, rank
        self.handle, self.tile_nbytes = handle, tile_nbytes

    def tile(self, _: int) -> torch.Tensor:
        """Return the image of a tile, uint8 [tile_nbytes]."""
        return self._image.tile(self.tile_nbytes)

    def finish_tile(
        self, number: int, *, rank: int, exchange_id: int, spans: Iterable[TileSpan]
    ) -> None:
        """Send the spans to the owner, and mark them as done there."""
        del rank  # the transport's
        self._send(
            self, exchange_id=exchange_id, number=number, tiles=number + 1, spans=list(spans)
        )

    def current_exchange_id(self) -> int:
        """Never behind: the receiver waits until its slot is free."""
        return sys.maxsize

    def progress(self) -> int:
        """Never behind: the receiver waits until its slot is free."""
        return sys.maxsize

    def failed(self) -> bool:
        """Return False: unknown here; `PeerWait` asks the store."""
        return False

    def is_owner_alive(self) -> bool:
        """Return True: unknown here; `PeerWait` asks the store."""
        return True

    def close(self) -> None:
        """Do nothing: the image is of all partners."""


# The buffer of some rank, as the ranks see it that fill or empty its tiles.
PartnerBuffer = TileBuffer | RemoteTileBuffer


def _header_nbytes(world: int) -> int:
    return -(-(_DONE + world) * 8 // _PAGE) * _PAGE


def create_tile_buffer(*, world: int, tile_nbytes: int) -> tuple[TileBuffer, int]:
    """Return a new buffer, and its descriptor to keep open as long as others may open it."""
    fd = os.memfd_create("unified_ckpt", os.MFD_CLOEXEC)
    try:
        nbytes = _header_nbytes(world) + SLOTS * tile_nbytes
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        # The inode distinguishes this buffer from an older one with the same descriptor.
        handle = f"{os.getpid()}:{fd}:{os.fstat(fd).st_ino}"
        return TileBuffer(memory, world=world, tile_nbytes=tile_nbytes, handle=handle), fd
    except BaseException:
        os.close(fd)
        raise


def open_tile_buffer(handle: str, *, world: int, tile_nbytes: int) -> TileBuffer:
    """Open another rank's buffer. StorageError if its memory cannot be reached from this node."""
    nbytes = _header_nbytes(world) + SLOTS * tile_nbytes
    memory = _map_shared(handle, nbytes)
    return TileBuffer(memory, world=world, tile_nbytes=tile_nbytes, handle=handle)


def share_bytes(body: bytes) -> tuple[str, int]:
    """Copy bytes to memory that ranks of the node can open; return its handle and descriptor.

    Keep the descriptor open until they have opened it.
    """
    fd = os.memfd_create("unified_ckpt", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, len(body))
        with mmap.mmap(fd, len(body)) as memory:
            memory[:] = body
        return f"{os.getpid()}:{fd}:{os.fstat(fd).st_ino}", fd
    except BaseException:
        os.close(fd)
        raise


def open_shared_bytes(handle: str, nbytes: int) -> memoryview:
    """Return bytes that another rank of the node shares. StorageError if they are unreachable."""
    return memoryview(_map_shared(handle, nbytes))


def _map_shared(handle: str, nbytes: int) -> mmap.mmap:
    pid, fd, inode = handle.split(":")
    try:
        shared_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"shared memory of process {pid}: cannot be opened: {error.strerror}; "
            "run the ranks of a node in one PID namespace, as one user"
        ) from error
    try:
        if os.fstat(shared_fd).st_ino != int(inode):
            raise StorageError(
                f"shared memory of process {pid}: was closed; keep every rank running until all "
                "have finished"
            )
        return mmap.mmap(shared_fd, nbytes)
    finally:
        os.close(shared_fd)


class PeerWait:
    """Waits for other ranks' counters in bounded time, and notices ranks that failed or died.

    `timeout_seconds`: of silence. `progress`: a number that grows as long as some rank makes
    progress. `raise_if_failed`: raises the error of any failed rank, also of those without a buffer
    here.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        tile_buffers: Mapping[int, PartnerBuffer],
        raise_if_failed: Callable[[], object],
        progress: Callable[[], int],
    ) -> None:
        self._timeout_seconds, self._tile_buffers = timeout_seconds, tile_buffers
        self._raise_if_failed, self._progress = raise_if_failed, progress

    def until_done(self, tile_buffer: TileBuffer, ranks: Sequence[int], tiles: int) -> None:
        """Wait until all these members have finished the buffer's first `tiles` tiles."""

        def is_done(rank: int) -> bool:
            done = tile_buffer.done(rank)
            if done == CHANGED:
                raise RankError(f"rank {rank}: its bytes changed on the way; check the network")
            return done >= tiles

        for rank in ranks:
            self.until(rank, f"its part of tile {tiles - 1}", partial(is_done, rank))

    def until_progress(self, rank: int, *, exchange_id: int, tiles: int) -> None:
        """Wait until the rank is in this exchange and has moved this many tiles."""
        tile_buffer = self._tile_buffers[rank]

        def has_moved() -> bool:
            current = tile_buffer.current_exchange_id()
            return current > exchange_id or (
                current == exchange_id and tile_buffer.progress() >= tiles
            )

        self.until(rank, f"tile {tiles - 1} of exchange {exchange_id}", has_moved)

    def until(self, rank: int, event: str, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, which `rank` brings about; `event` names it in errors."""
        started, pause, last_check, last_progress = time.monotonic(), 0.0, 0.0, 0
        tile_buffer = self._tile_buffers[rank]
        while not ready():
            if tile_buffer.failed():
                error = RankError(f"rank {rank} failed during the exchange")
                raise mark(error, Spread.SECONDARY)
            time.sleep(pause)
            pause = min(pause + 20e-6, 1e-3)
            waited = time.monotonic() - started
            if waited > last_check + 1:
                last_check = waited
                self._raise_if_failed()
                if not tile_buffer.is_owner_alive():
                    pid = tile_buffer.handle.split(":")[0]
                    raise RankError(f"rank {rank} (process {pid}) has exited before {event}")
            if waited > self._timeout_seconds:
                if (progress := self._progress()) > last_progress:
                    started, last_check, last_progress = time.monotonic(), 0.0, progress
                    continue
                error = RankError(
                    f"rank {rank} did not reach {event} within {self._timeout_seconds:g} s"
                )
                raise mark(error, Spread.OVERDUE)


def _is_process_alive(pid: int) -> bool:
    """Return whether the process is running; a zombie is not. True if that is unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # this process has too many open files; the wait ends by its time
        return True


@contextmanager
def marking_failed(tile_buffer: TileBuffer | None) -> Iterator[None]:
    """Mark the buffer as failed if the block raises, so that waiting ranks fail at once."""
    try:
        yield
    except BaseException:
        if tile_buffer is not None:
            tile_buffer.mark_failed()
        raise

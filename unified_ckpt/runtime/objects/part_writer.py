"""Collects the bytes of a file's parts, and uploads parts that are complete, several at a time.

How bytes could be lost, each with a test:
- A part is uploaded before all of its bytes have arrived: a part with a gap is an error.
- A buffer is reused while it is being sent: bytes are copied, unless they do not change.
- An upload fails after its bytes have been accepted: the next call raises, `flush` at the latest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.objects.store import Buffer

_IN_FLIGHT_NBYTES = 128 << 20  # with the part that is filled, 192 MiB at the largest part size
_MIN_IN_FLIGHT = 2
_PROGRESS_SECONDS = 1.0

# Uploads a part: the file, the part's number from 0 on, and its bytes.
UploadPart = Callable[[str, int, Sequence[Buffer]], None]


@dataclass(slots=True)
class _OpenPart:
    """A part whose bytes are not complete. `pieces`: the first byte of each in the part.

    `memory` has the bytes of pieces that are copied, at their place in the part.
    """

    pieces: list[tuple[int, Buffer]] = field(default_factory=list)
    memory: bytearray | None = None
    written: int = 0

    def buffers(self, nbytes: int) -> list[Buffer] | None:
        """Return the bytes in order; None if they are not exactly [0, nbytes)."""
        end, buffers = 0, list[Buffer]()
        for offset, piece in sorted(self.pieces, key=lambda item: item[0]):
            if offset != end:
                return None
            buffers.append(piece)
            end += len(piece)
        return buffers if end == nbytes else None


class PartWriter:
    """Positional writes of one rank into parts of files. One thread writes at a time.

    A part is uploaded once it is complete. The parts of a file have `part_nbytes` bytes, the last
    one fewer: it is complete at `flush`, or before if the size of the file is in `file_sizes`.
    Parts in flight, and the one that is filled, are all that is held; a write waits for memory.
    """

    def __init__(self, upload: UploadPart, *, part_nbytes: int) -> None:
        self.part_nbytes = part_nbytes
        self.file_sizes: dict[str, int] = {}
        self._upload = upload
        self._depth = max(_MIN_IN_FLIGHT, _IN_FLIGHT_NBYTES // part_nbytes)
        self._open: dict[tuple[str, int], _OpenPart] = {}
        self._free: list[bytearray] = []
        self._queue: SimpleQueue[tuple[str, int, list[Buffer], bytearray | None] | None]
        self._queue = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._in_flight = 0
        self._error: BaseException | None = None

    def write_at(
        self, file: str, start: int, buffers: Sequence[Buffer], *, stable: bool = False
    ) -> None:
        """Write the buffers one after another from byte `start`.

        `stable`: they do not change before `flush`, and are not copied.
        """
        self._raise_error()
        for buffer in buffers:
            while len(buffer):
                number, offset = divmod(start, self.part_nbytes)
                piece = buffer[: self.part_nbytes - offset]
                self._add(file, number, offset, piece, stable=stable)
                start, buffer = start + len(piece), buffer[len(piece) :]

    def _add(self, file: str, number: int, offset: int, piece: Buffer, *, stable: bool) -> None:
        part = self._open.setdefault((file, number), _OpenPart())
        if not stable:
            if part.memory is None:
                part.memory = self._acquire_memory()
            view = memoryview(part.memory)[offset : offset + len(piece)]
            view[:] = piece
            piece = view
        part.pieces.append((offset, piece))
        part.written += len(piece)
        if part.written >= self._part_size(file, number):
            self._submit(file, number, self._part_size(file, number))

    def _part_size(self, file: str, number: int) -> int:
        """Return the bytes of a part; those of a whole one if the size of the file is unknown."""
        remaining = self.file_sizes.get(file, (number + 1) * self.part_nbytes)
        return min(remaining - number * self.part_nbytes, self.part_nbytes)

    def _acquire_memory(self) -> bytearray:
        with self._changed:
            if self._free:
                return self._free.pop()
        return bytearray(self.part_nbytes)

    def _submit(self, file: str, number: int, nbytes: int) -> None:
        """Queue a complete part, once fewer than `depth` are in flight."""
        part = self._open.pop((file, number))
        buffers = part.buffers(nbytes)
        if buffers is None:
            raise StorageError(
                f"{file}: part {number + 1} got {part.written} bytes with gaps or twice, expected "
                f"{nbytes}; this is a bug"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight < self._depth or self._error is not None)
            self._raise_error()
            self._in_flight += 1
        if len(self._threads) < min(self._depth, self._in_flight):
            thread = threading.Thread(target=self._run, name="unified_ckpt-part", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put((file, number, buffers, part.memory))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            file, number, buffers, memory = item
            error: BaseException | None = None
            if self._error is None:
                try:
                    self._upload(file, number, buffers)
                except BaseException as caught:  # raised by the next call
                    error = caught
            del item, buffers
            with self._changed:
                self._error = self._error or error
                self._in_flight -= 1
                if memory is not None:
                    self._free.append(memory)
                self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def flush(self, on_progress: Callable[[], object] = lambda: None) -> None:
        """Return once all parts are uploaded. StorageError if a part has a gap.

        `on_progress`: called in this thread about once a second, also during one long upload.
        """
        for file, number in sorted(self._open):
            part = self._open[file, number]
            nbytes = self._part_size(file, number)
            self._submit(file, number, nbytes if file in self.file_sizes else part.written)
        while self._in_flight:
            with self._changed:
                self._changed.wait_for(lambda: not self._in_flight, timeout=_PROGRESS_SECONDS)
            on_progress()
        self._end_threads()
        self._raise_error()

    def close(self) -> None:
        """Upload nothing more; return once no part is in flight."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        self._end_threads()
        self._open, self._free = {}, []

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads, self._free = [], []

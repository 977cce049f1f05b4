"""Reads announced ranges of files ahead: several requests at once, in bounded memory.

Large ranges are read where the reader wants them, others into buffers.

A read could wait forever for memory that ranges hold which nobody reads. So a read that the window
has not reached drops the unread ranges before it. A late answer could change memory that the reader
uses for something else by then: whoever drops ranges waits for requests that fill such memory.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from unified_ckpt.runtime.storage.protocol import ReadRange

GAP_NBYTES = 256 << 10  # reading a gap this small is cheaper than another request
REQUEST_NBYTES = 16 << 20  # into the reader's memory; half of that into a buffer
IN_FLIGHT = 16  # requests
HELD_NBYTES = 192 << 20  # in buffers: those of requests in flight, and those not read yet
DIRECT_NBYTES = 1 << 20  # of a range that is worth a request of its own, without a copy

Fetch = Callable[[str, int, memoryview], None]  # fills a buffer from this byte of a file


@dataclass(eq=False, slots=True)
class RangeRequest:
    """Bytes [start, stop) of a file, read by one request.

    `into`: the reader's memory for them, if it is known; else `buffer`. `unread`: announced bytes
    in it that are still to be read. `readers`: reads that use it now. `done`: it was answered.
    `dropped`: later reads do not use it. `cancelled`: it is never sent.
    """

    name: str
    start: int
    stop: int
    into: memoryview | None = None
    unread: int = 0
    readers: int = 0
    buffer: mmap.mmap | None = None
    error: BaseException | None = None
    done: bool = False
    dropped: bool = False
    cancelled: bool = False

    @property
    def nbytes(self) -> int:
        """The size."""
        return self.stop - self.start


def plan_requests(ranges: Iterable[ReadRange]) -> list[RangeRequest]:
    """Return the requests that read these ranges, in their order.

    Merges successive ranges of a file with gaps of at most GAP_NBYTES, unless they are large and
    their memory is known. Cuts what is longer than a request into equal pieces.
    """
    requests: list[RangeRequest] = []
    merged: list[ReadRange] = []
    merged_stop = 0
    for item in ranges:
        is_direct = item.into is not None and item.stop - item.start >= DIRECT_NBYTES
        is_near = (
            merged
            and not is_direct
            and item.file == merged[0].file
            and merged[0].start <= item.start <= merged_stop + GAP_NBYTES
        )
        if not is_near:
            requests += _cut(merged, merged_stop)
            merged, merged_stop = [], 0
        if is_direct:
            requests += _cut([item], item.stop, item.into)
        elif item.start < item.stop:
            merged.append(item)
            merged_stop = max(merged_stop, item.stop)
    return requests + _cut(merged, merged_stop)


def _cut(
    ranges: Sequence[ReadRange], stop: int, into: memoryview | None = None
) -> list[RangeRequest]:
    """Return the requests for ranges of one file, of which the first one has the first byte."""
    if not ranges:
        return []
    name, start = ranges[0].file, ranges[0].start
    nbytes = stop - start
    half = REQUEST_NBYTES // 2
    pieces = 1 if into is not None and nbytes <= REQUEST_NBYTES else -(-nbytes // half)
    piece_nbytes = -(-nbytes // pieces)
    requests = [
        RangeRequest(name, low, min(low + piece_nbytes, stop))
        for low in range(start, stop, piece_nbytes)
    ]
    for item in ranges:
        first, last = (item.start - start) // piece_nbytes, -(-(item.stop - start) // piece_nbytes)
        for request in requests[first:last]:
            request.unread += min(item.stop, request.stop) - max(item.start, request.start)
    if into is not None:
        for request in requests:
            request.into = into[request.start - start : request.stop - start]
    return requests


@dataclass(slots=True)
class _Buffers:
    """Memory of requests, used again: the first touch of a new page costs more than a copy."""

    limit_nbytes: int
    nbytes: int = 0  # of all, free or not
    free: list[mmap.mmap] = field(default_factory=list)

    def acquire(self, nbytes: int) -> mmap.mmap | None:
        """Return a buffer of at least `nbytes`, or None if the limit is reached."""
        for number in reversed(range(len(self.free))):  # the last one may be in the CPU's cache
            if len(self.free[number]) >= nbytes:
                return self.free.pop(number)
        while self.free and self.nbytes + nbytes > self.limit_nbytes:
            self.nbytes -= len(self.free.pop())
        if self.nbytes and self.nbytes + nbytes > self.limit_nbytes:
            return None
        self.nbytes += nbytes
        return mmap.mmap(-1, nbytes)

    def release(self, buffer: mmap.mmap) -> None:
        """Let another request use a buffer."""
        self.free.append(buffer)

    def clear(self) -> None:
        """Free the memory that no request uses."""
        self.nbytes -= sum(map(len, self.free))
        self.free.clear()


class ReadAhead:
    """Reads files with `fetch`, and announced ranges of them in advance. Safe for threads.

    `in_flight`, `held_nbytes`: the limits of requests and of memory.
    """

    def __init__(
        self, fetch: Fetch, *, in_flight: int = IN_FLIGHT, held_nbytes: int = HELD_NBYTES
    ) -> None:
        self._fetch, self._in_flight = fetch, in_flight
        self._lock = threading.Lock()  # guards all that follows
        self._answered = threading.Condition(self._lock)  # for reads
        self._room = threading.Condition(self._lock)  # for threads that send requests
        self._buffers = _Buffers(held_nbytes)
        self._queue: deque[RangeRequest] = deque()  # not sent yet
        self._sent: dict[RangeRequest, None] = {}  # in flight, or answered and still to be copied
        self._by_name: dict[str, list[RangeRequest]] = {}  # of both, as announced
        self._threads = 0  # they end when the queue is empty

    def expect(self, ranges: Iterable[ReadRange]) -> None:
        """Read these ranges in advance, in this order. What was announced before is dropped."""
        requests = plan_requests(ranges)
        with self._lock:
            self._drop_all()
            self._wait_direct()
            self._queue.extend(requests)
            for request in requests:
                self._by_name.setdefault(request.name, []).append(request)
            while self._threads < min(self._in_flight, len(self._queue)):
                thread = threading.Thread(target=self._run, name="unified_ckpt-read", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # too many threads: fewer will do, and reads need none
                    if not self._threads:
                        self._drop_all()
                    break
                self._threads += 1

    def read_at(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with bytes of a file from `start`. Raises the errors of `fetch`."""
        position, end = start, start + len(into)
        while position < end:
            request, stop = self._acquire(name, position, end)
            target = into[position - start : stop - start]
            if request is None and len(target) > REQUEST_NBYTES:
                self._read_in_pieces(name, position, target)
            elif request is None:
                self._fetch(name, position, target)
            else:
                try:
                    if request.error is not None:
                        raise request.error
                    body = request.into if request.into is not None else request.buffer
                    with memoryview(body or b"") as view:
                        source = view[position - request.start : stop - request.start]
                        if request.into is None or _address(source) != _address(target):
                            target[:] = source
                finally:
                    self._release(request, stop - position)
            position = stop

    def _read_in_pieces(self, name: str, start: int, into: memoryview) -> None:
        """Read a long range that was not announced by several requests at once."""
        pieces = ReadAhead(self._fetch, in_flight=self._in_flight)
        pieces.expect([ReadRange(name, start, start + len(into), into)])
        try:
            pieces.read_at(name, start, into)
        finally:
            pieces.close()

    def close(self) -> None:
        """Drop what was announced. Requests in flight end by themselves."""
        with self._lock:
            self._drop_all()
            self._wait_direct()
            self._buffers.clear()

    def _acquire(self, name: str, position: int, end: int) -> tuple[RangeRequest | None, int]:
        """Return the answered request that has the byte at `position`, and where its bytes end.

        Of several, the one announced first: a later one would skip what is read between them.
        None if the byte was not announced: the caller reads up to where announced bytes begin.
        """
        with self._lock:
            requests = self._by_name.get(name, [])
            request = next((each for each in requests if each.start <= position < each.stop), None)
            if request is None:
                starts = (each.start for each in requests if position < each.start < end)
                return None, min(starts, default=end)
            stop = min(end, request.stop)
            request.readers += 1
            if request not in self._sent:
                self._skip_to(request)
            self._answered.wait_for(lambda: request.done or request.cancelled)
            if request.done:
                return request, stop
            request.readers -= 1
            return None, stop

    def _release(self, request: RangeRequest, nbytes: int) -> None:
        with self._lock:
            request.readers -= 1
            request.unread -= nbytes
            if request.unread <= 0 or request.error is not None:
                self._drop(request)
            self._free(request)

    def _skip_to(self, request: RangeRequest) -> None:
        """Make a request the next one to send: reads come in order, so those before it are over."""
        while self._queue[0] is not request:
            self._cancel(self._queue.popleft())
        self._room.notify_all()

    def _run(self) -> None:
        """Send requests until the queue is empty."""
        while (request := self._next_request()) is not None:
            try:
                body = request.into if request.into is not None else request.buffer
                with memoryview(body or b"") as view:
                    self._fetch(request.name, request.start, view[: request.nbytes])
            except BaseException as error:  # raised by the read that needs these bytes
                request.error = error
            with self._lock:
                request.done = True
                self._free(request)
                self._answered.notify_all()

    def _next_request(self) -> RangeRequest | None:
        """Return the next request, with a buffer; wait until there is memory for it."""
        with self._lock:
            while self._queue:
                request = self._queue[0]
                if request.into is None:
                    request.buffer = self._buffers.acquire(request.nbytes)
                if request.into is not None or request.buffer is not None:
                    self._sent[self._queue.popleft()] = None
                    return request
                if request.readers:  # what was sent before is not read any more
                    self._drop_sent()
                if not self._buffers.free:
                    self._room.wait()
            self._threads -= 1
            self._room.notify_all()  # the others end, too
            return None

    def _drop_all(self) -> None:
        while self._queue:
            self._cancel(self._queue.popleft())
        self._drop_sent()
        self._room.notify_all()

    def _drop_sent(self) -> None:
        for request in list(self._sent):
            self._drop(request)
            self._free(request)

    def _wait_direct(self) -> None:
        """Wait until no request fills memory of a reader, which may use it for something else."""
        self._answered.wait_for(lambda: all(each.into is None for each in self._sent))

    def _cancel(self, request: RangeRequest) -> None:
        """Drop a request that is never sent. Reads that wait for it fetch its bytes themselves."""
        request.cancelled = True
        self._drop(request)
        self._answered.notify_all()

    def _drop(self, request: RangeRequest) -> None:
        """Let later reads ask for these bytes themselves."""
        if not request.dropped:
            request.dropped = True
            self._by_name[request.name].remove(request)

    def _free(self, request: RangeRequest) -> None:
        """Return the buffer of a dropped request that neither a thread nor a read uses."""
        if request.dropped and request.done and not request.readers and request in self._sent:
            del self._sent[request]
            if request.buffer is not None:
                self._buffers.release(request.buffer)
                request.buffer = None
                self._room.notify()
            self._answered.notify_all()  # for whoever drops ranges


def _address(view: memoryview) -> int:
    """Return where writable bytes, at least one, are in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

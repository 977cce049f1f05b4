from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.objects import part_writer
from unified_ckpt.runtime.objects.part_writer import PartWriter
from unified_ckpt.runtime.objects.store import Buffer

PART = 64


class Uploads:
    """Uploads parts into a dict; `wait` and `fail` disturb it."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int], bytes] = {}
        self.buffers: list[Sequence[Buffer]] = []
        self.in_flight = self.most_in_flight = 0
        self.lock, self.gate = threading.Lock(), threading.Event()
        self.gate.set()
        self.fail = ""

    def __call__(self, file: str, number: int, buffers: Sequence[Buffer]) -> None:
        with self.lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.buffers.append(buffers)
        self.gate.wait(10)
        if file == self.fail:
            raise StorageError(f"{file}: part {number} failed")
        with self.lock:
            assert (file, number) not in self.parts
            self.parts[file, number] = b"".join(buffers)
            self.in_flight -= 1

    def body(self, file: str) -> bytes:
        return b"".join(body for (name, _), body in sorted(self.parts.items()) if name == file)


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=4),
    st.integers(0, 9999),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_pieces_in_any_order_become_parts(
    sizes: list[int], seed: int, in_order: bool, known: bool
) -> None:
    draw, uploads = random.Random(seed), Uploads()
    writer = PartWriter(uploads, part_nbytes=PART)
    bodies = {f"file{n}": draw.randbytes(size) for n, size in enumerate(sizes)}
    if known:
        writer.file_sizes.update({file: len(body) for file, body in bodies.items()})
    writes = []
    for file, body in bodies.items():
        start = 0
        while start < len(body):
            stop = min(start + draw.randint(1, 150), len(body))
            writes.append((file, start, body[start:stop]))
            start = stop
    if not in_order:
        draw.shuffle(writes)
    for file, start, body in writes:
        stable = draw.random() < 0.5
        memory = bytearray(body)
        cut = draw.randint(0, len(body))
        writer.write_at(
            file, start, [memoryview(memory)[:cut], memoryview(memory)[cut:]], stable=stable
        )
        if not stable:
            memory[:] = bytes(len(memory))  # reused by its owner
    writer.flush()
    for file, body in bodies.items():
        assert uploads.body(file) == body
    assert all(
        len(body) == min(PART, len(bodies[file]) - number * PART)
        for (file, number), body in uploads.parts.items()
    )


def test_a_part_that_is_one_stable_buffer_is_not_copied() -> None:
    uploads, memory = Uploads(), bytearray(PART)
    writer = PartWriter(uploads, part_nbytes=PART)
    writer.write_at("file", 0, [memoryview(memory)], stable=True)
    writer.flush()
    ((buffer,),) = uploads.buffers
    assert buffer.obj is memory


def test_a_complete_part_is_uploaded_at_once() -> None:
    uploads = Uploads()
    writer = PartWriter(uploads, part_nbytes=PART)
    writer.file_sizes["file"] = PART + 1
    writer.write_at("file", PART, [memoryview(b"b")])
    writer.write_at("file", 0, [memoryview(bytes(PART))])
    deadline = time.monotonic() + 10
    while len(uploads.parts) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(uploads.parts) == 2
    writer.flush()


@pytest.mark.parametrize("sizes", [{}, {"file": 300}], ids=["unknown", "known"])
@pytest.mark.parametrize("start", [1, PART - 1])
def test_a_part_with_a_gap_is_an_error(sizes: dict[str, int], start: int) -> None:
    writer = PartWriter(Uploads(), part_nbytes=PART)
    writer.file_sizes.update(sizes)
    writer.write_at("file", start, [memoryview(b"a")])
    with pytest.raises(StorageError, match=r"file: part 1 got 1 bytes with gaps .* is a bug"):
        writer.flush()
    writer.close()


def test_bytes_that_arrive_twice_are_an_error() -> None:
    writer = PartWriter(Uploads(), part_nbytes=PART)
    writer.write_at("file", 0, [memoryview(bytes(40))])
    with pytest.raises(StorageError, match="with gaps or twice"):
        writer.write_at("file", 30, [memoryview(bytes(40))])
    writer.close()


def test_writes_wait_for_parts_in_flight() -> None:
    uploads = Uploads()
    uploads.gate.clear()
    writer = PartWriter(uploads, part_nbytes=64 << 20)
    memory = memoryview(bytearray(64 << 20))
    done = threading.Event()

    def write() -> None:
        for number in range(5):
            writer.write_at("file", number * len(memory), [memory], stable=True)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not done.wait(0.2)
    assert uploads.in_flight == 2
    uploads.gate.set()
    thread.join()
    writer.flush()
    assert uploads.most_in_flight == 2
    assert len(uploads.parts) == 5


def test_progress_is_reported_by_the_thread_that_waits() -> None:
    uploads = Uploads()
    uploads.gate.clear()
    writer = PartWriter(uploads, part_nbytes=64 << 20)
    memory = memoryview(bytearray(64 << 20))
    for number in range(2):
        writer.write_at("file", number * len(memory), [memory], stable=True)
    threading.Timer(0.1, uploads.gate.set).start()
    threads = list[threading.Thread]()
    writer.flush(lambda: threads.append(threading.current_thread()))
    assert set(threads) == {threading.current_thread()}


def test_the_memory_of_parts_is_reused() -> None:
    uploads = Uploads()
    writer = PartWriter(uploads, part_nbytes=32 << 20)
    chunk = memoryview(bytes(1 << 20))
    for start in range(0, 640 << 20, 1 << 20):
        writer.write_at("file", start, [chunk])
        uploads.parts.clear()
    distinct = {id(memoryview(buffer).obj) for buffers in uploads.buffers for buffer in buffers}
    assert len(distinct) <= 5
    uploads.buffers.clear()
    writer.flush()


def test_a_failed_upload_ends_the_writes() -> None:
    uploads = Uploads()
    uploads.fail = "file"
    writer = PartWriter(uploads, part_nbytes=PART)
    writer.write_at("file", 0, [memoryview(bytes(PART))])
    with pytest.raises(StorageError, match="part 0 failed"):
        writer.flush()
    with pytest.raises(StorageError, match="part 0 failed"):
        writer.write_at("other", 0, [memoryview(bytes(PART))])
    writer.close()


def test_nothing_is_sent_after_close() -> None:
    uploads, others = Uploads(), set(threading.enumerate())
    uploads.gate.clear()
    writer = PartWriter(uploads, part_nbytes=64 << 20)
    memory = memoryview(bytearray(64 << 20))
    for number in range(2):
        writer.write_at("file", number * len(memory), [memory], stable=True)
    threading.Timer(0.1, uploads.gate.set).start()
    writer.close()
    assert uploads.in_flight == 0
    count = len(uploads.buffers)
    time.sleep(0.05)
    assert len(uploads.buffers) == count
    assert set(threading.enumerate()) <= others


def test_a_failed_upload_is_raised_by_each_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "_MIN_IN_FLIGHT", 1)
    monkeypatch.setattr(part_writer, "_IN_FLIGHT_NBYTES", PART)
    uploads = Uploads()
    uploads.fail = "bad"
    uploads.gate.clear()
    writer = PartWriter(uploads, part_nbytes=PART)
    writer.write_at("bad", 0, [memoryview(bytes(PART))])
    threading.Timer(0.1, uploads.gate.set).start()
    with pytest.raises(StorageError, match="bad"):  # of the write that waits for room
        writer.write_at("good", 0, [memoryview(bytes(PART))])
    for _ in range(2):
        with pytest.raises(StorageError, match="bad"):
            writer.flush()
    writer.close()

"""Host memory and streams for copies from and to CUDA devices."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self, TypeVar

import torch

from unified_ckpt.core.sharding.boxes import Box, strides
from unified_ckpt.runtime.threads import map_in_threads
from unified_ckpt.runtime.torch_state.tensors import (
    LocalTensor,
    as_copied,
    row_major_views,
    torch_dtype,
)

PIECE_NBYTES = 8 << 20  # that one call copies: a device may need as much for it
_LOG = logging.getLogger("unified_ckpt")
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # target, source
_Item = TypeVar("_Item")


class _Mapping(mmap.mmap):
    """Anonymous memory. If `pin` succeeded, it is unpinned before it is unmapped."""

    _address = 0
    _process = 0

    def pin(self, address: int) -> int:
        """Pin the memory, which begins at `address`. Return the CUDA error, 0 for none."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(address, len(self), 0))
        if not error:
            self._address, self._process = address, os.getpid()
        return error

    def __del__(self) -> None:
        # A forked process must not call CUDA.
        if self._address and self._process == os.getpid():
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


def copy_threads(threads: int) -> int:
    """Return how many of a rank's `threads` may copy from the host, or cast, at a time.

    Each copy already runs in torch's own threads, of which torchrun leaves it one.
    """
    return max(threads // torch.get_num_threads(), 1)


def host_memory(nbytes: int, *, pinned: bool, threads: int = 1) -> torch.Tensor:
    """Return memory of the host, uint8 [nbytes]; the system gets it back with the last alias.

    torch's own pinned memory is rounded up to a power of two, and never given back. `pinned` is a
    wish: copies are slower without it, and a warning says so. `threads` touch the memory first.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)  # workers of a data loader need neither pages nor tables
    # A first copy to huge pages takes a third of the time, pinning those that exist an eighth.
    with contextlib.suppress(OSError):  # of a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # later copies may fill it in any mode
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if pinned:
        _in_threads(torch.Tensor.zero_, torch.split(memory, PIECE_NBYTES), threads=threads)
        if error := mapping.pin(memory.data_ptr()):
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # raises it instead of training's next kernel
            text = "cannot pin %d bytes of host memory (CUDA error %d); copies take longer"
            _LOG.warning(text, nbytes, error)
    return memory


def transfer_buffer(nbytes: int) -> torch.Tensor:
    """Return a small buffer, uint8 [nbytes]; pinned if this process uses CUDA."""
    pinned = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class HostCopies:
    """Copies to memory of the host, which are complete when the block ends.

    Copies from CUDA devices run on the current streams, and the block waits for them once, also if
    it raises: they write to the memory. Copies from the host run at its end, in `threads` threads.
    """

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._devices = set[torch.device]()
        self._pairs: _Pairs = []

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to a target of the same shape; neither may change before the block ends.

        A device needs as much memory again if the dtypes differ or the source is not contiguous.
        """
        if source.device.type == "cpu":
            self._pairs.append((target, source))
            return
        if source.is_cuda:
            self._devices.add(source.device)
        target.copy_(source.to(target.dtype), non_blocking=source.is_cuda)

    def add_elements(self, target: torch.Tensor, tensor: LocalTensor, first: int) -> None:
        """Fill `target` [elements] from the tensor's element `first` on, in row-major order."""
        limit = PIECE_NBYTES // max(target.itemsize, tensor.local.itemsize)
        for source in row_major_views(tensor.local, first, first + len(target), limit=limit):
            piece = target[: source.numel()].view(source.shape)
            self.add(*as_copied(tensor, piece, source))
            target = target[source.numel() :]

    def __exit__(self, error_type: object, *_: object) -> None:
        """Copy what is on the host, and wait for the devices."""
        try:
            if error_type is None:
                _in_threads(_copy_pairs, _batches(self._pairs), threads=self._threads)
        finally:
            for device in self._devices:
                torch.cuda.current_stream(device).synchronize()


def _batches(pairs: _Pairs) -> Iterator[_Pairs]:
    """Yield pairs of about PIECE_NBYTES in sum."""
    first = nbytes = 0
    for stop, (target, _) in enumerate(pairs, 1):
        nbytes += target.nbytes
        if nbytes >= PIECE_NBYTES or stop == len(pairs):
            yield pairs[first:stop]
            first, nbytes = stop, 0


def _copy_pairs(pairs: _Pairs) -> None:
    row_major = [pair for pair in pairs if pair[1].is_contiguous()]
    for target, source in pairs:
        if not source.is_contiguous():
            _transpose(target, source)
    if row_major:
        targets, sources = zip(*row_major, strict=True)
        torch._foreach_copy_(targets, sources)


def _transpose(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a part of a tensor whose memory has another order, first as it lies in memory.

    torch transposes by blocks, which is twice as fast, only if the memory has no gaps and the
    dtypes agree. The memory is mapped, because malloc often does not reuse what was freed.
    """
    strides = torch.empty_like(source, device="meta").stride()
    memory = host_memory(target.nbytes, pinned=False).view(target.dtype)
    target.copy_(memory.as_strided(source.shape, strides).copy_(source))


def _in_threads(call: Callable[[_Item], object], items: Iterable[_Item], *, threads: int) -> None:
    if threads > 1:
        # In inference mode, because views that were created in it can be filled in no other.
        map_in_threads(torch.inference_mode()(call), items, count=threads)
        return
    for item in items:
        call(item)


class TransferBuffers:
    """Two host buffers, in turns, of a thread whose current streams copy them to devices.

    How bytes could be lost: a copy to a device goes on after the call that began it.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        # Each with the events after its copies; the one acquired last is last.
        self._buffers: deque[tuple[torch.Tensor, list[torch.cuda.Event]]] = deque()

    def acquire(self) -> torch.Tensor:
        """Return a buffer, uint8 [nbytes], that no copy reads any more."""
        if len(self._buffers) < 2:
            buffer = transfer_buffer(self._nbytes)
        else:
            buffer, events = self._buffers.popleft()
            for event in events:
                event.synchronize()
        self._buffers.append((buffer, []))
        return buffer

    def release_after(self, target: torch.Tensor) -> None:
        """Free the buffer acquired last after what the current stream of `target` does by now."""
        self._buffers[-1][1].extend(record_events([target]))

    def wait(self) -> None:
        """Wait until all copies are complete."""
        for _, events in self._buffers:
            for event in events:
                event.synchronize()


def copy_to_tensor(stored: torch.Tensor, tensor: LocalTensor, first: int) -> None:
    """Copy stored elements, as bytes, to those of a contiguous tensor from `first` on.

    A copy from pinned memory to a CUDA device may go on after the call, unless it casts.
    """
    source = stored.view(torch_dtype(tensor.decl.spec.dtype))
    target = tensor.local.view(-1)[first : first + len(source)]
    source, target = as_copied(tensor, source, target)
    target.copy_(source, non_blocking=target.is_cuda and not tensor.casts)


def copy_part_to_tensor(stored: torch.Tensor, tensor: LocalTensor, part: Box) -> None:
    """Copy a part of a tensor's box from bytes that hold it with the strides of the whole tensor.

    The copy is complete after the call.
    """
    spec = tensor.decl.spec
    source = stored.view(torch_dtype(spec.dtype)).as_strided(part.shape, strides(spec.shape))
    source, target = as_copied(tensor, source, tensor.local[part.slices])
    target.copy_(source)


def record_events(tensors: Iterable[torch.Tensor]) -> list[torch.cuda.Event]:
    """Record events after all work queued so far on the streams of the tensors' CUDA devices."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]


@contextlib.contextmanager
def streams_after(events: Sequence[torch.cuda.Event]) -> Iterator[None]:
    """Make new streams current on the devices of the events; they wait for the events only.

    On the streams of the training loop, copies would wait for later steps, and those for copies.
    """
    with contextlib.ExitStack() as stack:
        for event in events:
            stream = torch.cuda.Stream(event.device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            # A new thread is on device 0. The end of a stream's block returns there by
            # `set_device`, which creates a context of hundreds of MB; `torch.cuda.device` does not.
            stack.enter_context(torch.cuda.device(event.device))
            stack.enter_context(torch.cuda.stream(stream))
        yield

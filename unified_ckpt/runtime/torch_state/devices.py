"""Host memory and streams for copies from and to CUDA devices."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence

import torch

_LOG = logging.getLogger("unified_ckpt")


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


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return memory of the host, uint8 [nbytes]; the system gets it back with the last alias.

    torch's own pinned memory is rounded up to a power of two, and never given back. `pinned` is a
    wish: copies are slower without it, and a warning says so.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)  # workers of a data loader need neither pages nor tables
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if pinned:
        mapping.madvise(mmap.MADV_HUGEPAGE)  # pinning huge pages that exist takes an eighth
        memory.zero_()
        if error := mapping.pin(memory.data_ptr()):
            text = "cannot pin %d bytes of host memory (CUDA error %d); copies take longer"
            _LOG.warning(text, nbytes, error)
    return memory


def transfer_buffer(nbytes: int) -> torch.Tensor:
    """Return a small buffer, uint8 [nbytes]; pinned if this process uses CUDA."""
    pinned = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


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
            stack.enter_context(torch.cuda.stream(stream))
        yield

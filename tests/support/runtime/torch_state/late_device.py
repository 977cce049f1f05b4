"""A device whose copies to the host are made when its stream is synchronized, and not before.

Until then the host sees old bytes. Where no copy waits, tests on the CPU cannot see a copy that
nobody waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map


class LateStream:
    """Collects copies until `synchronize`.

    `blocking`: copies that waited for the device; `awaited`: those among them that synchronized it.
    """

    def __init__(self) -> None:
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.synchronized = self.awaited = self.blocking = 0
        self.largest_nbytes = 0  # of what was allocated on the device

    def synchronize(self) -> None:
        """Make the copies."""
        self.synchronized += 1
        for target, source in self.queued:
            target.copy_(source)
        self.queued = []


class LateTensor(torch.Tensor):
    """A tensor that says it is on a CUDA device; its elements are in host memory."""

    inner: torch.Tensor
    stream: LateStream
    device = torch.device("cuda:0")
    is_cuda = True

    @staticmethod
    def __new__(cls, inner: torch.Tensor, stream: LateStream) -> LateTensor:
        tensor: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        tensor.inner, tensor.stream = inner, stream
        return tensor

    def cpu(self, *_: Any) -> torch.Tensor:
        """Return the elements, as a copy that waits. torch takes the wrapper for one of the CPU."""
        self.stream.blocking += 1
        return self.inner

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        stream = next(arg.stream for arg in tree_leaves(args) if isinstance(arg, cls))
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], cls):
            target, source, *non_blocking = args
            stream.blocking += not any(non_blocking)
            stream.queued.append((target, source.inner))
            if not any(non_blocking):
                stream.awaited += 1
                stream.synchronize()
            return target
        inner = tree_map(lambda arg: arg.inner if isinstance(arg, cls) else arg, (args, kwargs))
        result = func(*inner[0], **(inner[1] or {}))
        if (device := (kwargs or {}).get("device")) is not None and device.type == "cpu":
            stream.blocking += 1
            return result
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            stream.largest_nbytes = max(stream.largest_nbytes, result.nbytes)
        return tree_map(
            lambda value: cls(value, stream) if isinstance(value, torch.Tensor) else value, result
        )


def tree_leaves(value: Any) -> Iterator[Any]:
    """Yield what lists and tuples hold."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from tree_leaves(item)
    else:
        yield value


@contextmanager
def late_streams() -> Iterator[Callable[..., LateStream]]:
    """Yield what returns the current stream of the device; each thread has its own."""
    streams = threading.local()

    def current_stream(device: object = None) -> LateStream:
        if not hasattr(streams, "current"):
            streams.current = LateStream()
        stream: LateStream = streams.current
        return stream

    with patch.object(torch.cuda, "current_stream", current_stream):
        yield current_stream

"""Refuses the k-th request for memory, threads, files, sockets or disk space by one rank.

The package asks for them through Python functions, which are replaced: calls with a module of the
package on the stack are counted, all others pass. A helper thread counts for the rank whose thread
started it. The refusal is what the system raises. The kernel's "fail-nth" and SQLite's tests of
memory shortage work in the same way.
"""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from unified_ckpt.runtime.torch_state import devices

PACKAGE = "unified_ckpt."
Refusal = Callable[[], BaseException]


def _os_error(code: int) -> Refusal:
    return lambda: OSError(code, os.strerror(code))


def _torch_error() -> RuntimeError:
    text = "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory"
    return RuntimeError(text)


def _thread_error() -> RuntimeError:
    return RuntimeError("can't start new thread")


def _is_not_empty(first: Any, *_: Any, **__: Any) -> bool:
    return not (isinstance(first, int) and first == 0)


def _returns_new_memory(result: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether a method gave a copy: `to` and `contiguous` often give the tensor itself."""
    first = arguments[0]
    if isinstance(result, torch.Tensor):
        return bool(result.untyped_storage().data_ptr() != first.untyped_storage().data_ptr())
    return not (isinstance(first, np.ndarray) and np.shares_memory(result, first))


@dataclass(frozen=True)
class _Request:
    """A function that asks for a resource. `is_counted`: False for calls that ask for none."""

    owner: Any
    name: str
    refusal: Refusal
    is_counted: Callable[..., bool] = lambda *_, **__: True
    after: bool = False  # counted by its result


_EMFILE, _ENOMEM, _ENOBUFS, _ENOSPC = map(
    _os_error, (errno.EMFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)
)
_TORCH = "empty", "empty_like", "zeros", "zeros_like", "ones", "full", "cat", "stack", "tensor"
_NUMPY = "empty", "zeros", "full", "array", "concatenate", "zeros_like", "full_like"
_FILES = "open", "memfd_create", "dup", "pipe", "scandir"
REQUESTS: dict[str, list[_Request]] = {
    "memory": [
        *(_Request(torch, name, _torch_error, _is_not_empty) for name in _TORCH),
        _Request(torch.Tensor, "clone", _torch_error),
        *(
            _Request(torch.Tensor, name, _torch_error, _returns_new_memory, after=True)
            for name in ("contiguous", "to", "cpu")
        ),
        *(_Request(np, name, MemoryError) for name in _NUMPY),
        _Request(np, "ascontiguousarray", MemoryError, _returns_new_memory, after=True),
        _Request(mmap, "mmap", _ENOMEM),
        _Request(devices, "_Mapping", _ENOMEM),
    ],
    "files": [
        *(_Request(os, name, _EMFILE) for name in _FILES),
        _Request(os, "listdir", _EMFILE, lambda path=".": not isinstance(path, int)),
        _Request(builtins, "open", _EMFILE, lambda file, *_, **__: not isinstance(file, int)),
    ],
    "sockets": [
        _Request(socket.socket, "__init__", _EMFILE, lambda *_, fileno=None, **__: fileno is None),
        _Request(socket.socket, "accept", _EMFILE),
        _Request(socket.socket, "connect", _ENOBUFS),
        _Request(socket.socket, "sendall", _ENOBUFS),
        _Request(socket.socket, "recv_into", _ENOBUFS),
    ],
    "threads": [_Request(threading.Thread, "start", _thread_error)],
    "disk": [_Request(os, name, _ENOSPC) for name in ("pwritev", "mkdir", "ftruncate", "rename")],
}
RESOURCES = tuple(REQUESTS)


class _ByteArrayType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.bytearray)


class FailNth:
    """Counts one rank's requests for one resource, and refuses one: see `refusing`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resource, self._rank, self._index, self._lasts = "", 0, -1, False
        self.count = 0
        self.refused = ""  # where the first refusal was

    @contextmanager
    def refusing(self, resource: str, rank: int, index: int, *, lasts: bool) -> Iterator[None]:
        """Refuse request number `index` in the block, from 0; with `lasts`, all later ones too.

        `count` and `refused` stay after it. No request has the index -1.
        """
        with self._lock:
            self._rank, self._index, self._lasts = rank, index, lasts
            self.count, self.refused, self._resource = 0, "", resource
        try:
            yield
        finally:
            self._resource = ""

    def _refuses(self, resource: str, name: str) -> bool:
        if self._resource != resource or rank_of(threading.current_thread()) != self._rank:
            return False
        frame = sys._getframe(2)
        place = ""
        while frame is not None and not place:
            if frame.f_globals.get("__name__", "").startswith(PACKAGE):
                place = f"{frame.f_globals['__name__']}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        if not place:
            return False
        with self._lock:
            number, self.count = self.count, self.count + 1
            refuses = number == self._index or (self._lasts and number > self._index >= 0)
            if refuses and not self.refused:
                self.refused = f"{name} in {place}"
        return refuses

    def _wrap(self, resource: str, request: _Request) -> Callable[..., Any]:
        function = getattr(request.owner, request.name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self._resource != resource:
                return function(*arguments, **options)
            if request.after:
                result = function(*arguments, **options)
                if request.is_counted(result, arguments) and self._refuses(resource, request.name):
                    raise request.refusal()
                return result
            if request.is_counted(*arguments, **options) and self._refuses(resource, request.name):
                raise request.refusal()
            return function(*arguments, **options)

        return call

    @contextmanager
    def installed(self) -> Iterator[FailNth]:
        """Replace the functions in the block."""
        fail_nth = self

        class CountedByteArray(metaclass=_ByteArrayType):
            def __new__(cls, *arguments: Any) -> bytearray:  # type: ignore[misc]
                if fail_nth._refuses("memory", "bytearray"):
                    raise MemoryError
                return builtins.bytearray(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            for resource, requests in REQUESTS.items():
                for request in requests:
                    patch.setattr(request.owner, request.name, self._wrap(resource, request))
            for name, module in list(sys.modules.items()):
                if name.startswith(PACKAGE):
                    patch.setattr(module, "bytearray", CountedByteArray, raising=False)
            start = threading.Thread.start

            def start_for_rank(thread: threading.Thread) -> None:
                thread.rank = rank_of(threading.current_thread())  # type: ignore[attr-defined]
                start(thread)

            patch.setattr(threading.Thread, "start", start_for_rank)
            yield self


def rank_of(thread: threading.Thread) -> int:
    """Return the rank that a thread works for, -1 for none."""
    name, _, number = thread.name.partition("-")
    return int(number) if name == "rank" else getattr(thread, "rank", -1)

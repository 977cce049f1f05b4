"""Limits of what reading untrusted bytes may do: time, memory, and what the interpreter audits.

Readers open files of the checkpoint for reading, and nothing else. Python reports every import,
`exec`, `open`, process and connection to audit hooks, also those that C code starts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 2.0  # of processor time for one small input
NBYTES = 256 << 20  # of memory that one small input may need

_HARMLESS = (  # everything else that is audited is refused
    "array.",
    "builtins.id",
    "code.__new__",
    "cpython._PySys",
    "fcntl.",
    "function.__new__",
    "gc.",
    "glob.",
    "import",
    "marshal.",
    "mmap.",
    "object.__",
    "open",
    "os.listdir",
    "os.scandir",
    "os.walk",
    "pickle.find_class",
    "sys._getframe",
    "sys._current_",
    "sys.monitoring",
    "tempfile.",
    "time.sleep",
)
_state = {"folder": ""}  # empty: nothing is watched


class Escape(BaseException):
    """Reading did what no reader may do. No `except Exception` of the code under test hides it."""


class LimitExceeded(Escape):
    """Reading took too long or too much memory. Imports may have, if it was the first."""


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    folder = _state["folder"]
    if not folder:
        return
    if event == "open":
        path, _, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        allowed = isinstance(path, int) or (not writes and _is_allowed(str(path), folder))
    elif event == "pickle.find_class":
        allowed = str(arguments[0]).partition(".")[0] in {"torch", "collections", "numpy"}
    else:
        allowed = event.startswith(_HARMLESS)
    if allowed or (event != "pickle.find_class" and _in_import()):
        return  # a module may generate and run code, and Python writes what it compiles
    _state["folder"] = ""  # the report itself may import and open
    raise Escape(f"{event} {arguments!r:.200}")


def _is_allowed(path: str, folder: str) -> bool:
    inside = (folder, "/proc/", *map(os.path.realpath, filter(None, sys.path)))
    return os.path.realpath(path).startswith(inside) or path.endswith((".py", ".pyc", ".so"))


def _in_import() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


sys.addaudithook(_audit)


@contextmanager
def guarded(folder: str = os.devnull) -> Iterator[None]:
    """Raise Escape for what no reader may do, LimitExceeded for too much time or memory.

    `folder`: of the checkpoint, from which files may be read.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    seconds, before = time.process_time(), _peak()
    _state["folder"] = os.path.realpath(folder)
    try:
        yield
    finally:
        _state["folder"] = ""
    seconds, grown = time.process_time() - seconds, _peak() - before
    if seconds > SECONDS or grown > NBYTES:
        raise LimitExceeded(f"took {seconds:.1f} s and {grown >> 20} MiB")


def _peak() -> int:
    """Return the most bytes of memory since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

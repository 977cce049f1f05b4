"""Limits of time and memory."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alarm(seconds: float, error: BaseException) -> Iterator[None]:
    """Interrupt what still runs after so long by an error."""

    def interrupt(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_growth(act: Callable[[], object]) -> int:
    """Return how much more memory this process had at the peak of a call than before, in bytes."""

    def status(name: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{name}:")[1].split()[0]) << 10

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the current size
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


_PEAK = """
import sys
import torch
import unified_ckpt as uc

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
"""


def peak_of(program: str, *arguments: object) -> int:
    """Run a program that prints how much `peak()`, its most memory in bytes, has grown."""
    command = [sys.executable, "-c", _PEAK + program, *map(str, arguments)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

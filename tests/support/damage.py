"""Damages files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def flip(file: Path, at: float = 0.9, *, mask: int = 1) -> None:
    """Flip the bits of `mask` in one byte.

    `at`: the byte's offset, from the end if negative; a float: a fraction of the file's size.
    """
    body = bytearray(file.read_bytes())
    body[int(len(body) * at) if isinstance(at, float) else at] ^= mask
    file.write_bytes(body)


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 9)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "short": shorten,
    "missing": Path.unlink,
    "header": lambda file: flip(file, 20),
}

"""Which files this process has open or mapped, how much it reads, and files that are replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def open_files(root: Path) -> list[str]:
    """Return the files below `root` that this process has open."""
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    targets = [str(link.readlink()) for link in links if link.is_symlink()]
    return [target for target in targets if target.startswith(str(root))]


def mapped_nbytes(root: Path) -> int:
    """Return how much of the files below `root` this process has mapped and touched."""
    if str(root) not in Path("/proc/self/maps").read_text():  # smaps is far slower
        return 0
    total, is_below = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_below = str(root) in line
        elif is_below and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def write_in_pages(path: Path) -> None:
    """Write a file again so that the kernel keeps single pages of it: it maps kept blocks whole."""
    body, backup = path.read_bytes(), path.with_name("aside")
    with backup.open("wb", buffering=0) as file:
        for low in range(0, len(body), 4096):
            file.write(body[low : low + 4096])
    backup.replace(path)


def nbytes_of_calls() -> int:
    """Return what all threads have read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


@contextmanager
def replaced(path: Path, body: bytes | Callable[[Path], object] | None) -> Iterator[None]:
    """Replace a file, also by what a function makes, or remove it. Mappings of the old one stay
    as they are.
    """
    backup = path.with_name("aside")
    path.rename(backup)
    try:
        if callable(body):
            body(path)
        elif body is not None:
            path.write_bytes(body)
        yield
    finally:
        backup.replace(path)

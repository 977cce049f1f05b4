"""Measures how fast a folder's disk takes bytes: a short write and fsync that leaves nothing."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.storage.directory import existing_folder

_CHUNK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DiskSample:
    """One measured write: bytes and seconds to write and sync them. `free_nbytes` before it."""

    nbytes: int
    seconds: float
    free_nbytes: int


def measure_disk(folder: str, nbytes: int) -> DiskSample:
    """Write `nbytes` of random bytes, at most a tenth of the free space, and sync them.

    `folder`: need not exist; its nearest existing parent is measured. The file has no name or
    loses it at once, so that nothing remains even if the process is killed. StorageError if the
    folder is not writable.
    """
    folder = existing_folder(folder)
    chunk = os.urandom(_CHUNK_NBYTES)
    try:
        stats = os.statvfs(folder)
        free_nbytes = stats.f_bavail * stats.f_frsize
        remaining = nbytes = min(nbytes, free_nbytes // 10)
        with tempfile.TemporaryFile(dir=folder, prefix=".unified-speed-", buffering=0) as file:
            started = time.monotonic()
            while remaining > 0:
                remaining -= file.write(chunk[:remaining])
            os.fsync(file.fileno())
            seconds = time.monotonic() - started
    except OSError as error:
        raise StorageError(
            f"{folder}: its speed cannot be measured: {error.strerror or error}; "
            "pass a writable folder"
        ) from error
    return DiskSample(nbytes, seconds, free_nbytes)

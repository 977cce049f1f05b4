"""Read stored tensors for a load: from their files where they lie plainly, else by the Source.

Ranks read parts of blocks, so the load compares digests itself where it reads files (`verify.py`).
Bytes that come from the Source are verified there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Location, Source
from unified_ckpt.engine.source.verified_read import check_digest_count
from unified_ckpt.runtime.storage.protocol import Buffer, Reader, ReadRange
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.threads import lane_count


class LocatedTensor(NamedTuple):
    """A tensor to read. `block_crcs`: the digests that the load compares, if any.

    `location` is in a file of the source if `in_file`, else a label for errors. A tuple, as there
    is one for each tensor.
    """

    key: Key
    location: Location
    in_file: bool
    block_crcs: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Bytes [start, stop) of a tensor, or beyond its end, that are read `into` memory, if known."""

    tensor: LocatedTensor
    start: int
    stop: int
    into: Buffer | None = None


class TensorReader:
    """Reads tensors of a Source. Sends a heartbeat after each read, for ranks that wait.

    Thread-safe: threads read files of a folder at once, and take turns at the Source.
    """

    def __init__(self, source: Source, storage: Reader | None, heartbeat: Callable[[], None]):
        self._source, self._storage, self._heartbeat = source, storage, heartbeat
        self._lock = threading.Lock()

    def lane_count(self, *, ranks: int) -> int:
        """Return how many lanes may read. `ranks`: those of this node.

        A bucket reads ahead itself, in the order that `expecting` announces.
        """
        return lane_count(ranks=ranks) if isinstance(self._storage, LocalStorage) else 1

    @contextmanager
    def expecting(self, reads: Iterable[TensorRange]) -> Iterator[None]:
        """Hint at what the block will read, in this order. Fills no memory after it."""
        if self._storage is None:
            yield
            return
        self._storage.expect(self._file_ranges(reads))
        try:
            yield
        finally:
            self._storage.expect(())

    def _file_ranges(self, reads: Iterable[TensorRange]) -> Iterator[ReadRange]:
        for in_file, group in groupby(reads, key=lambda read: read.tensor.in_file):
            if not in_file:
                yield from self._source.file_ranges(
                    (read.tensor.key, read.start, read.stop) for read in group
                )
                continue
            for read in group:
                location = read.tensor.location
                start, stop = location.start + read.start, location.start + read.stop
                yield ReadRange(location.file, start, stop, read.into)

    def read_into(self, tensor: LocatedTensor, start: int, buffer: Buffer) -> None:
        """Fill `buffer` with bytes from byte `start`; in a file, also beyond the tensor's end."""
        if self._storage is not None and tensor.in_file:
            location = tensor.location
            self._storage.read_at(location.file, location.start + start, buffer)
        else:
            with self._lock:
                self._source.read_into(tensor.key, start, buffer)
        self._heartbeat()


def locate_tensors(
    source: Source, nbytes_by_key: dict[Key, int], *, verify: bool
) -> tuple[dict[Key, LocatedTensor], Reader | None]:
    """Return the tensors to read and the storage of those that lie plainly in files.

    IntegrityError or FormatError if digests are incomplete or of an unknown kind.
    """
    locations = source.locations(nbytes_by_key.keys())
    by_key = locations.by_key if locations is not None else {}
    block_crcs = source.block_digests(by_key.keys()) if verify else {}
    for key, saved in block_crcs.items():
        if saved is not None:
            check_digest_count(key, saved, nbytes_by_key[key])
    tensors = {
        key: LocatedTensor(
            key,
            by_key[key] if key in by_key else Location(":".join(key), 0),
            key in by_key,
            block_crcs.get(key),
        )
        for key in nbytes_by_key
    }
    return tensors, locations.storage if locations is not None else None

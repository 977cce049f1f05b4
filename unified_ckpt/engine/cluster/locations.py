"""Locations and digests of one folder's tensors, in about 40 bytes per tensor.

A rank that loads a save of thousands of nodes may read every folder, tensor by tensor, so it
keeps this until the end. Parsed headers would take more than a kilobyte per tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.source.protocol import Location
from unified_ckpt.errors import CheckpointError
from unified_ckpt.runtime.storage.protocol import Reader

_HASH_NBYTES = 8


class LocationTable:
    """Locations of the tensors `keys`, by stored part and name. Keeps only the folder's storage."""

    def __init__(self, storage: Reader, keys: Collection[Key]) -> None:
        self.storage = storage
        distinct = set(keys)
        self._salt = 0
        while len(hashes := {self._hash(key) for key in distinct}) < len(distinct):
            self._salt += 1  # hashes replace the names, so they must be distinct
        # [tensors]; the row order of all arrays.
        self._hashes = np.sort(np.fromiter(hashes, np.uint64, len(hashes)))
        self._starts = np.full(len(hashes), -1, np.int64)  # -1: not loaded
        self._files = np.zeros(len(hashes), np.int32)
        self._file_names: list[str] = []
        self._incomplete_files: set[str] = set()  # their tensors are located one by one
        self._digests: _DigestTable | CheckpointError | None = None

    def _hash(self, key: Key) -> int:
        part, name = key
        text = f"{self._salt} {len(part)} {part}{name}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=_HASH_NBYTES).digest(), "little")

    def _row(self, key: Key) -> int:
        key_hash = np.uint64(self._hash(key))
        row = int(np.searchsorted(self._hashes, key_hash))
        if row == len(self._hashes) or self._hashes[row] != key_hash:
            raise KeyError(key)
        return row

    def location(self, key: Key) -> Location | None:
        """Return a tensor's location, or None if it is not loaded yet."""
        row = self._row(key)
        start = int(self._starts[row])
        return Location(self._file_names[self._files[row]], start) if start >= 0 else None

    def load_locations(
        self, folder: Folder, keys: Callable[[], Collection[Key]], key: Key
    ) -> Location:
        """Load and return a tensor's location, with those of all `keys` in the same file.

        Raises only the error of the requested tensor.
        """
        file = folder.file_of(*key)
        file_keys = [key]
        if file not in self._incomplete_files:
            file_keys = [file_key for file_key in keys() if folder.file_of(*file_key) == file]
        try:
            locations = folder.locations(file_keys).by_key
        except CheckpointError:
            self._incomplete_files.add(file)
            locations = folder.locations([key]).by_key  # perhaps another tensor is missing
        if file not in self._file_names:
            self._file_names.append(file)
        for file_key, location in locations.items():
            row = self._row(file_key)
            self._files[row], self._starts[row] = self._file_names.index(file), location.start
        return locations[key]

    def load_digests(self, folder: Folder, keys: Collection[Key]) -> None:
        """Read all digests at once: a request to a peer costs more than the bytes."""
        try:
            self._digests = _DigestTable(
                folder.block_digests(keys), {key: self._row(key) for key in keys}
            )
        except CheckpointError as error:
            self._digests = error

    def digests(self, key: Key) -> npt.NDArray[np.uint64] | None:
        """Return a tensor's digests, or None if the folder has none.

        Call `load_digests` first; its error is raised here, each time.
        """
        if isinstance(self._digests, CheckpointError):
            raise type(self._digests)(str(self._digests))
        return self._digests.row_digests(self._row(key)) if self._digests is not None else None


class _DigestTable:
    """Digests of all tensors in one array. `rows`: the row of each tensor."""

    def __init__(
        self, digests_by_key: Mapping[Key, Sequence[int] | None], rows: Mapping[Key, int]
    ) -> None:
        crcs_by_row = [digests_by_key[key] for key in sorted(rows, key=rows.__getitem__)]
        counts = (-1 if crcs is None else len(crcs) for crcs in crcs_by_row)  # -1: no digests
        self._counts = np.fromiter(counts, np.int64)
        self._ends = np.cumsum(np.maximum(self._counts, 0))
        present = (crcs for crcs in crcs_by_row if crcs is not None)
        self._crcs = np.fromiter(chain.from_iterable(present), np.uint64)

    def row_digests(self, row: int) -> npt.NDArray[np.uint64] | None:
        count, end = int(self._counts[row]), int(self._ends[row])
        return self._crcs[end - count : end] if count >= 0 else None

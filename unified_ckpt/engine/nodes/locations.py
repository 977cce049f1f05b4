"""Where the tensors of one folder lie and what their digests are, in some 40 bytes for each.

Of a save of thousands of machines a rank may read each tensor out of all their folders, tensor by tensor: what it knows of a folder has to
stay until the last, and headers as they are parsed take more than a kilobyte for each tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Catalog, Location
from unified_ckpt.errors import CheckpointError
from unified_ckpt.runtime.storage.storage import Reader

_MARK_NBYTES = 8


class Stock(Protocol):
    """What reading needs of a folder."""

    @property
    def storage(self) -> Reader: ...

    def file_of(self, part: str, name: str) -> str: ...

    def catalog(self, wanted: Collection[Key]) -> Catalog: ...

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]: ...


class Places:
    """Of the tensors `keys`, by the folder's own parts and names. Keeps the folder's storage, and nothing else of the folder."""

    def __init__(self, storage: Reader, keys: Collection[Key]) -> None:
        self.storage = storage
        distinct = set(keys)
        self._salt = 0
        while len(marks := {self._mark(key) for key in distinct}) < len(distinct):
            self._salt += 1  # no two may share a mark, which stands for the name
        self._marks = np.sort(
            np.fromiter(marks, np.uint64, len(marks))
        )  # [tensors], the order of all that follows
        self._starts = np.full(len(marks), -1, np.int64)  # -1: not looked up yet
        self._files = np.zeros(len(marks), np.int32)
        self._file_names: list[str] = []
        self._spoilt: set[str] = set()  # files of which not all is there: looked up one by one
        self._digests: _Digests | CheckpointError | None = None

    def _mark(self, key: Key) -> int:
        part, name = key
        words = f"{self._salt} {len(part)} {part}{name}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(words, digest_size=_MARK_NBYTES).digest(), "little")

    def _number(self, key: Key) -> int:
        mark = np.uint64(self._mark(key))
        number = int(np.searchsorted(self._marks, mark))
        if number == len(self._marks) or self._marks[number] != mark:
            raise KeyError(key)
        return number

    def location(self, key: Key) -> Location | None:
        """None where it has not been looked up yet."""
        number = self._number(key)
        start = int(self._starts[number])
        return Location(self._file_names[self._files[number]], start) if start >= 0 else None

    def look_up(self, folder: Stock, keys: Callable[[], Collection[Key]], key: Key) -> Location:
        """The same, and of all `keys` in that file, whose header is read. Raises what is wrong with this one."""
        file = folder.file_of(*key)
        mates = (
            [key]
            if file in self._spoilt
            else [one for one in keys() if folder.file_of(*one) == file]
        )
        try:
            found = folder.catalog(mates).locations
        except CheckpointError:
            self._spoilt.add(file)
            found = folder.catalog([key]).locations  # another one may be what is not there
        if file not in self._file_names:
            self._file_names.append(file)
        for one, location in found.items():
            number = self._number(one)
            self._files[number], self._starts[number] = self._file_names.index(file), location.start
        return found[key]

    @property
    def asked(self) -> bool:
        """Whether `prove` has been called."""
        return self._digests is not None

    def prove(self, folder: Stock, keys: Collection[Key]) -> None:
        """Reads all digests at once: a request to a peer costs more than bytes do."""
        try:
            self._digests = _Digests(
                folder.block_digests(keys), {key: self._number(key) for key in keys}
            )
        except CheckpointError as error:
            self._digests = error

    def digests(self, key: Key) -> npt.NDArray[np.uint64] | None:
        """Of each block, once `prove` has been called; None where the folder has none. Raises the error that it met, each time."""
        if isinstance(self._digests, CheckpointError):
            raise type(self._digests)(str(self._digests))
        return self._digests.of(self._number(key)) if self._digests is not None else None


class _Digests:
    """One after the other. `numbers`: which tensor is which, counted from 0."""

    def __init__(
        self, found: Mapping[Key, Sequence[int] | None], numbers: Mapping[Key, int]
    ) -> None:
        self._counts = np.full(len(numbers), -1, np.int64)  # -1: there are none
        for key, number in numbers.items():
            words = found[key]
            self._counts[number] = -1 if words is None else len(words)
        self._ends = np.cumsum(np.maximum(self._counts, 0))
        self._words = np.empty(int(self._ends[-1]) if len(self._ends) else 0, np.uint64)
        for key, number in numbers.items():
            words = found[key]
            if words is not None:
                self._words[self._ends[number] - len(words) : self._ends[number]] = words

    def of(self, number: int) -> npt.NDArray[np.uint64] | None:
        count, end = int(self._counts[number]), int(self._ends[number])
        return self._words[end - count : end] if count >= 0 else None

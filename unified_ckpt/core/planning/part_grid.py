"""The parts of a group's files in a bucket, and how their bytes follow from tensors.

A file in a bucket is an upload of parts. All parts of a save have one size, but the last of a file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from unified_ckpt.core.planning.part_segments import (
    Numbers,
    SegmentTable,
    replica_origins,
    segment_table,
)
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding

_LARGEST_PART_NBYTES = 64 << 20  # a rank holds a few of them in memory
_MAX_PARTS = 100_000  # of a save: requests cost money, and stores limit their rate
_MAX_FILE_PARTS = 10_000  # of an upload, in S3 and GCS


def choose_part_nbytes(file_sizes: Sequence[int], *, smallest: int) -> int:
    """Return the smallest part size, a power of two, that keeps the number of parts low.

    Small parts balance ranks better and cross fewer nodes. `file_sizes`: of all files of the save;
    they may be short of their headers. Memory bounds a part before the number of parts does.
    """
    nbytes = smallest
    while nbytes < _LARGEST_PART_NBYTES:
        counts = [size // nbytes + 2 for size in file_sizes]
        if sum(counts) <= _MAX_PARTS and max(counts, default=0) <= _MAX_FILE_PARTS:
            break
        nbytes *= 2
    return nbytes


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """How the bytes of a stored tensor follow from those of the declaration it stores.

    Each `unit_nbytes` of it store `source_nbytes` of the declaration: a byte, or an encoded row.
    `is_model`: it is the model beside an encoded master; two of its bytes for four of the master.
    """

    decl_index: int
    unit_nbytes: int = 1
    source_nbytes: int = 1
    is_model: bool = False

    def to_source(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes of the declaration that bytes [start, stop) need: whole units."""
        unit, source = self.unit_nbytes, self.source_nbytes
        return start // unit * source, -(-stop // unit) * source

    def from_source(self, start: int) -> int:
        """Return the byte that stores the first byte of a unit of the declaration."""
        return start // self.source_nbytes * self.unit_nbytes


@dataclass(frozen=True, slots=True)
class PartedFile:
    """One file: its size, that of its header, and its tensors in the order of their bytes.

    `stored_indices`: of the group's stored tensors; `starts`: the first byte of each.
    """

    header_nbytes: int
    nbytes: int
    stored_indices: tuple[int, ...]
    starts: tuple[int, ...]

    def stored_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the tensors of bytes [start, stop) as (stored index, first, last byte in it)."""
        number = max(bisect_right(self.starts, start) - 1, 0)
        while number < len(self.starts) and self.starts[number] < stop:
            first = self.starts[number]
            end = self.starts[number + 1] if number + 1 < len(self.starts) else self.nbytes
            low, high = max(start, first), min(stop, end)
            if low < high:
                yield self.stored_indices[number], low - first, high - first
            number += 1


@dataclass(frozen=True)
class GroupParts:
    """The parts of a group's files, in the order of the files. `holders`: ascending.

    `stored`: by index of the stored tensor. `part_nbytes`: of all parts but the last of a file.
    """

    decls: Sequence[TensorDecl]
    stored: Sequence[StoredBytes]
    files: Sequence[PartedFile]
    holders: tuple[int, ...]
    part_nbytes: int
    _replicas: dict[Sharding, Numbers] = field(default_factory=dict, compare=False, repr=False)
    _origins: dict[Sharding, Numbers] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def first_parts(self) -> list[int]:
        """The index of the first part of each file, and at last the number of parts."""
        counts = (-(-file.nbytes // self.part_nbytes) for file in self.files)
        return list(np.cumsum([0, *counts]).tolist())

    def part_range(self, index: int) -> tuple[PartedFile, int, int]:
        """Return the file of a part and its bytes [start, stop) there."""
        number = bisect_right(self.first_parts, index) - 1
        file, start = self.files[number], (index - self.first_parts[number]) * self.part_nbytes
        return file, start, min(start + self.part_nbytes, file.nbytes)

    def segments_of(self, stored_index: int) -> SegmentTable:
        """Return the segments of the declaration that a stored tensor stores."""
        return segment_table(self.decls[self.stored[stored_index].decl_index])

    def replicas(self, sharding: Sharding) -> Numbers:
        """Return the replica of each holder: the position of its first shard."""
        if sharding not in self._replicas:
            positions = np.array([sharding.position(rank) for rank in self.holders], np.int64)
            self._replicas[sharding] = replica_origins(sharding, positions)
        return self._replicas[sharding]

    def source_replica(self, decl_index: int) -> int:
        """Return the replica that gives all of a tensor's bytes.

        Replicas give tensors that follow each other in the files, so that few parts have several.
        """
        sharding = self.decls[decl_index].sharding
        if sharding not in self._origins:
            self._origins[sharding] = np.unique(self.replicas(sharding))
        origins = self._origins[sharding]
        return int(origins[int(self._middles.get(decl_index, 0) * len(origins))])

    @cached_property
    def _middles(self) -> dict[int, float]:
        """Where the middle of a tensor is in all files, from 0 to 1; by index of the declaration.

        Of a tensor that several stored tensors store, the first one counts.
        """
        middles, offset, total = dict[int, float](), 0, sum(file.nbytes for file in self.files)
        for file in self.files:
            for index, (start, stop) in zip(
                file.stored_indices, pairwise((*file.starts, file.nbytes)), strict=True
            ):
                middle = (offset + (start + stop) / 2) / total
                middles.setdefault(self.stored[index].decl_index, middle)
            offset += file.nbytes
        return middles

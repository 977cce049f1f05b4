"""Parses mesh coordinates in rank file names, such as `optimizer.tp00_pp01_shard00.pdopt`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import IncompleteError

_DIMS = ("tp", "pp", "shard", "moe")


@dataclass(frozen=True, slots=True)
class RankFile:
    """A rank's file. `coordinates` has the mesh dims that the name contains."""

    file: str
    coordinates: Mapping[str, int]

    @property
    def tp_rank(self) -> int:
        """Return the tensor-parallel rank."""
        return self.coordinates.get("tp", 0)

    def along(self, dims: Collection[str]) -> tuple[int, ...]:
        """Return the coordinates along `dims`; dims that the name lacks are 0."""
        return tuple(self.coordinates.get(dim, 0) for dim in dims)


def is_sharded(files: Collection[RankFile]) -> bool:
    """Return whether each rank has the state of some parameters only.

    A missing file then leaves no gap except in those parameters.
    """
    return any("shard" in rank_file.coordinates for rank_file in files)


def rank_files(root: str, entries: Collection[str], stem: str, ending: str) -> list[RankFile]:
    """Return the rank files of one kind, or the single file without coordinates.

    Raises IncompleteError naming the files that are missing in the grid of coordinates.
    """
    pattern = re.compile(rf"{stem}((?:[._](?:{'|'.join(_DIMS)})\d+)*)\.{ending}")
    files = [
        RankFile(
            entry, {dim: int(number) for dim, number in re.findall(r"([a-z]+)(\d+)", match[1])}
        )
        for entry in sorted(entries)
        if (match := pattern.fullmatch(entry))
    ]
    dims = [dim for dim in _DIMS if any(dim in rank_file.coordinates for rank_file in files)]
    sizes = [1 + max(rank_file.coordinates.get(dim, 0) for rank_file in files) for dim in dims]
    present = {rank_file.along(dims) for rank_file in files}
    if files and len(present) < prod(sizes):
        expected = [
            dict(zip(dims, indices, strict=True)) for indices in product(*map(range, sizes))
        ]
        missing = [
            f"{stem}.{'_'.join(f'{dim}{number:02d}' for dim, number in rank.items())}.{ending}"
            for rank in expected
            if tuple(rank.values()) not in present
        ]
        raise IncompleteError(format_list(f"{root}: files of some ranks are missing", missing))
    return files

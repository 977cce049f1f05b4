"""Files that PaddleNLP's ranks left, by where the rank stood in the mesh: `optimizer.tp00_pp01_shard00.pdopt`. Names only."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from unified_ckpt.core.text import listed
from unified_ckpt.errors import IncompleteError

_DIMS = ("tp", "pp", "shard", "moe")


@dataclass(frozen=True, slots=True)
class RankFile:
    """`at`: by dim of the mesh, those that the name has."""

    file: str
    at: Mapping[str, int]

    def within(self, dims: Collection[str]) -> tuple[int, ...]:
        return tuple(self.at.get(dim, 0) for dim in dims)


def is_spread(files: Collection[RankFile]) -> bool:
    """Whether ranks have the state of some parameters each (sharding): a file that is missing then leaves no gap but in those."""
    return any("shard" in one.at for one in files)


def rank_files(root: str, entries: Collection[str], stem: str, ending: str) -> list[RankFile]:
    """The ranks' files of one kind, or the one file without a rank. IncompleteError naming those that the others' numbers need."""
    pattern = re.compile(rf"{stem}((?:[._](?:{'|'.join(_DIMS)})\d+)*)\.{ending}")
    found = [
        RankFile(entry, _numbers(match[1]))
        for entry in sorted(entries)
        if (match := pattern.fullmatch(entry))
    ]
    dims = [dim for dim in _DIMS if any(dim in one.at for one in found)]
    sizes = [1 + max(one.at.get(dim, 0) for one in found) for dim in dims]
    have = {one.within(dims) for one in found}
    if found and len(have) < prod(sizes):
        needed = [dict(zip(dims, place, strict=True)) for place in product(*map(range, sizes))]
        lost = [_file(stem, at, ending) for at in needed if tuple(at.values()) not in have]
        raise IncompleteError(listed(f"{root}: files of some ranks are missing", lost))
    return found


def _numbers(name: str) -> dict[str, int]:
    return {dim: int(number) for dim, number in re.findall(r"([a-z]+)(\d+)", name)}


def _file(stem: str, at: Mapping[str, int], ending: str) -> str:
    return f"{stem}.{'_'.join(f'{dim}{number:02d}' for dim, number in at.items())}.{ending}"

"""Who writes which bytes of which file at a save. Pure: the same answer on every rank that asks.

What could go wrong here and lose bytes: two writers of one byte, none, or a border that two ranks compute apart. So everything is
a function of the group's rows, holders and files, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.planning.exchange import Exchange, Moves, largest_line, moves
from unified_ckpt.core.planning.file_layout import split_files
from unified_ckpt.core.planning.io_assignment import divide
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import Row
from unified_ckpt.core.sharding.dtypes import DTYPE_ORDER

TILE_NBYTES = (
    16 << 20
)  # of each of the two tiles of a window: large enough to write well, small beside the state
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a group. `rows` count in the group's rows; `writer` writes the header and the small tensors."""

    part: str
    number: int  # within the group and part, from 0
    rows: tuple[int, ...]
    writer: int


def plan_files(
    rows: Sequence[Row], *, holders: Sequence[int], max_file_bytes: int
) -> list[FilePlan]:
    """The files of a group, part by part, with header writers spread evenly over the holders."""
    parts: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        parts.setdefault(row.part, []).append(number)
    cut = [
        (part, i, tuple(numbers[j] for j in span))
        for part, numbers in sorted(parts.items())
        for i, span in enumerate(
            split_files([rows[n].spec.nbytes for n in numbers], max_file_bytes=max_file_bytes)
        )
    ]
    return [
        FilePlan(part, i, members, holders[k * len(holders) // len(cut)])
        for k, (part, i, members) in enumerate(cut)
    ]


def plan_moves(
    rows: Sequence[Row],
    *,
    holders: Sequence[int],
    files: Sequence[FilePlan],
    header_nbytes: Mapping[int, int],
    rank: int,
) -> tuple[Moves, int]:
    """What `rank` writes of the group, and the bytes of a tile. `header_nbytes`: by position in `files`."""
    small = {
        n: f.writer
        for f in files
        for n in in_file_order(rows, f.rows)
        if rows[n].spec.nbytes < SMALL_NBYTES
    }
    fixed: dict[int, int] = {}
    for position, file in enumerate(files):
        fixed[file.writer] = fixed.get(file.writer, 0) + header_nbytes[position]
    for number, writer in small.items():
        fixed[writer] = fixed.get(writer, 0) + rows[number].spec.nbytes
    return share(rows, holders=holders, fixed=fixed, small=small, sparse=(), every=False, rank=rank)


def in_file_order(rows: Sequence[Row], numbers: Iterable[int]) -> list[int]:
    """Rows of one part, which come sorted by name, as a file has them: neighbours there are written and read by one call."""
    return sorted(numbers, key=lambda n: DTYPE_ORDER[rows[n].spec.dtype])


def share(
    rows: Sequence[Row],
    *,
    holders: Sequence[int],
    fixed: Mapping[int, int],
    small: Mapping[int, int],
    sparse: Collection[int],
    every: bool,
    rank: int,
) -> tuple[Moves, int]:
    """`rank`'s moves, and the bytes of a tile. `every`, `small`: see `Exchange`; `sparse`: see `divide`."""
    division = divide(rows, holders=holders, fixed=fixed, sparse=sparse)
    tile_nbytes = -(-max(TILE_NBYTES, largest_line(division)) // _ALIGN) * _ALIGN
    return moves(Exchange(division, tuple(holders), small, every, tile_nbytes), rank), tile_nbytes

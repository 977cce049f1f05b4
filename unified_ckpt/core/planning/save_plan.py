"""Who writes which bytes of which file at a save. Pure: the same answer on every rank that asks.

What could go wrong here and lose bytes: two writers of one byte, none, or a border that two ranks
compute apart. So everything is a function of the group's rows, holders and files, and of nothing
else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.planning.exchange import Exchange, RankIO, largest_slab, plan_rank_io
from unified_ckpt.core.planning.file_layout import split_files
from unified_ckpt.core.planning.io_assignment import assign_io
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import DTYPE_ORDER

TILE_NBYTES = (
    16 << 20
)  # of each of the two tiles of a window: large enough to write well, small beside the state
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a group. `decl_indices` count in the group's rows; `writer` writes the header and
    the small tensors.
    """

    part: str
    number: int  # within the group and part, from 0
    decl_indices: tuple[int, ...]
    writer: int


def plan_files(
    decls: Sequence[TensorDecl], *, holders: Sequence[int], max_file_bytes: int
) -> list[FilePlan]:
    """The files of a group, part by part, with header writers spread evenly over the holders."""
    parts: dict[str, list[int]] = {}
    for decl_index, decl in enumerate(decls):
        parts.setdefault(decl.part, []).append(decl_index)
    files = [
        (part, i, tuple(indices[j] for j in span))
        for part, indices in sorted(parts.items())
        for i, span in enumerate(
            split_files([decls[n].spec.nbytes for n in indices], max_file_bytes=max_file_bytes)
        )
    ]
    return [
        FilePlan(part, i, file_indices, holders[k * len(holders) // len(files)])
        for k, (part, i, file_indices) in enumerate(files)
    ]


def plan_writes(
    decls: Sequence[TensorDecl],
    *,
    holders: Sequence[int],
    files: Sequence[FilePlan],
    header_nbytes: Mapping[int, int],
    rank: int,
) -> tuple[RankIO, int]:
    """What `rank` writes of the group, and the bytes of a tile. `header_nbytes`: by position in
    `files`.
    """
    small_io_ranks = {
        n: f.writer
        for f in files
        for n in in_file_order(decls, f.decl_indices)
        if decls[n].spec.nbytes < SMALL_NBYTES
    }
    fixed_nbytes: dict[int, int] = {}
    for position, file in enumerate(files):
        fixed_nbytes[file.writer] = fixed_nbytes.get(file.writer, 0) + header_nbytes[position]
    for decl_index, writer in small_io_ranks.items():
        fixed_nbytes[writer] = fixed_nbytes.get(writer, 0) + decls[decl_index].spec.nbytes
    return plan_io(
        decls,
        holders=holders,
        fixed_nbytes=fixed_nbytes,
        small_io_ranks=small_io_ranks,
        sparse=(),
        all_replicas=False,
        rank=rank,
    )


def in_file_order(decls: Sequence[TensorDecl], decl_indices: Iterable[int]) -> list[int]:
    """Rows of one part, which come sorted by name, as a file has them: neighbours there are written
    and read by one call.
    """
    return sorted(decl_indices, key=lambda n: DTYPE_ORDER[decls[n].spec.dtype])


def plan_io(
    decls: Sequence[TensorDecl],
    *,
    holders: Sequence[int],
    fixed_nbytes: Mapping[int, int],
    small_io_ranks: Mapping[int, int],
    sparse: Collection[int],
    all_replicas: bool,
    rank: int,
) -> tuple[RankIO, int]:
    """`rank`'s moves, and the bytes of a tile. `all_replicas`, `small_io_ranks`: see `Exchange`;
    `sparse`: see
    `divide`.
    """
    assignment = assign_io(decls, holders=holders, fixed_nbytes=fixed_nbytes, sparse=sparse)
    tile_nbytes = -(-max(TILE_NBYTES, largest_slab(assignment)) // _ALIGN) * _ALIGN
    return plan_rank_io(
        Exchange(assignment, tuple(holders), small_io_ranks, all_replicas, tile_nbytes), rank
    ), tile_nbytes

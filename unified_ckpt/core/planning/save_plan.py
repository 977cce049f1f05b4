"""Plans which rank writes which bytes of which file at a save; every rank computes the same plan.

Bytes would be lost if one had two writers or none, or if two ranks computed a border differently.
Everything is therefore a function of the group's declarations, holders and files only.
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

TILE_NBYTES = 16 << 20  # of each of a tile buffer's two tiles: large writes, little memory
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a holder group.

    `decl_indices`: in the group's declarations. `writer`: the rank that writes the header and the
    small tensors.
    """

    part: str
    number: int  # within the group and part, from 0
    decl_indices: tuple[int, ...]
    writer: int


def plan_files(
    decls: Sequence[TensorDecl], *, holders: Sequence[int], max_file_bytes: int
) -> list[FilePlan]:
    """Divide a group's tensors into files, by part, with writers evenly spread over the holders."""
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
    """Return what `rank` writes of the group, and the bytes of a tile.

    `header_nbytes`: by position in `files`.
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
    exchange = plan_exchange(
        decls,
        holders=holders,
        fixed_nbytes=fixed_nbytes,
        small_io_ranks=small_io_ranks,
        sparse=(),
        all_replicas=False,
    )
    return plan_rank_io(exchange, rank), exchange.tile_nbytes


def in_file_order(decls: Sequence[TensorDecl], decl_indices: Iterable[int]) -> list[int]:
    """Sort declarations of one part, which are sorted by name, into the order of a file.

    Neighbours in a file are written and read with one call.
    """
    return sorted(decl_indices, key=lambda n: DTYPE_ORDER[decls[n].spec.dtype])


def plan_exchange(
    decls: Sequence[TensorDecl],
    *,
    holders: Sequence[int],
    fixed_nbytes: Mapping[int, int],
    small_io_ranks: Mapping[int, int],
    sparse: Collection[int],
    all_replicas: bool,
) -> Exchange:
    """Plan the exchange of a group; `small_io_ranks` and `all_replicas` as in `Exchange`.

    `fixed_nbytes`: bytes by rank beside the tensors. `sparse`: as in `assign_io`.
    """
    loads = dict(fixed_nbytes)
    for decl_index, io_rank in small_io_ranks.items():
        loads[io_rank] = loads.get(io_rank, 0) + decls[decl_index].spec.nbytes
    assignment = assign_io(decls, holders=holders, fixed_nbytes=loads, sparse=sparse)
    tile_nbytes = -(-max(TILE_NBYTES, largest_slab(assignment)) // _ALIGN) * _ALIGN
    return Exchange(assignment, tuple(holders), small_io_ranks, all_replicas, tile_nbytes)

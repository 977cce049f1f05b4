"""Plans which rank writes which bytes of which file at a save; every rank computes the same plan.

Bytes would be lost if one had two writers or none, or if two ranks computed a border differently.
Everything is therefore a function of the group's declarations, holders and files only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.planning.exchange import (
    RankIO,
    in_file_order,
    plan_exchange,
    plan_rank_io,
)
from unified_ckpt.core.planning.file_layout import split_files
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import TensorDecl


@dataclass(frozen=True, slots=True)
class FileContents:
    """One file of a holder group.

    `decl_indices`: in the group's declarations. `io_rank`: the rank that writes the header and
    the small tensors.
    """

    part: str
    number: int  # within the group and part, from 0
    decl_indices: tuple[int, ...]
    io_rank: int


def plan_files(
    decls: Sequence[TensorDecl],
    stored_nbytes: Sequence[int],
    *,
    holders: Sequence[int],
    max_file_bytes: int,
) -> list[FileContents]:
    """Divide a group's tensors into files, by part, with io_ranks evenly spread over holders.

    `stored_nbytes`: what a file stores of each tensor.
    """
    parts: dict[str, list[int]] = {}
    for decl_index, decl in enumerate(decls):
        parts.setdefault(decl.part, []).append(decl_index)
    files = [
        (part, i, tuple(indices[j] for j in span))
        for part, indices in sorted(parts.items())
        for i, span in enumerate(
            split_files([stored_nbytes[n] for n in indices], max_file_bytes=max_file_bytes)
        )
    ]
    return [
        FileContents(part, i, file_indices, holders[k * len(holders) // len(files)])
        for k, (part, i, file_indices) in enumerate(files)
    ]


def plan_writes(
    decls: Sequence[TensorDecl],
    *,
    holders: Sequence[int],
    files: Sequence[FileContents],
    header_nbytes: Mapping[int, int],
    rank: int,
) -> RankIO:
    """Return what `rank` writes of the group.

    `header_nbytes`: by position in `files`.
    """
    small_io_ranks = {
        n: f.io_rank
        for f in files
        for n in in_file_order(decls, f.decl_indices)
        if decls[n].spec.nbytes < SMALL_NBYTES
    }
    header_nbytes_by_rank = Counter[int]()
    for position, file in enumerate(files):
        header_nbytes_by_rank[file.io_rank] += header_nbytes[position]
    exchange = plan_exchange(
        decls,
        holders=holders,
        header_nbytes_by_rank=header_nbytes_by_rank,
        small_io_ranks=small_io_ranks,
        unexchanged=(),
        is_read=False,
    )
    return plan_rank_io(exchange, rank)

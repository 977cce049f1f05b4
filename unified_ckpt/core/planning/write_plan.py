"""Plans which rank writes which bytes of which file at a save; every rank computes the same plan.

Bytes would be lost if one had two writers or none, or if two ranks computed a border differently.
Everything is therefore a function of the group's declarations, holders and files only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.planning.exchange import RankIO, plan_exchange, plan_rank_io
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.planning.split_files import split_files
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.dtypes import DTYPE_ORDER
from unified_ckpt.core.sharding.shardings import TensorSpec


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. It stores tensor `decl_index` of the group, or some of its bytes."""

    decl_index: int
    part: str
    fqn: str
    spec: TensorSpec

    @property
    def key(self) -> Key:
        """(part, fqn)."""
        return self.part, self.fqn


@dataclass(frozen=True, slots=True)
class FileContents:
    """One file of a holder group.

    `stored_indices`: of the group's stored tensors. `header_rank`: writes the header and
    the small tensors.
    """

    part: str
    number: int  # within the group and part, from 0
    stored_indices: tuple[int, ...]
    header_rank: int


def plan_files(
    stored: Sequence[StoredTensor], *, holders: Sequence[int], limits: Mapping[str, int]
) -> list[FileContents]:
    """Divide a group's stored tensors into files, by part and in the order of their names.

    `limits`: the bytes of a file, by part. The header ranks are evenly spread over the holders.
    """
    in_order = sorted(range(len(stored)), key=lambda index: stored[index].key)
    parts = group_by_value((index, stored[index].part) for index in in_order)
    files = [
        (part, i, tuple(indices[j] for j in span))
        for part, indices in parts.items()
        for i, span in enumerate(
            split_files([stored[n].spec.nbytes for n in indices], max_file_bytes=limits[part])
        )
    ]
    return [
        FileContents(part, i, file_indices, holders[k * len(holders) // len(files)])
        for k, (part, i, file_indices) in enumerate(files)
    ]


def plan_writes(
    decls: Sequence[TensorDecl],
    stored: Sequence[StoredTensor],
    *,
    holders: Sequence[int],
    files: Sequence[FileContents],
    header_nbytes: Mapping[int, int],
    rank: int,
) -> RankIO:
    """Return what `rank` writes of the group.

    `header_nbytes`: by position in `files`. One rank writes all that stores a small tensor, also
    if it is in several files.
    """
    small_io_ranks: dict[int, int] = {}
    header_nbytes_by_rank = Counter[int]()
    for position, file in enumerate(files):
        header_nbytes_by_rank[file.header_rank] += header_nbytes[position]
        # In the order of the file, so that one call writes neighbours.
        for n in sorted(file.stored_indices, key=lambda n: DTYPE_ORDER[stored[n].spec.dtype]):
            decl_index = stored[n].decl_index
            if decls[decl_index].spec.nbytes < SMALL_NBYTES:
                small_io_ranks.setdefault(decl_index, file.header_rank)
    exchange = plan_exchange(
        decls,
        holders=holders,
        header_nbytes_by_rank=header_nbytes_by_rank,
        small_io_ranks=small_io_ranks,
        unexchanged=(),
        is_read=False,
    )
    return plan_rank_io(exchange, rank)

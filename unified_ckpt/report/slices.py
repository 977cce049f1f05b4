"""Where the slices of each rank lie in the files of a checkpoint, from the manifest's shardings.

A row is a rank, or a range of ranks in a larger world; a column is a range of bytes. Costs grow
with the distinct shapes times ranks, and with the tensors; never with tensors times ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.engine.plan.sharding_records import decode_rule
from unified_ckpt.format.manifest_fields import ShardingRecords

MAX_ROWS = 64
COLUMNS = 96


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A stored tensor: `start` counts the bytes of all tensors before it in the checkpoint."""

    part: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    rule: int


@dataclass(frozen=True, slots=True)
class SliceMap:
    """`rows`: what each row stands for. `copies`: [row, column], how often the ranks of a row hold
    the bytes of a column. `nbytes_by_row`: bytes that one rank of a row holds, on average.
    """

    rows: tuple[str, ...]
    copies: NDArray[np.float64]
    nbytes_by_row: NDArray[np.float64]


def map_slices(
    records: ShardingRecords, tensors: Sequence[PlacedTensor], *, world_size: int
) -> SliceMap:
    """Return which bytes the ranks hold, of tensors that lie one after the other."""
    ranks_per_row = -(-world_size // MAX_ROWS)
    row_count = -(-world_size // ranks_per_row)
    rules = [decode_rule(rule) for rule in records.rules]

    @cache
    def slices(rule: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
        sharding, holders = rules[rule]
        return _slices_by_row(sharding, holders, shape, ranks_per_row)

    pieces = [np.zeros((0, 4))]
    for tensor in tensors:
        piece = slices(tensor.rule, tensor.shape).copy()
        piece[:, 1:3] = tensor.start + piece[:, 1:3] * tensor.nbytes
        pieces.append(piece)
    rows, starts, stops, copies = np.concatenate(pieces).T
    total = sum(tensor.nbytes for tensor in tensors)
    held = _bytes_before(rows, starts, copies, total, row_count)
    held -= _bytes_before(rows, stops, copies, total, row_count)
    ranks_in_row = np.minimum(
        ranks_per_row, world_size - ranks_per_row * np.arange(row_count, dtype=np.float64)
    )
    return SliceMap(
        rows=tuple(_row_name(row, ranks_per_row, world_size) for row in range(row_count)),
        copies=np.diff(held, axis=1) / max(total / COLUMNS, 1e-9),
        nbytes_by_row=held[:, -1] / ranks_in_row,
    )


def _slices_by_row(
    sharding: Sharding, holders: Sequence[int], shape: tuple[int, ...], ranks_per_row: int
) -> NDArray[np.float64]:
    """Return [row, start, stop, copies] of a tensor, with start and stop as fractions of it.

    Exact along the first dim that is longer than 1; along inner dims, the mean.
    """
    lead = next((dim for dim, length in enumerate(shape) if length > 1), 0)
    inner = prod(dim.size for dim in sharding.shard_dims if dim.dim != lead)
    sections = [d.sections for d in sharding.shard_dims if d.dim == lead]
    # Codes and scales of an encoded tensor have another last dim than the tensor.
    length = next((sum(s) for s in sections if not isinstance(s, int)), (*shape, 1)[lead])
    copies_by_row: dict[int, dict[tuple[int, int], float]] = {}
    for rank in holders:
        if not sharding.has_rank(rank):
            continue
        copies = copies_by_row.setdefault(rank // ranks_per_row, {})
        coordinates = sharding.coordinates(sharding.position(rank))
        for interval in sharding.intervals(lead, length, coordinates):
            copies[interval] = copies.get(interval, 0.0) + 1 / inner
    merged: list[list[float]] = []
    for row, copies in sorted(copies_by_row.items()):
        for (start, stop), count in sorted(copies.items()):
            last = merged[-1] if merged else [-1.0, 0.0, 0.0, 0.0]
            if last[0] == row and last[2] == start and abs(last[3] - count) < 1e-9:
                last[2] = stop
            else:
                merged.append([row, start, stop, count])
    table = np.array(merged, dtype=np.float64).reshape(-1, 4)
    table[:, 1:3] /= max(length, 1)
    return table


def _bytes_before(
    rows: NDArray[np.float64],
    starts: NDArray[np.float64],
    copies: NDArray[np.float64],
    total: int,
    row_count: int,
) -> NDArray[np.float64]:
    """Return [row, column border]: the sum of copies * bytes from each start to the border."""
    borders = np.linspace(0, total, COLUMNS + 1)
    columns = np.minimum(np.ceil(starts / max(total, 1) * COLUMNS).astype(int), COLUMNS)
    slope, offset = np.zeros((2, row_count, COLUMNS + 1))
    np.add.at(slope, (rows.astype(int), columns), copies)
    np.add.at(offset, (rows.astype(int), columns), -copies * starts)
    return np.cumsum(slope, axis=1) * borders + np.cumsum(offset, axis=1)


def _row_name(row: int, ranks_per_row: int, world_size: int) -> str:
    first = row * ranks_per_row
    last = min(first + ranks_per_row, world_size) - 1
    return f"rank {first}" if ranks_per_row == 1 else f"ranks {first}–{last}"

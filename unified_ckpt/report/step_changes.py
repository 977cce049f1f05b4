"""What differs between any two steps of a run, by the digests of 1 MiB blocks.

Blocks that change at the same steps form a pattern. A page holds the patterns and how many bytes of
each layer follow them, so its size does not grow with the tensors, and any two steps compare
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import natural_key
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.stored_files import read_file
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import digests
from unified_ckpt.manager.steps.scan import StepRecord
from unified_ckpt.report.contents import layer_of

Array = NDArray[np.int64]

_MAX_STEPS = 300
_MAX_BLOCKS = 20_000_000  # of all steps; 160 MB of memory
_MAX_NUMBERS = 300_000  # of the patterns in the page; about 1 MB
_MAX_LAYERS = 200  # of a chart
_CHUNK = 16  # tensors whose patterns are found at once
_OTHERS = "other layers"

ProgressCallback = Callable[[int, int], object]
_Tensor = tuple[str, str, TensorSpec]  # part, name and spec: another shape is another tensor
_Step = tuple[str, Mapping[_Tensor, NDArray[np.uint64]]]  # its name and digests


@dataclass(frozen=True, slots=True)
class LayerChange:
    """What differs in one layer of a part: bytes of all blocks, and of those that changed."""

    part: str
    layer: str
    nbytes: int
    changed_nbytes: int


@dataclass(frozen=True, slots=True)
class StepChanges:
    """Which bytes differ between any two steps.

    `names`: of the steps, oldest first; `left_out`: how many older ones are not compared.
    `patterns`: [pattern, step], equal for steps with equal blocks, -1 for steps without the tensor.
    `nbytes`: (part, layer) -> pattern -> how many bytes follow it.
    """

    names: tuple[str, ...]
    left_out: int
    nbytes: Mapping[tuple[str, str], Mapping[int, int]]
    patterns: Array

    def compare(self, before: int, after: int) -> list[LayerChange]:
        """Return what changed between two steps, in the layers that the second one has."""
        changes = []
        for (part, layer), by_pattern in self.nbytes.items():
            nbytes = changed = 0
            for number, size in by_pattern.items():
                pattern = self.patterns[number]
                if pattern[after] >= 0:
                    nbytes += size
                    changed += size * bool(pattern[before] != pattern[after])
            if nbytes:
                changes.append(LayerChange(part, layer, nbytes, changed))
        return changes


def compare_steps(
    records: Sequence[StepRecord], *, progress: ProgressCallback
) -> StepChanges | None:
    """Compare the newest of some steps, oldest first, as many as a page can hold.

    Steps without digests, or that cannot be read, are left out. None if fewer than two are left.
    `progress` is called before each step is read, with 1 and the number of steps.
    """
    steps: list[_Step] = []
    blocks = 0
    newest = records[: -_MAX_STEPS - 1 : -1]
    for record in newest:
        progress(1, len(newest))
        try:
            with closing(open_path(record.path, lock=False)) as folder:
                tensors = _read_digests(folder)
        except CheckpointError:  # damaged, or removed meanwhile: `verify` says how
            continue
        blocks += sum(map(len, tensors.values()))
        if blocks > _MAX_BLOCKS and len(steps) > 1:
            break
        if tensors:
            steps.append((record.name, tensors))
    if len(steps) < 2:
        return None
    return _find_patterns(steps[::-1], left_out=len(records) - len(steps))


def _read_digests(folder: Folder) -> dict[_Tensor, NDArray[np.uint64]]:
    """Return the digests of all tensors; none if the folder has no digests."""
    tensors: dict[_Tensor, NDArray[np.uint64]] = {}
    record = folder.digest_record()
    if record is None:
        return tensors
    read_file(folder.storage, record.file, record)  # an error if it is damaged
    for part in folder.parts:
        specs = folder.specs(part, folder.names(part))
        for (_, name), blocks in folder.block_digests([(part, name) for name in specs]).items():
            if blocks is not None:
                tensors[part, name, specs[name]] = np.array(blocks, dtype=np.uint64)
    return tensors


def _find_patterns(steps: Sequence[_Step], *, left_out: int) -> StepChanges:
    """Find the patterns of the newest steps, of so many that a page can hold them."""
    known = sorted({tensor for _, tensors in steps for tensor in tensors}, key=_sort_key)
    all_layers = list(dict.fromkeys(layer_of(name) for _, name, _ in known))
    shown = set(all_layers[:_MAX_LAYERS])
    number_of: dict[bytes, int] = {}
    totals: dict[tuple[str, str], dict[int, int]] = {}
    for start in range(0, len(known), _CHUNK):
        for (part, name, _), row, nbytes in _rows(known[start : start + _CHUNK], steps):
            layer = layer_of(name)
            by_pattern = totals.setdefault((part, layer if layer in shown else _OTHERS), {})
            number = number_of.setdefault(row.tobytes(), len(number_of))
            by_pattern[number] = by_pattern.get(number, 0) + nbytes
    patterns = np.frombuffer(b"".join(number_of), np.int64).reshape(-1, len(steps))
    if patterns.size > _MAX_NUMBERS and len(steps) > 2:
        newest = steps[-max(len(steps) // 2, 2) :]
        return _find_patterns(newest, left_out=left_out + len(steps) - len(newest))
    return StepChanges(tuple(name for name, _ in steps), left_out, totals, patterns)


def _rows(
    tensors: Sequence[_Tensor], steps: Sequence[_Step]
) -> Iterator[tuple[_Tensor, Array, int]]:
    """Yield the distinct patterns of each tensor, and the bytes of the blocks that follow it."""
    counts = [digests.block_count(spec.nbytes) for _, _, spec in tensors]
    borders = np.cumsum([0, *counts])
    blocks = np.zeros((len(steps), borders[-1]), np.uint64)
    missing = np.zeros((len(steps), borders[-1]), np.bool_)
    for row, (_, present) in enumerate(steps):
        for tensor, start, stop in zip(tensors, borders, borders[1:], strict=False):
            if tensor in present:
                blocks[row, start:stop] = present[tensor]
            else:
                missing[row, start:stop] = True
    patterns = _first_equal(blocks)
    patterns[missing] = -1
    for tensor, start, stop in zip(tensors, borders, borders[1:], strict=False):
        if start == stop:
            continue
        sizes = np.full(stop - start, digests.BLOCK_NBYTES)
        sizes[-1:] = tensor[2].nbytes - digests.BLOCK_NBYTES * (len(sizes) - 1)
        unique, inverse = np.unique(patterns[:, start:stop].T, axis=0, return_inverse=True)
        totals = np.bincount(inverse.reshape(-1), weights=sizes, minlength=len(unique))
        for row_pattern, nbytes in zip(unique, totals, strict=True):
            yield tensor, row_pattern, int(nbytes)


def _sort_key(tensor: _Tensor) -> tuple[Any, ...]:
    part, name, spec = tensor
    return part, natural_key(name), name, str(spec)


def _first_equal(table: NDArray[Any]) -> Array:
    """Return for each element the first row in which its column has the same value."""
    order = np.argsort(table, axis=0, kind="stable")
    ordered = np.take_along_axis(table, order, 0)
    is_new = np.ones(table.shape, np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    starts = np.maximum.accumulate(np.where(is_new, np.arange(len(table))[:, None], 0), axis=0)
    first = np.empty(table.shape, np.int64)
    np.put_along_axis(first, order, np.take_along_axis(order, starts, 0), 0)
    return first

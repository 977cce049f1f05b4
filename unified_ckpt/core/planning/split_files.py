"""Divides the tensors of a part into files: whole tensors, in order, bounded and balanced.

Knows sizes only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

_FILES = 64  # of a part, where this keeps them within these bounds
_MIN_LIMIT, _MAX_LIMIT = 512_000_000, 5_000_000_000
_ONE_FILE_NBYTES = 1_000_000_000  # a larger part is divided
_ADAPTERS = "adapter_model"  # the start of their parts' names: PEFT opens one file of each


def file_limits(
    tensor_sizes: Iterable[tuple[str, int]], *, max_file_bytes: int | None
) -> dict[str, int]:
    """Return, by part, how many bytes the tensors of a file have at most.

    `tensor_sizes`: (part, bytes) of every tensor of the folder. `max_file_bytes`: as in
    `file_limit`. Neither bounds the file of an adapter.
    """
    part_sizes = Counter[str]()
    for part, nbytes in tensor_sizes:
        part_sizes[part] += nbytes
    return {
        part: nbytes if part.startswith(_ADAPTERS) else file_limit(nbytes, max_file_bytes)
        for part, nbytes in part_sizes.items()
    }


def file_limit(part_nbytes: int, max_file_bytes: int | None = None) -> int:
    """Return how many bytes a file's tensors may have, by the user's limit or the part's size.

    Ranks write to one file one after another, so large parts have many files. Small parts have one,
    and no part has very many: each file costs an open, a header and a sync.
    """
    if max_file_bytes is not None:
        return max_file_bytes
    if part_nbytes <= _ONE_FILE_NBYTES:
        return _ONE_FILE_NBYTES
    return min(max(-(-part_nbytes // _FILES), _MIN_LIMIT), _MAX_LIMIT)


def split_files(sizes: Sequence[int], *, max_file_bytes: int) -> list[range]:
    """Divide tensors into as few files as their order allows, the largest as small as possible.

    `sizes`: in bytes. A tensor larger than the limit has a file of its own. Each file is a range of
    positions in `sizes`.
    """
    ends = list(accumulate(sizes))
    stops = _file_stops(ends, max_file_bytes)
    low, high = (-(-ends[-1] // len(stops)) if stops else 0), max_file_bytes
    while low < high:
        bound = (low + high) // 2
        candidate = _file_stops(ends, bound)
        if len(candidate) <= len(stops):
            stops, high = candidate, bound
        else:
            low = bound + 1
    return [range(a, b) for a, b in zip([0, *stops], stops, strict=False)]


def _file_stops(ends: Sequence[int], bound: int) -> list[int]:
    """Return the stop position of each file filled up to `bound` bytes; `ends`: running sums."""
    stops: list[int] = []
    previous_end = 0
    while (stops[-1] if stops else 0) < len(ends):
        stop = bisect_right(ends, previous_end + bound)
        stop = max(stop, (stops[-1] if stops else 0) + 1)
        stops.append(stop)
        previous_end = ends[stop - 1]
    return stops

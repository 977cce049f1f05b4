"""Two checkpoints, tensor by tensor, whatever their formats and layouts. Reads in bounded memory, and nothing where digests say enough.

How a difference could be missed: a tensor has another name on one side (both names of a tied one count); nan differs from itself (bytes are
compared first); digests are of other bytes than the file's now (`deep` reads them all the same).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import NotFoundError
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

_CHUNK_ELEMENTS = 1 << 20  # of each side at a time


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs of a tensor. `first`, `second`: None where that side lacks it. `elements`: that differ, of `first`'s number.

    `max_abs`: the largest difference of two elements, None where shapes differ or it is one of nan, or of no number.
    """

    part: str
    name: str
    first: TensorSpec | None
    second: TensorSpec | None
    elements: int = 0
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """`equal`: tensors that are bitwise equal, dtype and shape too; `bytes_read`: of both sides together."""

    equal: int
    differences: tuple[Difference, ...]
    bytes_read: int


def compare(
    first: Source,
    second: Source,
    *,
    parts: Collection[str] | None = None,
    match: str | None = None,
    deep: bool = False,
    progress: Callable[[int], object] | None = None,
) -> DiffReport:
    """`parts`: only these, NotFoundError for one that neither has; `match`: only names, or part:name, that match this glob.

    Where dtypes differ the values are compared as float64. `deep`: reads also what equal digests say is equal. `progress` is called with
    bytes of the first that are done with.
    """
    stray = sorted(set(parts or ()) - {*first.parts, *second.parts})
    if stray:
        raise NotFoundError(
            f"part {stray[0]!r}: neither checkpoint has it; they have {', '.join(sorted({*first.parts, *second.parts}))}"
        )
    equal, found, read = 0, list[Difference](), 0
    for part in sorted({*first.parts, *second.parts}) if parts is None else sorted(parts):
        for name in _names(first, second, part, match):
            difference, nbytes = _compare_one(first, second, part, name, deep=deep)
            read += nbytes
            if difference is None:
                equal += 1
            else:
                found.append(difference)
            spec = _spec(first, part, name)
            if progress is not None and spec is not None:
                progress(spec[1].nbytes)
    return DiffReport(equal, tuple(found), read)


def _names(first: Source, second: Source, part: str, match: str | None) -> list[str]:
    """Names of either side; one that is an alias on one side and stored on the other counts as stored, and one of two tensors too."""
    ours, theirs = (
        source.aliases(part) if part in source.parts else {} for source in (first, second)
    )
    parted = {
        name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]
    }  # tied to one tensor here, to another there
    found = sorted({*first.names(part), *second.names(part), *parted})
    return [
        name
        for name in found
        if match is None or fnmatchcase(name, match) or fnmatchcase(f"{part}:{name}", match)
    ]


def _spec(source: Source, part: str, name: str) -> tuple[Key, TensorSpec] | None:
    """Under which name a side stores a tensor, and what it is."""
    if part not in source.parts:
        return None
    names = source.names(part)
    stored = name if name in names else source.aliases(part).get(name)
    if stored is None or stored not in names:
        return None
    return (part, stored), source.specs(part, [stored])[stored]


def _compare_one(
    first: Source, second: Source, part: str, name: str, *, deep: bool
) -> tuple[Difference | None, int]:
    one, other = _spec(first, part, name), _spec(second, part, name)
    if one is None or other is None or one[1].shape != other[1].shape:
        return Difference(part, name, one and one[1], other and other[1]), 0
    if not deep and one[1] == other[1] and _same_digests(first, one[0], second, other[0]):
        return None, 0
    elements, largest, unknown = 0, 0.0, False
    for left, right in zip(_chunks(first, *one), _chunks(second, *other), strict=True):
        if left.dtype == right.dtype and torch.equal(
            left.view(torch.uint8), right.view(torch.uint8)
        ):
            continue
        count, step = _apart(left, right)
        elements += count
        unknown |= step is None
        largest = max(largest, step or 0.0)
    nbytes = one[1].nbytes + other[1].nbytes
    if one[1] == other[1] and not elements:
        return None, nbytes
    return Difference(part, name, one[1], other[1], elements, None if unknown else largest), nbytes


def _same_digests(first: Source, one: Key, second: Source, other: Key) -> bool:
    left, right = first.block_digests([one])[one], second.block_digests([other])[other]
    return left is not None and right is not None and list(left) == list(right)


def _chunks(source: Source, key: Key, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """The elements of a tensor, row-major, some at a time: [at most _CHUNK_ELEMENTS]."""
    catalog, item = source.catalog([key]), itemsize(spec.dtype)
    location, total = catalog.locations[key], spec.nbytes // item
    for low in range(0, total, _CHUNK_ELEMENTS):
        held = bytearray((min(low + _CHUNK_ELEMENTS, total) - low) * item)
        catalog.storage.read_at(location.file, location.start + low * item, memoryview(held))
        yield torch.frombuffer(held, dtype=torch.uint8).view(TORCH_DTYPES[spec.dtype])


def _apart(left: torch.Tensor, right: torch.Tensor) -> tuple[int, float | None]:
    """How many elements differ, and by how much at most; None where one is nan or has no value as a number."""
    try:
        a, b = _numbers(left), _numbers(right)
    except (RuntimeError, NotImplementedError):  # packed formats have no conversion
        return int((left.view(torch.uint8) != right.view(torch.uint8)).sum()), None
    differ = (a != b) & ~(a.isnan() & b.isnan())
    if left.dtype == right.dtype:  # -0.0 and 0.0, or two nans: other bits
        width = left.element_size()
        differ |= (
            left.view(torch.uint8).view(-1, width) != right.view(torch.uint8).view(-1, width)
        ).any(1)
    apart = (a - b).abs()[differ]
    if apart.isnan().any():  # of nan and a number, or of two infinities that are one number
        return int(differ.sum()), None
    return int(differ.sum()), float(apart.max()) if apart.numel() else 0.0


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128) if values.is_complex() else values.to(torch.float64)

"""Two checkpoints, tensor by tensor, whatever their formats and layouts. Reads in bounded memory,
and nothing where digests say enough.

How a difference could be missed: a tensor has another name on one side (both names of a tied one
count); nan differs from itself (bytes are compared first); digests are of other bytes than the
file's now (`deep` reads them all the same).
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
    """What differs of a tensor. `first`, `second`: None where that side lacks it. `elements`: that
    differ, of `first`'s number.

    `max_abs`: the largest difference of two elements, None where shapes differ or it is one of nan,
    or of no number.
    """

    part: str
    name: str
    first: TensorSpec | None
    second: TensorSpec | None
    elements: int = 0
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """`equal`: tensors that are bitwise equal, dtype and shape too; `bytes_read`: of both sides
    together.
    """

    equal: int
    differences: tuple[Difference, ...]
    bytes_read: int


def diff_sources(
    first: Source,
    second: Source,
    *,
    parts: Collection[str] | None = None,
    match: str | None = None,
    deep: bool = False,
    progress: Callable[[int], object] | None = None,
) -> DiffReport:
    """`parts`: only these, NotFoundError for one that neither has; `match`: only names, or
    part:name, that match this glob.

    Where dtypes differ the values are compared as float64. `deep`: reads also what equal digests
    say is equal. `progress` is called with bytes of the first that are done with.
    """
    unknown_parts = sorted(set(parts or ()) - {*first.parts, *second.parts})
    if unknown_parts:
        raise NotFoundError(
            f"part {unknown_parts[0]!r}: neither checkpoint has it; they have {', '.join(sorted({*first.parts, *second.parts}))}"
        )
    equal, differences, bytes_read = 0, list[Difference](), 0
    for part in sorted({*first.parts, *second.parts}) if parts is None else sorted(parts):
        for name in _names_on_either_side(first, second, part, match):
            difference, nbytes = _diff_tensor(first, second, part, name, deep=deep)
            bytes_read += nbytes
            if difference is None:
                equal += 1
            else:
                differences.append(difference)
            spec = _stored_tensor(first, part, name)
            if progress is not None and spec is not None:
                progress(spec[1].nbytes)
    return DiffReport(equal, tuple(differences), bytes_read)


def _names_on_either_side(first: Source, second: Source, part: str, match: str | None) -> list[str]:
    """Names of either side; one that is an alias on one side and stored on the other counts as
    stored, and one of two tensors too.
    """
    first_aliases, second_aliases = (
        source.aliases(part) if part in source.parts else {} for source in (first, second)
    )
    differently_tied = {
        name
        for name in first_aliases.keys() & second_aliases.keys()
        if first_aliases[name] != second_aliases[name]
    }  # tied to one tensor here, to another there
    names = sorted({*first.names(part), *second.names(part), *differently_tied})
    return [
        name
        for name in names
        if match is None or fnmatchcase(name, match) or fnmatchcase(f"{part}:{name}", match)
    ]


def _stored_tensor(source: Source, part: str, name: str) -> tuple[Key, TensorSpec] | None:
    """Under which name a side stores a tensor, and what it is."""
    if part not in source.parts:
        return None
    names = source.names(part)
    stored_name = name if name in names else source.aliases(part).get(name)
    if stored_name is None or stored_name not in names:
        return None
    return (part, stored_name), source.specs(part, [stored_name])[stored_name]


def _diff_tensor(
    first: Source, second: Source, part: str, name: str, *, deep: bool
) -> tuple[Difference | None, int]:
    first_tensor, second_tensor = (
        _stored_tensor(first, part, name),
        _stored_tensor(second, part, name),
    )
    if (
        first_tensor is None
        or second_tensor is None
        or first_tensor[1].shape != second_tensor[1].shape
    ):
        return Difference(
            part, name, first_tensor and first_tensor[1], second_tensor and second_tensor[1]
        ), 0
    if (
        not deep
        and first_tensor[1] == second_tensor[1]
        and _same_digests(first, first_tensor[0], second, second_tensor[0])
    ):
        return None, 0
    differing, largest, is_unknown = 0, 0.0, False
    for first_chunk, second_chunk in zip(
        _chunks(first, *first_tensor), _chunks(second, *second_tensor), strict=True
    ):
        if first_chunk.dtype == second_chunk.dtype and torch.equal(
            first_chunk.view(torch.uint8), second_chunk.view(torch.uint8)
        ):
            continue
        count, chunk_max = _chunk_difference(first_chunk, second_chunk)
        differing += count
        is_unknown |= chunk_max is None
        largest = max(largest, chunk_max or 0.0)
    nbytes = first_tensor[1].nbytes + second_tensor[1].nbytes
    if first_tensor[1] == second_tensor[1] and not differing:
        return None, nbytes
    return Difference(
        part, name, first_tensor[1], second_tensor[1], differing, None if is_unknown else largest
    ), nbytes


def _same_digests(first: Source, first_key: Key, second: Source, second_key: Key) -> bool:
    first_digests, second_digests = (
        first.block_digests([first_key])[first_key],
        second.block_digests([second_key])[second_key],
    )
    return (
        first_digests is not None
        and second_digests is not None
        and list(first_digests) == list(second_digests)
    )


def _chunks(source: Source, key: Key, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """The elements of a tensor, row-major, some at a time: [at most _CHUNK_ELEMENTS]."""
    catalog, item_nbytes = source.catalog([key]), itemsize(spec.dtype)
    location, total = catalog.locations[key], spec.nbytes // item_nbytes
    for low in range(0, total, _CHUNK_ELEMENTS):
        buffer = bytearray((min(low + _CHUNK_ELEMENTS, total) - low) * item_nbytes)
        catalog.storage.read_at(
            location.file, location.start + low * item_nbytes, memoryview(buffer)
        )
        yield torch.frombuffer(buffer, dtype=torch.uint8).view(TORCH_DTYPES[spec.dtype])


def _chunk_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[int, float | None]:
    """How many elements differ, and by how much at most; None where one is nan or has no value as a
    number.
    """
    try:
        left_values, right_values = _numbers(left), _numbers(right)
    except (RuntimeError, NotImplementedError):  # packed formats have no conversion
        return int((left.view(torch.uint8) != right.view(torch.uint8)).sum()), None
    is_different = (left_values != right_values) & ~(left_values.isnan() & right_values.isnan())
    if left.dtype == right.dtype:  # -0.0 and 0.0, or two nans: other bits
        width = left.element_size()
        is_different |= (
            left.view(torch.uint8).view(-1, width) != right.view(torch.uint8).view(-1, width)
        ).any(1)
    distances = (left_values - right_values).abs()[is_different]
    if distances.isnan().any():  # of nan and a number, or of two infinities that are one number
        return int(is_different.sum()), None
    return int(is_different.sum()), float(distances.max()) if distances.numel() else 0.0


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128) if values.is_complex() else values.to(torch.float64)

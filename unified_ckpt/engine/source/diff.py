"""Compare two checkpoints tensor by tensor, in bounded memory, across formats and shardings.

Imports torch only to read values: equal digests need none.

How a difference could be missed or invented:
- A tied tensor has another name on one side: both of its names are compared.
- A nan differs from itself: bytes are compared first.
- Digests do not match the file: `deep` reads the data too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor differs. `first`, `second`: its specs, None if that side lacks it.

    `elements`: how many differ. `max_abs`: the largest absolute difference; None if shapes differ
    or a value is not a number.
    """

    part: str
    name: str
    first: TensorSpec | None
    second: TensorSpec | None
    elements: int = 0
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of a comparison.

    `equal`: tensors equal in dtype, shape and bits; `bytes_read`: from both sides together.
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
    """Compare two Sources. `match`: only names, or "part:name", that match this glob.

    `parts`: only these; NotFoundError for one that neither side has. `deep`: read tensors even if
    their digests are equal. Values of different dtypes are compared as float64. `progress` is
    called with the bytes of the first side that are done.
    """
    unknown_parts = sorted(set(parts or ()) - {*first.parts, *second.parts})
    if unknown_parts:
        raise NotFoundError(
            f"part {unknown_parts[0]!r}: is in neither checkpoint; expected one of "
            f"{', '.join(sorted({*first.parts, *second.parts}))}"
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
            first_tensor = _stored_tensor(first, part, name)
            if progress is not None and first_tensor is not None:
                progress(first_tensor[1].nbytes)
    return DiffReport(equal, tuple(differences), bytes_read)


def _names_on_either_side(first: Source, second: Source, part: str, match: str | None) -> list[str]:
    """Return the stored names of either side.

    An alias on one side that is stored on the other is included, and so is an alias of two
    different tensors.
    """
    first_aliases, second_aliases = (
        source.aliases(part) if part in source.parts else {} for source in (first, second)
    )
    differently_tied = {
        name
        for name in first_aliases.keys() & second_aliases.keys()
        if first_aliases[name] != second_aliases[name]
    }
    names = sorted({*first.names(part), *second.names(part), *differently_tied})
    return [
        name
        for name in names
        if match is None or fnmatchcase(name, match) or fnmatchcase(f"{part}:{name}", match)
    ]


def _stored_tensor(source: Source, part: str, name: str) -> tuple[Key, TensorSpec] | None:
    """Return the stored key and spec of a tensor on one side, or None."""
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
    """Return how a tensor differs, or None, and the bytes read."""
    first_tensor = _stored_tensor(first, part, name)
    second_tensor = _stored_tensor(second, part, name)
    if first_tensor is None or second_tensor is None:
        first_spec, second_spec = (tensor and tensor[1] for tensor in (first_tensor, second_tensor))
        return Difference(part, name, first_spec, second_spec), 0
    (first_key, first_spec), (second_key, second_spec) = first_tensor, second_tensor
    if first_spec.shape != second_spec.shape:
        return Difference(part, name, first_spec, second_spec), 0
    is_same_spec = first_spec == second_spec
    if not deep and is_same_spec and _same_digests(first, first_key, second, second_key):
        return None, 0
    # Only now: equal digests need no torch, whose import costs more than the rest.
    from unified_ckpt.engine.source.diff_values import diff_values

    differing, max_abs = diff_values(
        (first, first_key, first_spec), (second, second_key, second_spec)
    )
    nbytes = first_spec.nbytes + second_spec.nbytes
    if is_same_spec and not differing:
        return None, nbytes
    return Difference(part, name, first_spec, second_spec, differing, max_abs), nbytes


def _same_digests(first: Source, first_key: Key, second: Source, second_key: Key) -> bool:
    first_digests = first.block_digests([first_key])[first_key]
    second_digests = second.block_digests([second_key])[second_key]
    if first_digests is None or second_digests is None:
        return False
    return list(first_digests) == list(second_digests)

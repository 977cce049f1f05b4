"""Layouts: how the caller declares that plain tensors are shards of global ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any

from unified_ckpt.core.sharding.boxes import strides
from unified_ckpt.core.sharding.shardings import ShardDim
from unified_ckpt.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Strided:
    """A dim made of sections that are split separately, as in fused QKV or gate_up.

    `sections`: the number of equal sections, or their lengths in the global tensor, in elements.
    """

    dim: int
    sections: int | tuple[int, ...]

    def __post_init__(self) -> None:
        sections: object = self.sections
        lengths = [sections] if isinstance(sections, int) else sections
        if not _is_int(self.dim):
            raise LayoutError(f"Strided: got dim {self.dim!r}, expected an int")
        if (
            not isinstance(lengths, list | tuple)
            or not lengths
            or not all(_is_int(length) and length > 0 for length in lengths)
        ):
            raise LayoutError(
                f"Strided: got sections {sections!r}, expected a positive int, or a tuple of them"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """Declares which plain tensors are shards, and of which global tensor.

    `mesh`: {mesh dim: size}, in row-major order over the ranks.

    `rules`: {glob over parameter names: {mesh dim: tensor dim or `Strided`}}. The first match
    applies. Tensors are split as by `torch.chunk`, and replicated over mesh dims that a rule omits.
    Several splits of one tensor dim nest in the order of the rule.

    `shapes`: {glob: global shape}, for tensors with uneven or padded shards. Only dims that the
    tensor's rule names may be padded, over a mesh dim of any size.
    """

    mesh: Mapping[str, int]
    rules: Mapping[str, Mapping[str, int | Strided]]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name, size in _items(self.mesh, "mesh", "{mesh dim: size}"):
            if not _is_int(size) or size < 1:
                raise LayoutError(
                    f"Layout mesh dim {name!r}: got size {size!r}, expected a positive int"
                )
        for pattern, rule in _items(self.rules, "rules", "{glob: {mesh dim: tensor dim}}"):
            of_rule = f"rules[{pattern!r}]"
            for name, placement in _items(rule, of_rule, "{mesh dim: tensor dim}"):
                if not _is_int(placement) and not isinstance(placement, Strided):
                    raise LayoutError(
                        f"Layout {of_rule}: got {name}={placement!r}, expected an int or Strided"
                    )
                if name not in self.mesh:
                    raise LayoutError(
                        f"Layout rule {pattern!r}: got mesh dim {name!r}, "
                        f"expected one of {', '.join(self.mesh)}"
                    )
        for pattern, shape in _items(self.shapes, "shapes", "{glob: global shape}"):
            if not isinstance(shape, Sequence) or not all(_is_int(n) and n >= 0 for n in shape):
                raise LayoutError(
                    f"Layout shapes[{pattern!r}]: got {shape!r}, expected ints of 0 or more"
                )

    def check_world(self, world_size: int) -> None:
        """Raise LayoutError unless the mesh has as many positions as there are ranks."""
        if prod(self.mesh.values()) != world_size:
            sizes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
            raise LayoutError(
                f"Layout mesh {sizes}: got {prod(self.mesh.values())} positions, "
                f"expected {world_size}, one for each rank"
            )

    @property
    def entries(self) -> list[str]:
        """The names of all rules and shapes in messages, such as "rules['*.weight']"."""
        names = (
            *(entry_names(rule, None) for rule in self.rules),
            *(entry_names(None, shape) for shape in self.shapes),
        )
        return list(chain.from_iterable(names))

    def rule_for(self, fqn: str) -> str | None:
        """Return the pattern of the rule that applies to a tensor, or None."""
        return _first_match(fqn, self.rules)

    def shape_for(self, fqn: str) -> str | None:
        """Return the pattern of the shape that applies to a tensor, or None."""
        return _first_match(fqn, self.shapes)

    def shard_dims(self, pattern: str, ndim: int) -> tuple[ShardDim, ...]:
        """Return the rule's splits for a tensor with `ndim` dims."""
        mesh_strides = dict(zip(self.mesh, strides([*self.mesh.values()]), strict=True))
        shard_dims = []
        for name, placement in self.rules[pattern].items():
            dim, sections = (
                (placement.dim, placement.sections)
                if isinstance(placement, Strided)
                else (placement, 1)
            )
            if not -ndim <= dim < ndim:
                raise LayoutError(
                    f"Layout rule {pattern!r}: got dim {dim}, expected a dim of a {ndim}-d tensor"
                )
            sections = sections if isinstance(sections, int) else tuple(sections)
            if self.mesh[name] > 1:
                shard_dims.append(
                    ShardDim(dim % ndim, self.mesh[name], mesh_strides[name], sections, 0, name)
                )
        return tuple(shard_dims)

    def sharded_dims(self, pattern: str, ndim: int) -> set[int]:
        """Return the tensor dims that the rule splits, including over mesh dims of size 1."""
        return {
            (placement.dim if isinstance(placement, Strided) else placement) % ndim
            for placement in self.rules[pattern].values()
        }

    def global_shape(self, fqn: str) -> tuple[int, ...] | None:
        """Return the global shape declared for a tensor, or None."""
        pattern = self.shape_for(fqn)
        return None if pattern is None else tuple(self.shapes[pattern])


def entry_names(rule: str | None, shape: str | None) -> list[str]:
    """Return the names of a rule and a shape, given by their patterns, as in `Layout.entries`."""
    names = [] if rule is None else [f"rules[{rule!r}]"]
    return names if shape is None else [*names, f"shapes[{shape!r}]"]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _items(mapping: object, field_name: str, expected: str) -> Iterable[tuple[str, Any]]:
    """Return the items of a field of a Layout. LayoutError for other types and keys."""
    if not isinstance(mapping, Mapping):
        raise LayoutError(f"Layout {field_name}: got {mapping!r}, expected {expected}")
    for key in mapping:
        if not isinstance(key, str):
            raise LayoutError(f"Layout {field_name}: got the key {key!r}, expected {expected}")
    return mapping.items()


def _first_match(fqn: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(fqn, pattern)), None)

"""Layouts: how the caller declares that plain tensors are shards of global ones.

Knows patterns and sizes only, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType

from unified_ckpt.core.sharding.shardings import ShardDim
from unified_ckpt.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Strided:
    """A dim made of sections that are split separately, as in fused QKV or gate_up.

    `sections`: the number of equal sections, or their lengths in the global tensor, in elements.
    """

    dim: int
    sections: int | tuple[int, ...]


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
        for name, size in self.mesh.items():
            if not isinstance(size, int) or size < 1:
                raise LayoutError(
                    f"Layout mesh dim {name!r}: got size {size!r}, expected a positive int"
                )
        for pattern, rule in self.rules.items():
            for name in rule:
                placement = rule[name]
                sections = placement.sections if isinstance(placement, Strided) else 1
                if not sections or any(
                    n < 1 for n in ((sections,) if isinstance(sections, int) else sections)
                ):
                    raise LayoutError(
                        f"Layout rule {pattern!r}: got sections {sections!r}, "
                        "expected positive numbers"
                    )
                if name not in self.mesh:
                    raise LayoutError(
                        f"Layout rule {pattern!r}: got mesh dim {name!r}, "
                        f"expected one of {', '.join(self.mesh)}"
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
        """The rules and shapes, as `entries_for` names those of a tensor."""
        return [f"rules[{rule!r}]" for rule in self.rules] + [
            f"shapes[{pattern!r}]" for pattern in self.shapes
        ]

    def entries_for(self, fqn: str) -> list[str]:
        """Return the rule and the shape that apply to a tensor, if any."""
        rule, shape = self.rule_for(fqn), _first_match(fqn, self.shapes)
        return [
            f"{kind}[{pattern!r}]"
            for kind, pattern in (("rules", rule), ("shapes", shape))
            if pattern is not None
        ]

    def rule_for(self, fqn: str) -> str | None:
        """Return the pattern of the rule that applies to a tensor, or None."""
        return _first_match(fqn, self.rules)

    def shard_dims(self, pattern: str, ndim: int) -> tuple[ShardDim, ...]:
        """Return the rule's splits for a tensor with `ndim` dims."""
        strides, stride = {}, prod(self.mesh.values())
        for name, size in self.mesh.items():
            stride //= size
            strides[name] = stride
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
                    ShardDim(dim % ndim, self.mesh[name], strides[name], sections, 0, name)
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
        pattern = _first_match(fqn, self.shapes)
        return None if pattern is None else tuple(self.shapes[pattern])


def _first_match(fqn: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(fqn, pattern)), None)

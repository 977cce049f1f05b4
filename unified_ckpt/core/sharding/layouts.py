"""How plain tensors sit in global ones, as the caller declares it. Patterns and numbers only; no
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType

from unified_ckpt.core.sharding.shardings import ShardDim
from unified_ckpt.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Strided:
    """A dim made of sections that are each split on their own: fused QKV or gate_up.

    `sections`: how many equal ones, or the length of each in the global tensor, in elements.
    """

    dim: int
    sections: int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which plain tensors are slices, and of what.

    `mesh`: sizes by mesh dim name, row-major over the ranks in the order given. `rules`: glob over
    fqns -> {mesh dim: tensor dim or
    `Strided`}; the first match wins; a mesh dim that a rule does not name replicates; several cuts
    of one tensor dim nest in the order given. Splits are `torch.chunk`'s. `shapes`: glob -> global
    shape, where parts are uneven or padded.
    """

    mesh: Mapping[str, int]
    rules: Mapping[str, Mapping[str, int | Strided]]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name, size in self.mesh.items():
            if not isinstance(size, int) or size < 1:
                raise LayoutError(
                    f"Layout mesh dim {name!r} has size {size!r}; needed a positive int"
                )
        for pattern, rule in self.rules.items():
            for name in rule:
                placement = rule[name]
                sections = placement.sections if isinstance(placement, Strided) else 1
                if not sections or any(
                    n < 1 for n in ((sections,) if isinstance(sections, int) else sections)
                ):
                    raise LayoutError(
                        f"Layout rule {pattern!r} has sections {sections!r}; needed positive numbers"
                    )
                if name not in self.mesh:
                    raise LayoutError(
                        f"Layout rule {pattern!r} names mesh dim {name!r}; the mesh has {', '.join(self.mesh)}"
                    )

    def check_world(self, world_size: int) -> None:
        """LayoutError unless the mesh has one place for each rank."""
        if prod(self.mesh.values()) != world_size:
            sizes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
            raise LayoutError(
                f"Layout mesh {sizes} has {prod(self.mesh.values())} places; the world has {world_size} ranks"
            )

    def rule_for(self, fqn: str) -> str | None:
        """The pattern that applies to a tensor."""
        return next((pattern for pattern in self.rules if fnmatchcase(fqn, pattern)), None)

    def shard_dims(self, pattern: str, ndim: int) -> tuple[ShardDim, ...]:
        """The rule's cuts, for a tensor of `ndim` dims."""
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
                    f"Layout rule {pattern!r} cuts dim {dim} of a tensor of {ndim} dims"
                )
            sections = sections if isinstance(sections, int) else tuple(sections)
            if self.mesh[name] > 1:
                shard_dims.append(
                    ShardDim(dim % ndim, self.mesh[name], strides[name], sections, 0, name)
                )
        return tuple(shard_dims)

    def sharded_dims(self, pattern: str, ndim: int) -> set[int]:
        """The tensor dims that the rule cuts, also those over mesh dims of size 1."""
        return {
            (placement.dim if isinstance(placement, Strided) else placement) % ndim
            for placement in self.rules[pattern].values()
        }

    def global_shape(self, fqn: str) -> tuple[int, ...] | None:
        """The shape declared for a tensor, if any."""
        return next(
            (tuple(shape) for pattern, shape in self.shapes.items() if fnmatchcase(fqn, pattern)),
            None,
        )

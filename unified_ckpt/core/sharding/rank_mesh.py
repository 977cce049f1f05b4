"""Which saved ranks' values a rank gets: by coordinates in the mesh, not by rank numbers.

After dp 4 -> dp 2 x tp 2, tensor-parallel peers would read different data if each rank got what
the rank of its number saved. Values therefore belong to a *data coordinate*: the coordinates along
the mesh dims whose ranks read different data. All is arithmetic on sizes and strides, so nothing
grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

from unified_ckpt.core.sharding.boxes import strides

# Ranks along these mesh dims read different data ...
DATA_DIMS = frozenset({"dp", "dp_shard", "dp_replicate", "fsdp", "ddp", "data_parallel"})
# ... and ranks along these read the same data.
MODEL_DIMS = frozenset({"tp", "cp", "pp", "ep", "sp", "tensor_parallel"})
DDP_DIM = "ddp"


class MeshDim(NamedTuple):
    """A mesh dim: the coordinate of a rank is `rank // stride % size`. `name`: may be empty."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class DataCoordinates:
    """The ranks of a mesh by data coordinate: row-major over `data`, equal along `replicated`."""

    data: tuple[MeshDim, ...]
    replicated: tuple[MeshDim, ...] = ()

    @property
    def count(self) -> int:
        """The number of data coordinates."""
        return prod(dim.size for dim in self.data)

    def coordinate(self, rank: int) -> int:
        """Return the data coordinate of a rank."""
        coordinate = 0
        for dim in self.data:
            coordinate = coordinate * dim.size + rank // dim.stride % dim.size
        return coordinate

    def ranks(self, coordinate: int) -> tuple[int, ...]:
        """Return the ranks with this data coordinate, ascending."""
        first = 0
        for dim in reversed(self.data):
            coordinate, position = divmod(coordinate, dim.size)
            first += position * dim.stride
        offsets = (range(0, dim.size * dim.stride, dim.stride) for dim in self.replicated)
        return tuple(sorted(first + sum(combination) for combination in product(*offsets)))


@dataclass(frozen=True, slots=True)
class RankMesh:
    """A mesh with every rank of a job exactly once; dims outermost first, each of 2 ranks or more.

    Raises ValueError for dims that miss a rank, or have one twice.
    """

    dims: tuple[MeshDim, ...]

    def __post_init__(self) -> None:
        stride = 1
        for dim in sorted(self.dims, key=lambda dim: dim.stride):
            if dim.size < 2 or dim.stride != stride:
                raise ValueError(
                    f"got mesh dim {dim.name!r} of size {dim.size} and stride {dim.stride}, "
                    f"expected a size of 2 or more and stride {stride}"
                )
            stride *= dim.size

    @classmethod
    def row_major(cls, sizes: Iterable[tuple[str, int]]) -> RankMesh:
        """Return the mesh of (name, size) over ranks in row-major order."""
        pairs = [*sizes]
        steps = strides([size for _, size in pairs])
        dims = (MeshDim(*pair, step) for pair, step in zip(pairs, steps, strict=True))
        return cls(tuple(dim for dim in dims if dim.size > 1))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(dim.size for dim in self.dims)

    def data_coordinates(self, data_dims: Collection[str] | None) -> DataCoordinates | None:
        """Return the ranks by data coordinate; None if it is unknown whether a dim carries data.

        `data_dims`: those that do; None for the names in `DATA_DIMS` and `MODEL_DIMS`.
        """
        carries_data = {dim: _carries_data(dim.name, data_dims) for dim in self.dims}
        if None in carries_data.values():
            return None
        return DataCoordinates(
            tuple(dim for dim in self.dims if carries_data[dim]),
            tuple(dim for dim in self.dims if not carries_data[dim]),
        )

    def __str__(self) -> str:
        return ", ".join(f"{dim.name or '?'} {dim.size}" for dim in self.dims) or "1 rank"


def _carries_data(name: str, data_dims: Collection[str] | None) -> bool | None:
    if name and data_dims is not None:
        return name in data_dims
    return True if name in DATA_DIMS else False if name in MODEL_DIMS else None


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The ranks of a job, and their mesh if there is one."""

    world: int
    mesh: RankMesh | None = None

    def data_coordinates(self, data_dims: Collection[str] | None) -> DataCoordinates | None:
        """Return the ranks by data coordinate; None without a mesh, or if a dim is unknown."""
        return None if self.mesh is None else self.mesh.data_coordinates(data_dims)

    def __str__(self) -> str:
        return f"{self.world} rank(s)" if self.mesh is None else f"mesh ({self.mesh})"


@dataclass(frozen=True, slots=True)
class ValueSources:
    """Where a rank's values come from; from nowhere if both fields are empty.

    `ranks`: saved ranks; the value that is equal on all of them. `combined`: the saved ranks by
    data coordinate, for an object that combines the states of all coordinates.
    """

    ranks: tuple[int, ...] = ()
    combined: DataCoordinates | None = None


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Which saved values one rank gets.

    `coordinate`, `count`: this rank's data coordinate and their number; rank and world if the mesh
    is unknown. `values`, `random_states`: the sources of all but random states, and of these.
    `reason`: why values are left out, for messages.

    Values are placed on all data coordinates or on none: with some of the positions, ranks would
    run out of data at different times, and wait for each other forever. Of random states, a new
    data coordinate keeps its own.
    """

    rank: int
    world: int
    coordinate: int
    count: int
    values: ValueSources = ValueSources()
    random_states: ValueSources = ValueSources()
    reason: str = ""


def place_rank(
    saved: RankLayout,
    current: RankLayout,
    rank: int,
    *,
    data_dims: Collection[str] | None = None,
    equal_shardings: bool = True,
) -> RankPlacement:
    """Return which saved values `rank` of the current layout gets.

    `equal_shardings`: whether tensors are sharded as at the save. It matters only where the mesh
    does not tell, because a dim is unnamed or unknown.
    """
    reason = f"saved by {saved}, loaded by {current}"
    saved, current = _comparable(saved, current, data_dims)
    saved_data, data = saved.data_coordinates(data_dims), current.data_coordinates(data_dims)
    coordinate, count = (data.coordinate(rank), data.count) if data else (rank, current.world)
    kept = RankPlacement(rank, current.world, coordinate, count, reason=reason)
    if saved_data is None or data is None or saved.mesh is None or current.mesh is None:
        if saved == current and (saved.mesh is None or equal_shardings):
            return _with_sources(kept, (rank,))
        if saved_data is data and saved.world != current.world:  # no mesh tells them apart
            by_rank = ValueSources(combined=DataCoordinates((MeshDim("", saved.world, 1),)))
            return replace(kept, values=by_rank, random_states=by_rank)
        differs = "with tensors that are sharded differently" if saved == current else ""
        unknown = "where it is unknown which mesh dims carry data"
        details = [differs, unknown] if saved.mesh and current.mesh else []
        return replace(kept, reason=", ".join(filter(None, [reason, *details])))
    same_rank = _rank_at_coordinates(saved.mesh, current.mesh, rank)
    if same_rank is not None:
        return _with_sources(kept, (same_rank,))
    peers = saved_data.ranks(coordinate) if coordinate < saved_data.count else ()
    if saved_data.count == data.count:
        reason = f"{reason}, and ranks that read the same data saved different values"
        return replace(_with_sources(kept, peers), reason=reason)
    return replace(
        kept,
        values=ValueSources(combined=saved_data),
        random_states=ValueSources(peers),
        reason=f"{reason}, which reads {data.count} instead of {saved_data.count} shares of data",
    )


def _with_sources(placement: RankPlacement, ranks: tuple[int, ...]) -> RankPlacement:
    sources = ValueSources(ranks)
    return replace(placement, values=sources, random_states=sources)


def _comparable(
    saved: RankLayout, current: RankLayout, data_dims: Collection[str] | None
) -> tuple[RankLayout, RankLayout]:
    """Return both layouts such that they have a mesh, or both have none, if they may.

    A DDP module may be passed without its wrapper, and one rank is also a mesh without dims.
    """
    if saved.mesh is None and current.mesh is not None:
        return _with_mesh(saved, current, data_dims)
    if current.mesh is None and saved.mesh is not None:
        return _with_mesh(current, saved, data_dims)[::-1]
    return saved, current


def _with_mesh(
    layout: RankLayout, other: RankLayout, data_dims: Collection[str] | None
) -> tuple[RankLayout, RankLayout]:
    """Return a layout without a mesh and another one, comparable."""
    if layout.world == 1 and other.data_coordinates(data_dims) is not None:
        return RankLayout(1, RankMesh(())), other
    if other.mesh is not None and [dim.name for dim in other.mesh.dims] == [DDP_DIM]:
        return layout, RankLayout(other.world)
    return layout, other


def _rank_at_coordinates(saved: RankMesh, current: RankMesh, rank: int) -> int | None:
    """Return the saved rank with the coordinates that `rank` has; None if the dims differ."""
    strides = {dim.name: (dim.size, dim.stride) for dim in saved.dims}
    sizes = {dim.name: dim.size for dim in current.dims}
    if {name: size for name, (size, _) in strides.items()} != sizes:
        return None
    return sum(rank // dim.stride % dim.size * strides[dim.name][1] for dim in current.dims)


def mesh_slice(
    members: Sequence[int], sizes: Sequence[int], position: int, dims: Collection[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members and sizes of a row-major mesh along some dims through a position.

    The other dims have size 1 in the slice.
    """
    steps = strides(sizes)
    axes = [
        range(size) if i in dims else (position // step % size,)
        for i, (size, step) in enumerate(zip(sizes, steps, strict=True))
    ]
    slice_members = tuple(
        members[sum(c * step for c, step in zip(coordinates, steps, strict=True))]
        for coordinates in product(*axes)
    )
    return slice_members, tuple(map(len, axes))

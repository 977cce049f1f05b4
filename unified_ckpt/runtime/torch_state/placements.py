"""Derives shardings from DTensor placements, device meshes and Layout rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from unified_ckpt.core.sharding.boxes import strides
from unified_ckpt.core.sharding.layouts import Layout, entry_names
from unified_ckpt.core.sharding.rank_mesh import mesh_slice
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.shards.carriers import chunk_rule, named_shards
from unified_ckpt.runtime.torch_state.shards.resolved import ResolvedTensor, resolve_shards
from unified_ckpt.runtime.torch_state.shards.shards import Shards
from unified_ckpt.runtime.torch_state.tensors import check_dense

# Shared by all plain tensors, so that it is compared and encoded once.
_REPLICATED = Sharding()


@dataclass(frozen=True, slots=True)
class _MeshInfo:
    """A device mesh: its ranks as this group counts them, row-major; -1 for ranks outside of it.

    `ascending`: for each mesh dim, whether the ranks ascend along it.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    members: tuple[int, ...]
    ascending: tuple[bool, ...]


def sharding_of(fqn: str, tensor: DTensor) -> Sharding:
    """Return the sharding of a DTensor whose ranks are not running, as its mesh counts them."""
    world = int(tensor.device_mesh.mesh.max()) + 1
    return ShardingResolver(0, range(world), None)._dtensor_sharding(fqn, tensor)


@dataclass(slots=True)
class ShardingResolver:
    """Resolves tensors for one rank of a group. Caches meshes, and records the Layout's matches."""

    rank: int
    ranks: Sequence[int]  # global rank of each index; meshes contain global ranks
    layout: Layout | None
    matched_patterns: set[str] = field(default_factory=set)
    # Mesh dim names -> sizes, for the manifest.
    mesh_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _shardings: dict[object, Sharding] = field(default_factory=dict)
    _mesh_infos: dict[DeviceMesh, _MeshInfo] = field(default_factory=dict)
    # DTensors without padding -> (shape, sharding, padded shape).
    _resolved_dtensors: dict[object, tuple[tuple[int, ...], Sharding, tuple[int, ...]]] = field(
        default_factory=dict
    )
    _without_layout: ShardingResolver | None = None

    @property
    def without_layout(self) -> ShardingResolver:
        """A resolver for tensors to which no Layout rule applies."""
        if self.layout is None:
            return self
        if self._without_layout is None:
            self._without_layout = ShardingResolver(
                self.rank, self.ranks, None, mesh_shapes=self.mesh_shapes
            )
        return self._without_layout

    def resolve(self, fqn: str, tensor: torch.Tensor | Shards) -> ResolvedTensor | None:
        """Return the shape, sharding and local tensor; None if the mesh excludes this rank.

        LayoutError if the sharding cannot be determined.
        """
        shards = named_shards(fqn, tensor)
        if shards is not None:
            rule = None if self.layout is None else self.layout.rule_for(fqn)
            return resolve_shards(fqn, shards, rule, chunk_rule(tensor, self.ranks))
        assert isinstance(tensor, torch.Tensor)
        if self.layout is None and not isinstance(tensor, DTensor):
            local = tensor.detach()
            check_dense(fqn, local)
            shape = tuple(local.shape)
            return ResolvedTensor(shape, _REPLICATED, local, shape)
        cache_key = None
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor.detach()
            if self.layout is None:  # most tensors of a model share few shapes and placements
                cache_key = _spec_key(tensor), tensor.shape, local.shape
                cached = self._resolved_dtensors.get(cache_key)
                if cached is not None:
                    check_dense(fqn, local)
                    return ResolvedTensor(cached[0], cached[1], local, cached[2])
            if tensor.device_mesh.get_coordinate() is None:
                return None
            dtensor_sharding = self._dtensor_sharding(fqn, tensor)
        else:
            dtensor_sharding, local = _REPLICATED, tensor.detach()
        check_dense(fqn, local)
        shape, shard_dims, padded_dims = self._apply_layout(fqn, tensor)
        sharding = (
            _nest_shardings(fqn, shard_dims, dtensor_sharding) if shard_dims else dtensor_sharding
        )
        try:
            local_shape = sharding.local_shape(self.rank, shape)
        except LayoutError as error:
            raise LayoutError(f"{fqn}: {error}; pass sections that add up to it") from error
        padded_shape = tuple(local.shape)
        if cache_key is not None and padded_shape == local_shape:
            self._resolved_dtensors[cache_key] = shape, sharding, padded_shape
        unpadded = _without_padding(fqn, local, local_shape, padded_dims)
        return ResolvedTensor(shape, sharding, unpadded, padded_shape)

    def _apply_layout(
        self, fqn: str, tensor: torch.Tensor
    ) -> tuple[tuple[int, ...], tuple[ShardDim, ...], set[int]]:
        """Return the global shape, the splits and the padded dims of a tensor by the Layout."""
        shape, shard_dims = tuple(tensor.shape), tuple[ShardDim, ...]()
        rule_dims, padded_dims = set[int](), set[int]()
        layout = self.layout
        if layout is None:
            return shape, shard_dims, padded_dims
        pattern, shape_pattern = layout.rule_for(fqn), layout.shape_for(fqn)
        self.matched_patterns.update(entry_names(pattern, shape_pattern))
        if pattern is not None:
            shard_dims = layout.shard_dims(pattern, len(shape))
            rule_dims = layout.sharded_dims(pattern, len(shape))
            if isinstance(tensor, DTensor):
                _check_disjoint_dims(fqn, pattern, layout, tensor)
        declared = None if shape_pattern is None else tuple(layout.shapes[shape_pattern])
        if declared is not None:
            padded_dims = _padded_dims(shape, declared, shard_dims, rule_dims)
        return *_global_shape(fqn, shape, shard_dims, declared, padded_dims), padded_dims

    def is_declared_slice(self, fqn: str, tensor: torch.Tensor) -> bool:
        """Return whether a plain tensor of one element is this rank's slice, as the Layout declares
        it by a rule and a global shape.
        """
        layout = self.layout or Layout({}, {})
        pattern, declared = layout.rule_for(fqn), layout.global_shape(fqn)
        if pattern is None or declared is None or len(declared) != tensor.dim():
            return False
        sharding = Sharding(layout.shard_dims(pattern, tensor.dim()))
        return all(size <= 1 for size in sharding.local_shape(self.rank, declared))

    @property
    def device_meshes(self) -> Collection[DeviceMesh]:
        """The meshes of all DTensors resolved so far."""
        return self._mesh_infos.keys()

    def check_alias(self, alias: str, stored: str) -> None:
        """Raise LayoutError if two names of one tensor have different Layout rules."""
        layout = self.layout or Layout({}, {})
        pattern, stored_pattern = layout.rule_for(alias), layout.rule_for(stored)
        if pattern is not None and (
            stored_pattern is None or layout.rules[stored_pattern] != layout.rules[pattern]
        ):
            conflict = "has none" if stored_pattern is None else f"has {stored_pattern!r}"
            raise LayoutError(
                f"{alias}: Layout rule {pattern!r} matches this alias of {stored}, which "
                f"{conflict}; pass equal rules for both names"
            )
        shape, stored_shape = layout.global_shape(alias), layout.global_shape(stored)
        if shape is not None and shape != stored_shape:
            raise LayoutError(
                f"{alias}: Layout shapes declare {shape} for this alias of {stored}, which has "
                f"{stored_shape or 'none'}; pass equal shapes for both names"
            )
        self.matched_patterns.update(entry_names(pattern, layout.shape_for(alias)))

    def _dtensor_sharding(self, fqn: str, tensor: DTensor) -> Sharding:
        key = _spec_key(tensor), tensor.dim()
        if key not in self._shardings:
            self._shardings[key] = self._derive_sharding(fqn, tensor)
        return self._shardings[key]

    def _derive_sharding(self, fqn: str, tensor: DTensor) -> Sharding:
        mesh, placements = self._mesh_info(tensor.device_mesh), tensor.placements
        sizes, names, members = mesh.sizes, mesh.names, mesh.members
        _check_default_order(fqn, tensor, sizes)
        order = _shard_order(fqn, placements, sizes, tensor.dim())
        if -1 in members:  # only some replicas are in the group
            sharded_dims = {i for i, _, _ in order}
            members, sizes = mesh_slice(members, sizes, members.index(self.rank), sharded_dims)
            if -1 in members:
                raise LayoutError(
                    f"{fqn}: its device mesh has ranks outside of the process group, which hold "
                    "other shards; pass a group that contains them"
                )
        for i in {i for i, _, _ in order}:
            if not mesh.ascending[i]:
                raise LayoutError(
                    f"{fqn}: the ranks of its device mesh do not ascend along dim {names[i] or i}, "
                    "which shards it; use ascending ranks, as torch's own collectives sort them"
                )
        rank_strides = _rank_strides(members, sizes, {i for i, _, _ in order})
        steps = rank_strides or strides(sizes)
        shard_dims = tuple(
            (dim, sizes[i], steps[i], sections, 0, names[i]) for i, dim, sections in order
        )
        return _sharding_of(shard_dims, members if rank_strides is None and shard_dims else ())

    def _mesh_info(self, mesh: DeviceMesh) -> _MeshInfo:
        if mesh not in self._mesh_infos:
            sizes, global_ranks, ascending = _mesh_ranks(mesh)
            names = mesh.mesh_dim_names or tuple("" for _ in sizes)
            self.mesh_shapes.setdefault(" ".join(n or "?" for n in names), sizes)
            index_of = {rank: i for i, rank in enumerate(self.ranks)}
            members = tuple(index_of.get(rank, -1) for rank in global_ranks)
            self._mesh_infos[mesh] = _MeshInfo(sizes, names, members, ascending)
        return self._mesh_infos[mesh]


@lru_cache(maxsize=16)
def _mesh_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]:
    """Return sizes, global ranks and `_MeshInfo.ascending`. torch computes them in 0.2 ms."""
    ranks, sizes = mesh.mesh, tuple(mesh.shape)
    ascending = tuple(not bool((ranks.diff(dim=i) < 0).any()) for i in range(len(sizes)))
    return sizes, tuple(ranks.flatten().tolist()), ascending


def _spec_key(tensor: DTensor) -> tuple[object, ...]:
    """Return what decides the sharding of a DTensor, besides its shape."""
    # `shard_order`: None if the placements say it
    return tensor.device_mesh, tensor.placements, tensor._spec.shard_order


def _check_default_order(fqn: str, tensor: DTensor, sizes: Sequence[int]) -> None:
    """Raise LayoutError for a dim that is sharded over mesh dims from right to left."""
    for entry in tensor._spec.shard_order or ():
        mesh_dims = [mesh_dim for mesh_dim in entry.mesh_dims if sizes[mesh_dim] > 1]
        if mesh_dims != sorted(mesh_dims):
            raise LayoutError(
                f"{fqn}: got dim {entry.tensor_dim} sharded over mesh dims {mesh_dims} in this "
                f"order, expected {sorted(mesh_dims)}; redistribute the tensor to Replicate, and "
                "then to its placements"
            )


@lru_cache(maxsize=4096)
def _sharding_of(shard_dims: tuple[tuple[Any, ...], ...], ranks: tuple[int, ...]) -> Sharding:
    """Return the same object for equal arguments, as plans are cached by sharding."""
    return Sharding(tuple(ShardDim(*fields) for fields in shard_dims), ranks)


def _padded_dims(
    local: tuple[int, ...],
    declared: tuple[int, ...],
    shard_dims: tuple[ShardDim, ...],
    dims: set[int],
) -> set[int]:
    """Return the dims in which a local tensor may be padded.

    These are sharded once, evenly, into shards at least as long as those of `torch.chunk`.
    """
    padded = set()
    for dim in dims if len(local) == len(declared) else ():
        dim_shards = [shard_dim for shard_dim in shard_dims if shard_dim.dim == dim]
        size = prod(shard_dim.size for shard_dim in dim_shards)
        at_most_once = not dim_shards or (len(dim_shards) == 1 and dim_shards[0].sections == 1)
        if at_most_once and local[dim] >= -(-declared[dim] // size):
            padded.add(dim)
    return padded


def _global_shape(
    fqn: str,
    local: tuple[int, ...],
    shard_dims: tuple[ShardDim, ...],
    declared: tuple[int, ...] | None,
    padded: set[int],
) -> tuple[tuple[int, ...], tuple[ShardDim, ...]]:
    """Return the global shape of a local shape, and the shard dims.

    Dims with longer shards than those of `torch.chunk` are marked by their `chunk_length`.
    """
    counts = [prod(c.size for c in shard_dims if c.dim == dim) for dim in range(len(local))]
    if declared is None:
        shape = tuple(size * count for size, count in zip(local, counts, strict=True))
        return shape, shard_dims
    if len(declared) != len(local):
        raise LayoutError(
            f"{fqn}: Layout shapes declare {declared}, but this rank's tensor has shape {local}; "
            "pass a shape with as many dims"
        )
    longer = {dim: local[dim] for dim in padded if local[dim] > -(-declared[dim] // counts[dim])}
    return declared, tuple(replace(cut, chunk_length=longer.get(cut.dim, 0)) for cut in shard_dims)


def _shard_order(
    fqn: str, placements: Sequence[object], sizes: Sequence[int], ndim: int
) -> list[tuple[int, int, int]]:
    """Return (mesh dim, tensor dim, sections) in the order in which the tensor was sharded.

    Plain `Shard`s apply in mesh order. `_StridedShard`s follow, right to left. If the split factor
    is the number of shards to its right, it is FSDP's chunk of what those left; any other
    interleaves that many sections. Source: `_StridedShard._split_tensor` and
    `FSDPParam._init_sharded_param` of torch 2.13.
    """
    plain, strided = [], []
    for i, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            dim, factor = placement.dim % ndim, int(placement.split_factor)
            right = zip(sizes[i + 1 :], placements[i + 1 :], strict=True)
            shards_to_right = prod(
                size
                for size, other in right
                if isinstance(other, Shard | _StridedShard) and other.dim % ndim == dim
            )
            strided.append((i, dim, 1 if factor == shards_to_right else factor))
        elif isinstance(placement, Shard):
            plain.append((i, placement.dim % ndim, 1))
        elif getattr(placement, "is_partial", lambda: False)():
            raise LayoutError(
                f"{fqn}: got placement {placement} on mesh dim {i}, expected Shard or Replicate; "
                "redistribute the tensor first"
            )
        elif not getattr(placement, "is_replicate", lambda: False)():
            raise LayoutError(
                f"{fqn}: got placement {placement} on mesh dim {i}, expected Shard or Replicate"
            )
    return [shard for shard in (*plain, *reversed(strided)) if sizes[shard[0]] > 1]


def _rank_strides(
    members: Sequence[int], sizes: Sequence[int], sharded_dims: set[int]
) -> list[int] | None:
    """Return strides such that `rank // stride % size` is the mesh coordinate; None if none exist.

    Only `sharded_dims` matter.
    """
    steps = strides(sizes)  # of positions in `members`
    rank_strides = [
        max(members[step] - members[0], 1) if size > 1 else 1
        for step, size in zip(steps, sizes, strict=True)
    ]
    for position, rank in enumerate(members):
        for i in sharded_dims:
            if rank // rank_strides[i] % sizes[i] != position // steps[i] % sizes[i]:
                return None
    return rank_strides


def _nest_shardings(fqn: str, outer: tuple[ShardDim, ...], inner: Sharding) -> Sharding:
    if outer and inner.ranks:
        raise LayoutError(
            f"{fqn}: a Layout rule matches a DTensor whose mesh is not a regular slice of the "
            "ranks; create the mesh with init_device_mesh"
        )
    return Sharding(outer + inner.shard_dims, inner.ranks)


def _check_disjoint_dims(fqn: str, pattern: str, layout: Layout, tensor: DTensor) -> None:
    mesh_dims = set(tensor.device_mesh.mesh_dim_names or ())
    shared = [name for name in layout.rules[pattern] if name in mesh_dims]
    if shared:
        raise LayoutError(
            f"{fqn}: Layout rule {pattern!r} names mesh dim(s) {', '.join(shared)} of the "
            "DTensor's own mesh; name only dims that it lacks"
        )


def _without_padding(
    fqn: str, local: torch.Tensor, expected: tuple[int, ...], padded: set[int]
) -> torch.Tensor:
    """Return the local tensor without padding. LayoutError if its shape does not fit."""
    if tuple(local.shape) == expected:
        return local
    if local.numel() == 0 and prod(expected) == 0:
        return local.reshape(expected)
    sizes = enumerate(zip(expected, local.shape, strict=False))
    fits = all(size == full or (dim in padded and size < full) for dim, (size, full) in sizes)
    if len(expected) == local.dim() and fits:
        return local[tuple(slice(size) for size in expected)]
    raise LayoutError(
        f"{fqn}: got a local tensor of shape {tuple(local.shape)}, expected {expected} from its "
        "placements; declare uneven or padded plain tensors with Layout(shapes={...}), and name "
        "padded dims in a rule"
    )


def make_resolver(comm: Comm, layout: Layout | None) -> ShardingResolver:
    """Return a resolver for this rank. LayoutError where the layout's mesh is not the world."""
    if not isinstance(layout, Layout | None):
        raise LayoutError(f"layout: got a {type(layout).__name__}, expected a Layout")
    if layout is not None:
        layout.check_world(comm.world)
    return ShardingResolver(comm.rank, comm.ranks, layout)

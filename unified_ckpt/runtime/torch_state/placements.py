"""From what torch says of a tensor to a rule: DTensor placements, Layout rules, device meshes in
canonical form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.comm.comm import Comm

_REPLICATED = Sharding()  # of all plain tensors: what is one object is compared and encoded once


@dataclass(frozen=True, slots=True)
class ResolvedTensor:
    """A tensor seen from one rank: its global shape, its rule, and the memory of this rank's part,
    without padding.

    `padded_shape`: the shape of what the rank has, padding included.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    local: torch.Tensor
    padded_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _MeshInfo:
    """A device mesh: its ranks as the call counts them, row-major, and along which dims they
    ascend.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    members: tuple[int, ...]
    ascending: tuple[bool, ...]


def sharding_of(fqn: str, tensor: DTensor) -> Sharding:
    """The rule of a DTensor of ranks that are not there, counted as its mesh counts them."""
    world = int(tensor.device_mesh.mesh.max()) + 1
    return ShardingResolver(0, range(world), None)._dtensor_sharding(fqn, tensor)


@dataclass(slots=True)
class ShardingResolver:
    """Places tensors for one rank of one world. Remembers meshes that it has seen, and which Layout
    rules applied.
    """

    rank: int
    ranks: Sequence[int]  # global rank of each index; meshes speak of global ranks
    layout: Layout | None
    matched_patterns: set[str] = field(default_factory=set)
    mesh_shapes: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # mesh dim names -> sizes, for people
    _shardings: dict[object, Sharding] = field(default_factory=dict)
    _local_shapes: dict[object, tuple[int, ...]] = field(default_factory=dict)
    _mesh_infos: dict[DeviceMesh, _MeshInfo] = field(default_factory=dict)
    _resolved_dtensors: dict[object, tuple[tuple[int, ...], Sharding, tuple[int, ...]]] = field(
        default_factory=dict
    )  # DTensors without padding
    _without_layout: ShardingResolver | None = None

    @property
    def without_layout(self) -> ShardingResolver:
        """A placer for what no Layout rule is about."""
        if self._without_layout is None:
            self._without_layout = (
                self
                if self.layout is None
                else ShardingResolver(self.rank, self.ranks, None, mesh_shapes=self.mesh_shapes)
            )
        return self._without_layout

    def resolve(self, fqn: str, tensor: torch.Tensor) -> ResolvedTensor | None:
        """Where the tensor sits; None for a DTensor whose mesh this rank is not in. LayoutError
        where it cannot be said.
        """
        if self.layout is None and not isinstance(tensor, DTensor):
            local = tensor.detach()
            _check_dense(fqn, local)
            shape = tuple(local.shape)
            return ResolvedTensor(shape, _REPLICATED, local, shape)
        cache_key = None
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor.detach()
            if self.layout is None:  # most of a model is many tensors of few kinds
                cache_key = tensor.device_mesh, tensor.placements, tensor.shape, local.shape
                cached = self._resolved_dtensors.get(cache_key)
                if cached is not None:
                    _check_dense(fqn, local)
                    return ResolvedTensor(cached[0], cached[1], local, cached[2])
            if tensor.device_mesh.get_coordinate() is None:
                return None
            dtensor_sharding = self._dtensor_sharding(fqn, tensor)
        else:
            dtensor_sharding, local = _REPLICATED, tensor.detach()
        _check_dense(fqn, local)
        shape, shard_dims, padded_dims = tuple(tensor.shape), tuple[ShardDim, ...](), set[int]()
        if self.layout is not None and (pattern := self.layout.rule_for(fqn)) is not None:
            self.matched_patterns.add(pattern)
            shard_dims = self.layout.shard_dims(pattern, len(shape))
            if isinstance(tensor, DTensor):
                _check_disjoint_dims(fqn, pattern, self.layout, tensor)
            declared = self.layout.global_shape(fqn)
            if declared is not None:
                padded_dims = _padded_dims(
                    shape, declared, shard_dims, self.layout.sharded_dims(pattern, len(shape))
                )
            shape, shard_dims = _global_shape(fqn, shape, shard_dims, declared, padded_dims)
        sharding = (
            _nest_shardings(fqn, shard_dims, dtensor_sharding) if shard_dims else dtensor_sharding
        )
        try:
            local_shape = self._local_shapes.get((sharding, shape))
            if local_shape is None:
                local_shape = self._local_shapes[sharding, shape] = sharding.local_shape(
                    self.rank, shape
                )
        except LayoutError as error:
            raise LayoutError(f"{fqn}: {error}; needed sections that make up the dim") from error
        padded_shape = tuple(local.shape)
        if cache_key is not None and padded_shape == local_shape:
            self._resolved_dtensors[cache_key] = shape, sharding, padded_shape
        return ResolvedTensor(
            shape, sharding, _without_padding(fqn, local, local_shape, padded_dims), padded_shape
        )

    def check_alias(self, alias: str, stored: str) -> None:
        """LayoutError where two names of one tensor have Layout rules that differ."""
        layout = self.layout or Layout({}, {})
        pattern, stored_pattern = layout.rule_for(alias), layout.rule_for(stored)
        if pattern is None:
            return
        if stored_pattern is None or layout.rules[stored_pattern] != layout.rules[pattern]:
            conflict = "there is none" if stored_pattern is None else f"{stored_pattern!r} differs"
            raise LayoutError(
                f"{alias}: Layout rule {pattern!r} is of the tensor {stored}, and {conflict} for that name; needed the same for both"
            )
        self.matched_patterns.add(pattern)

    def _dtensor_sharding(self, fqn: str, tensor: DTensor) -> Sharding:
        key = (tensor.device_mesh, tensor.placements, tensor.dim())
        if key not in self._shardings:
            self._shardings[key] = self._derive_sharding(fqn, tensor)
        return self._shardings[key]

    def _derive_sharding(self, fqn: str, tensor: DTensor) -> Sharding:
        mesh, placements = self._mesh_info(fqn, tensor.device_mesh), tensor.placements
        sizes, names, members = mesh.sizes, mesh.names, mesh.members
        order = _shard_order(fqn, placements, sizes, tensor.dim())
        for i in {i for i, _, _ in order}:
            if not mesh.ascending[i]:
                raise LayoutError(
                    f"{fqn}: the ranks of its device mesh do not ascend along dim {names[i] or i}, which shards it; needed ascending "
                    "ranks: torch's own collectives sort them"
                )
        strides = _strides(members, sizes, {i for i, _, _ in order})
        list_ranks = strides is None
        steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))] if strides is None else strides
        shard_dims = tuple(
            ShardDim(dim, sizes[i], steps[i], sections, 0, names[i]) for i, dim, sections in order
        )
        return Sharding(shard_dims, tuple(members) if list_ranks and shard_dims else ())

    def _mesh_info(self, fqn: str, mesh: DeviceMesh) -> _MeshInfo:
        if mesh not in self._mesh_infos:
            ranks, sizes = mesh.mesh, tuple(mesh.shape)
            names = mesh.mesh_dim_names or tuple("" for _ in sizes)
            self.mesh_shapes.setdefault(" ".join(n or "?" for n in names), sizes)
            index_of = {rank: i for i, rank in enumerate(self.ranks)}
            members = tuple(index_of.get(rank, -1) for rank in ranks.flatten().tolist())
            if -1 in members:
                raise LayoutError(
                    f"{fqn}: its device mesh has ranks outside the process group of this call; needed a group that holds them"
                )
            ascends = tuple(not bool((ranks.diff(dim=i) < 0).any()) for i in range(len(sizes)))
            self._mesh_infos[mesh] = _MeshInfo(sizes, names, members, ascends)
        return self._mesh_infos[mesh]


def _padded_dims(
    local: tuple[int, ...],
    declared: tuple[int, ...],
    shard_dims: tuple[ShardDim, ...],
    dims: set[int],
) -> set[int]:
    """The dims in which a part may be longer than what it holds: cut once, whole, into parts that
    are at least `torch.chunk`'s.
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
    """The global shape of a part of shape `local`, and the cuts, those into longer parts than
    `torch.chunk`'s marked.
    """
    if declared is None:
        return tuple(
            n * prod(c.size for c in shard_dims if c.dim == d) for d, n in enumerate(local)
        ), shard_dims
    if len(declared) != len(local):
        raise LayoutError(
            f"{fqn}: Layout shapes say {declared}, this rank's part has shape {local}; needed as many dims"
        )
    longer = {
        d: local[d]
        for d in padded
        if local[d] > -(-declared[d] // prod(c.size for c in shard_dims if c.dim == d))
    }
    return declared, tuple(replace(cut, chunk_length=longer.get(cut.dim, 0)) for cut in shard_dims)


def _shard_order(
    fqn: str, placements: Sequence[object], sizes: Sequence[int], ndim: int
) -> list[tuple[int, int, int]]:
    """(mesh dim, tensor dim, sections) in the order in which the cuts were made.

    Plain `Shard`s cut in mesh order. `_StridedShard`s come after, right to left: one whose split
    factor is the number of shards to its right is FSDP's ordinary chunk of what the right ones
    left; any other interleaves that many sections. Source:
    `_StridedShard._split_tensor` and `FSDPParam._init_sharded_param` of torch 2.13.
    """
    plain, strided = [], []
    for i in range(len(placements)):
        placement = placements[i]
        if isinstance(placement, _StridedShard):
            dim = placement.dim % ndim
            shards_to_right = prod(
                size
                for size, other in zip(sizes[i + 1 :], placements[i + 1 :], strict=True)
                if _shards_dim(other, dim, ndim)
            )
            sections = (
                1 if placement.split_factor == shards_to_right else int(placement.split_factor)
            )
            strided.append((i, dim, sections))
        elif isinstance(placement, Shard):
            plain.append((i, placement.dim % ndim, 1))
        elif getattr(placement, "is_partial", lambda: False)():
            raise LayoutError(
                f"{fqn}: placement {placement} on mesh dim {i}; needed Shard or Replicate; redistribute it before saving"
            )
        elif not getattr(placement, "is_replicate", lambda: False)():
            raise LayoutError(
                f"{fqn}: unknown placement {placement} on mesh dim {i}; needed Shard or Replicate"
            )
    return [shard for shard in (*plain, *reversed(strided)) if sizes[shard[0]] > 1]


def _shards_dim(placement: object, dim: int, ndim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim % ndim == dim


def _strides(
    members: Sequence[int], sizes: Sequence[int], sharded_dims: set[int]
) -> list[int] | None:
    """Strides by which `rank // stride % size` is the mesh coordinate on the cut dims, or None
    where no such numbers exist.
    """
    steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))]  # row-major positions in `members`
    strides = [
        max(members[step] - members[0], 1) if size > 1 else 1
        for step, size in zip(steps, sizes, strict=True)
    ]
    for position, rank in enumerate(members):
        for i in sharded_dims:
            if rank // strides[i] % sizes[i] != position // steps[i] % sizes[i]:
                return None
    return strides


def _nest_shardings(fqn: str, outer: tuple[ShardDim, ...], inner: Sharding) -> Sharding:
    if outer and inner.ranks:
        raise LayoutError(
            f"{fqn}: a Layout rule over a DTensor whose mesh is not a regular slice of the ranks; needed a mesh made by init_device_mesh"
        )
    return Sharding(outer + inner.shard_dims, inner.ranks)


def _check_disjoint_dims(fqn: str, pattern: str, layout: Layout, tensor: DTensor) -> None:
    mesh_dims = set(tensor.device_mesh.mesh_dim_names or ())
    shared = [name for name in layout.rules[pattern] if name in mesh_dims]
    if shared:
        raise LayoutError(
            f"{fqn}: Layout rule {pattern!r} names mesh dim(s) {', '.join(shared)}, which the DTensor's own mesh has; "
            "needed only dims that it lacks"
        )


def _check_dense(fqn: str, local: torch.Tensor) -> None:
    if local.device.type == "meta":
        raise LayoutError(
            f"{fqn}: is on the meta device and has no bytes; call `to_empty(device=...)` first"
        )
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        kind = "quantized" if local.is_quantized else "nested" if local.is_nested else local.layout
        raise LayoutError(f"{fqn}: is a {kind} tensor; needed a dense one")
    if local.is_conj() or local.is_neg():
        raise LayoutError(
            f"{fqn}: is a conjugate or negative view; needed its own values: call `resolve_conj().resolve_neg()`"
        )
    if type(local) is not torch.Tensor:
        raise LayoutError(
            f"{fqn}: is a {type(local).__name__}; needed a torch.Tensor, a Parameter or a DTensor of one"
        )


def check_not_expanded(fqn: str, local: torch.Tensor) -> None:
    """LayoutError for a target whose elements share memory: what is read into one would be read
    into others. It may be saved.
    """
    expanded = [dim for dim, size in enumerate(local.shape) if size > 1 and local.stride(dim) == 0]
    if expanded and local.numel():
        raise LayoutError(
            f"{fqn}: is expanded: its elements along dim {expanded[0]} of shape {tuple(local.shape)} are one in memory; needed memory for "
            "each, to be loaded into: call `contiguous()`"
        )


def _without_padding(
    fqn: str, local: torch.Tensor, expected: tuple[int, ...], padded: set[int]
) -> torch.Tensor:
    """The part without padding. LayoutError where the rule gives this rank another shape than it
    has.
    """
    if tuple(local.shape) == expected:
        return local
    if local.numel() == 0 and prod(expected) == 0:
        return local.reshape(expected)
    sizes = list(zip(expected, local.shape, strict=False))
    if len(expected) == local.dim() and all(
        n == m or (d in padded and n < m) for d, (n, m) in enumerate(sizes)
    ):
        return local[tuple(slice(n) for n in expected)]
    raise LayoutError(
        f"{fqn}: this rank's part has shape {tuple(local.shape)}, its placements give {expected}; needed equal; "
        "uneven or padded plain parts need Layout shapes={...}"
    )


def describe_meshes(resolver: ShardingResolver) -> Mapping[str, object]:
    """What the manifest records of the meshes at save. Nothing reads it back."""
    description: dict[str, object] = {"world_size": len(resolver.ranks)}
    if resolver.layout is not None:
        description["layout"] = dict(resolver.layout.mesh)
    if resolver.mesh_shapes:
        description["device_meshes"] = {
            names: list(sizes) for names, sizes in sorted(resolver.mesh_shapes.items())
        }
    return description


def _resolver(comm: Comm, layout: Layout | None) -> ShardingResolver:
    if layout is not None:
        layout.check_world(comm.world)
    return ShardingResolver(comm.rank, comm.ranks, layout)

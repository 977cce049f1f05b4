"""From what torch says of a tensor to a rule: DTensor placements, Layout rules, device meshes in canonical form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.shardings import Cut, Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.comm.comm import Comm

_REPLICATED = Sharding()  # of all plain tensors: what is one object is compared and encoded once


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor seen from one rank: its global shape, its rule, and the memory of this rank's part, without padding.

    `held`: the shape of what the rank has, padding included.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    local: torch.Tensor
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Grid:
    """A device mesh: its ranks as the call counts them, row-major, and along which dims they ascend."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    members: tuple[int, ...]
    ascends: tuple[bool, ...]


def rule_of(fqn: str, tensor: DTensor) -> Sharding:
    """The rule of a DTensor of ranks that are not there, counted as its mesh counts them."""
    world = int(tensor.device_mesh.mesh.max()) + 1
    return Placer(0, range(world), None)._dtensor_rule(fqn, tensor)


@dataclass(slots=True)
class Placer:
    """Places tensors for one rank of one world. Remembers meshes that it has seen, and which Layout rules applied."""

    rank: int
    ranks: Sequence[int]  # global rank of each index; meshes speak of global ranks
    layout: Layout | None
    matched: set[str] = field(default_factory=set)
    meshes: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # mesh dim names -> sizes, for people
    _rules: dict[object, Sharding] = field(default_factory=dict)
    _shapes: dict[object, tuple[int, ...]] = field(default_factory=dict)
    _grids: dict[DeviceMesh, _Grid] = field(default_factory=dict)
    _seen: dict[object, tuple[tuple[int, ...], Sharding, tuple[int, ...]]] = field(
        default_factory=dict
    )  # DTensors without padding
    _alone: Placer | None = None

    @property
    def without_layout(self) -> Placer:
        """A placer for what no Layout rule is about."""
        if self._alone is None:
            self._alone = (
                self
                if self.layout is None
                else Placer(self.rank, self.ranks, None, meshes=self.meshes)
            )
        return self._alone

    def place(self, fqn: str, tensor: torch.Tensor) -> Placed | None:
        """Where the tensor sits; None for a DTensor whose mesh this rank is not in. LayoutError where it cannot be said."""
        if self.layout is None and not isinstance(tensor, DTensor):
            local = tensor.detach()
            _refuse_unreal(fqn, local)
            shape = tuple(local.shape)
            return Placed(shape, _REPLICATED, local, shape)
        seen = None
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor.detach()
            if self.layout is None:  # most of a model is many tensors of few kinds
                seen = tensor.device_mesh, tensor.placements, tensor.shape, local.shape
                known = self._seen.get(seen)
                if known is not None:
                    _refuse_unreal(fqn, local)
                    return Placed(known[0], known[1], local, known[2])
            if tensor.device_mesh.get_coordinate() is None:
                return None
            inner = self._dtensor_rule(fqn, tensor)
        else:
            inner, local = _REPLICATED, tensor.detach()
        _refuse_unreal(fqn, local)
        shape, cuts, padded = tuple(tensor.shape), tuple[Cut, ...](), set[int]()
        if self.layout is not None and (pattern := self.layout.rule_for(fqn)) is not None:
            self.matched.add(pattern)
            cuts = self.layout.cuts(pattern, len(shape))
            if isinstance(tensor, DTensor):
                _check_apart(fqn, pattern, self.layout, tensor)
            declared = self.layout.global_shape(fqn)
            if declared is not None:
                padded = _padded_dims(shape, declared, cuts, self.layout.dims(pattern, len(shape)))
            shape, cuts = _global_shape(fqn, shape, cuts, declared, padded)
        sharding = _nested(fqn, cuts, inner) if cuts else inner
        try:
            derived = self._shapes.get((sharding, shape))
            if derived is None:
                derived = self._shapes[sharding, shape] = sharding.local_shape(self.rank, shape)
        except LayoutError as error:
            raise LayoutError(f"{fqn}: {error}; needed sections that make up the dim") from error
        held = tuple(local.shape)
        if seen is not None and held == derived:
            self._seen[seen] = shape, sharding, held
        return Placed(shape, sharding, _checked_local(fqn, local, derived, padded), held)

    def check_alias(self, alias: str, stored: str) -> None:
        """LayoutError where two names of one tensor have Layout rules that differ."""
        layout = self.layout or Layout({}, {})
        pattern, own = layout.rule_for(alias), layout.rule_for(stored)
        if pattern is None:
            return
        if own is None or layout.rules[own] != layout.rules[pattern]:
            said = "there is none" if own is None else f"{own!r} differs"
            raise LayoutError(
                f"{alias}: Layout rule {pattern!r} is of the tensor {stored}, and {said} for that name; needed the same for both"
            )
        self.matched.add(pattern)

    def _dtensor_rule(self, fqn: str, tensor: DTensor) -> Sharding:
        key = (tensor.device_mesh, tensor.placements, tensor.dim())
        if key not in self._rules:
            self._rules[key] = self._make_rule(fqn, tensor)
        return self._rules[key]

    def _make_rule(self, fqn: str, tensor: DTensor) -> Sharding:
        grid, placements = self._grid(fqn, tensor.device_mesh), tensor.placements
        sizes, names, members = grid.sizes, grid.names, grid.members
        order = _cut_order(fqn, placements, sizes, tensor.dim())
        for i in {i for i, _, _ in order}:
            if not grid.ascends[i]:
                raise LayoutError(
                    f"{fqn}: the ranks of its device mesh do not ascend along dim {names[i] or i}, which shards it; needed ascending "
                    "ranks: torch's own collectives sort them"
                )
        strides = _strides(members, sizes, {i for i, _, _ in order})
        literal = strides is None
        steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))] if strides is None else strides
        cuts = tuple(
            Cut(dim, sizes[i], steps[i], sections, 0, names[i]) for i, dim, sections in order
        )
        return Sharding(cuts, tuple(members) if literal and cuts else ())

    def _grid(self, fqn: str, mesh: DeviceMesh) -> _Grid:
        if mesh not in self._grids:
            ranks, sizes = mesh.mesh, tuple(mesh.shape)
            names = mesh.mesh_dim_names or tuple("" for _ in sizes)
            self.meshes.setdefault(" ".join(n or "?" for n in names), sizes)
            index_of = {rank: i for i, rank in enumerate(self.ranks)}
            members = tuple(index_of.get(rank, -1) for rank in ranks.flatten().tolist())
            if -1 in members:
                raise LayoutError(
                    f"{fqn}: its device mesh has ranks outside the process group of this call; needed a group that holds them"
                )
            ascends = tuple(not bool((ranks.diff(dim=i) < 0).any()) for i in range(len(sizes)))
            self._grids[mesh] = _Grid(sizes, names, members, ascends)
        return self._grids[mesh]


def _padded_dims(
    local: tuple[int, ...], declared: tuple[int, ...], cuts: tuple[Cut, ...], dims: set[int]
) -> set[int]:
    """The dims in which a part may be longer than what it holds: cut once, whole, into parts that are at least `torch.chunk`'s."""
    found = set()
    for dim in dims if len(local) == len(declared) else ():
        own = [cut for cut in cuts if cut.dim == dim]
        size = prod(cut.size for cut in own)
        once = not own or (len(own) == 1 and own[0].sections == 1)
        if once and local[dim] >= -(-declared[dim] // size):
            found.add(dim)
    return found


def _global_shape(
    fqn: str,
    local: tuple[int, ...],
    cuts: tuple[Cut, ...],
    declared: tuple[int, ...] | None,
    padded: set[int],
) -> tuple[tuple[int, ...], tuple[Cut, ...]]:
    """The global shape of a part of shape `local`, and the cuts, those into longer parts than `torch.chunk`'s marked."""
    if declared is None:
        return tuple(
            n * prod(c.size for c in cuts if c.dim == d) for d, n in enumerate(local)
        ), cuts
    if len(declared) != len(local):
        raise LayoutError(
            f"{fqn}: Layout shapes say {declared}, this rank's part has shape {local}; needed as many dims"
        )
    longer = {
        d: local[d]
        for d in padded
        if local[d] > -(-declared[d] // prod(c.size for c in cuts if c.dim == d))
    }
    return declared, tuple(replace(cut, step=longer.get(cut.dim, 0)) for cut in cuts)


def _cut_order(
    fqn: str, placements: Sequence[object], sizes: Sequence[int], ndim: int
) -> list[tuple[int, int, int]]:
    """(mesh dim, tensor dim, sections) in the order in which the cuts were made.

    Plain `Shard`s cut in mesh order. `_StridedShard`s come after, right to left: one whose split factor is the number of shards to
    its right is FSDP's ordinary chunk of what the right ones left; any other interleaves that many sections. Source:
    `_StridedShard._split_tensor` and `FSDPParam._init_sharded_param` of torch 2.13.
    """
    plain, strided = [], []
    for i in range(len(placements)):
        placement = placements[i]
        if isinstance(placement, _StridedShard):
            dim = placement.dim % ndim
            right = prod(
                size
                for size, other in zip(sizes[i + 1 :], placements[i + 1 :], strict=True)
                if _shards(other, dim, ndim)
            )
            sections = 1 if placement.split_factor == right else int(placement.split_factor)
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
    return [cut for cut in (*plain, *reversed(strided)) if sizes[cut[0]] > 1]


def _shards(placement: object, dim: int, ndim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim % ndim == dim


def _strides(members: Sequence[int], sizes: Sequence[int], cut_dims: set[int]) -> list[int] | None:
    """Strides by which `rank // stride % size` is the mesh coordinate on the cut dims, or None where no such numbers exist."""
    steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))]  # row-major positions in `members`
    strides = [
        max(members[step] - members[0], 1) if size > 1 else 1
        for step, size in zip(steps, sizes, strict=True)
    ]
    for position, rank in enumerate(members):
        for i in cut_dims:
            if rank // strides[i] % sizes[i] != position // steps[i] % sizes[i]:
                return None
    return strides


def _nested(fqn: str, outer: tuple[Cut, ...], inner: Sharding) -> Sharding:
    if outer and inner.ranks:
        raise LayoutError(
            f"{fqn}: a Layout rule over a DTensor whose mesh is not a regular slice of the ranks; needed a mesh made by init_device_mesh"
        )
    return Sharding(outer + inner.cuts, inner.ranks)


def _check_apart(fqn: str, pattern: str, layout: Layout, tensor: DTensor) -> None:
    taken = set(tensor.device_mesh.mesh_dim_names or ())
    both = [name for name in layout.rules[pattern] if name in taken]
    if both:
        raise LayoutError(
            f"{fqn}: Layout rule {pattern!r} names mesh dim(s) {', '.join(both)}, which the DTensor's own mesh has; "
            "needed only dims that it lacks"
        )


def _refuse_unreal(fqn: str, local: torch.Tensor) -> None:
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


def refuse_shared(fqn: str, local: torch.Tensor) -> None:
    """LayoutError for a target whose elements share memory: what is read into one would be read into others. It may be saved."""
    shared = [dim for dim, size in enumerate(local.shape) if size > 1 and local.stride(dim) == 0]
    if shared and local.numel():
        raise LayoutError(
            f"{fqn}: is expanded: its elements along dim {shared[0]} of shape {tuple(local.shape)} are one in memory; needed memory for "
            "each, to be loaded into: call `contiguous()`"
        )


def _checked_local(
    fqn: str, local: torch.Tensor, derived: tuple[int, ...], padded: set[int]
) -> torch.Tensor:
    """The part without padding. LayoutError where the rule gives this rank another shape than it has."""
    if tuple(local.shape) == derived:
        return local
    if local.numel() == 0 and prod(derived) == 0:
        return local.reshape(derived)
    sizes = list(zip(derived, local.shape, strict=False))
    if len(derived) == local.dim() and all(
        n == m or (d in padded and n < m) for d, (n, m) in enumerate(sizes)
    ):
        return local[tuple(slice(n) for n in derived)]
    raise LayoutError(
        f"{fqn}: this rank's part has shape {tuple(local.shape)}, its placements give {derived}; needed equal; "
        "uneven or padded plain parts need Layout shapes={...}"
    )


def mesh_for_people(placer: Placer) -> Mapping[str, object]:
    """What the manifest records of the meshes at save. Nothing reads it back."""
    found: dict[str, object] = {"world_size": len(placer.ranks)}
    if placer.layout is not None:
        found["layout"] = dict(placer.layout.mesh)
    if placer.meshes:
        found["device_meshes"] = {
            names: list(sizes) for names, sizes in sorted(placer.meshes.items())
        }
    return found


def _placer(comm: Comm, layout: Layout | None) -> Placer:
    if layout is not None:
        layout.check_world(comm.world)
    return Placer(comm.rank, comm.ranks, layout)

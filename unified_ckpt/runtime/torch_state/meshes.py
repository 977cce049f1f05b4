"""The device meshes of a rank's tensors: for people, and the one that all ranks form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from unified_ckpt.core.sharding.rank_mesh import DDP_DIM, MeshDim, RankMesh
from unified_ckpt.runtime.torch_state.placements import ShardingResolver


def describe_meshes(resolver: ShardingResolver) -> Mapping[str, object]:
    """Return what the manifest records about the meshes at save. Nothing reads it back."""
    description: dict[str, object] = {"world_size": len(resolver.ranks)}
    if resolver.layout is not None:
        description["layout"] = dict(resolver.layout.mesh)
    if resolver.mesh_shapes:
        mesh_shapes = sorted(resolver.mesh_shapes.items())
        description["device_meshes"] = {names: list(sizes) for names, sizes in mesh_shapes}
    return description


def rank_mesh(
    resolver: ShardingResolver,
    *,
    ddp_world: int = 1,
    data_dims: Collection[str] | None = None,
    saved: RankMesh | None = None,
) -> RankMesh | None:
    """Return the mesh of all ranks: the Layout's, or one of the resolved DTensors; None without.

    Meshes of some ranks do not count, but the mesh that they are slices of may. Of several, `saved`
    is preferred, then those of which all dims are known, then those with the most dims.
    `ddp_world`: the ranks of a DistributedDataParallel module.
    """
    world = len(resolver.ranks)
    if world == 1:
        return None
    if resolver.layout is not None:
        return RankMesh.row_major(resolver.layout.mesh.items())
    meshes = {each for mesh in resolver.device_meshes for each in (mesh, mesh._get_root_mesh())}
    candidates = {mesh for each in meshes if (mesh := _regular_mesh(each, resolver.ranks))}
    if saved in candidates:
        return saved

    def preference(mesh: RankMesh) -> tuple[bool, int, tuple[MeshDim, ...]]:
        return mesh.data_coordinates(data_dims) is not None, len(mesh.dims), mesh.dims

    by_ddp = RankMesh.row_major([(DDP_DIM, world)]) if ddp_world == world else None
    return max(candidates, key=preference, default=by_ddp)


def _regular_mesh(mesh: DeviceMesh, ranks: Sequence[int]) -> RankMesh | None:
    """Return a device mesh of all `ranks`, None for others and for ranks in an irregular order."""
    numbers, sizes = mesh.mesh, tuple(mesh.shape)
    if numbers.numel() != len(ranks):
        return None
    if ranks[0] != 0 or ranks[-1] != len(ranks) - 1:  # global ranks, as a subgroup has them
        position_of = {rank: position for position, rank in enumerate(ranks)}
        positions = [position_of.get(rank, -1) for rank in numbers.flatten().tolist()]
        numbers = torch.tensor(positions).reshape(sizes)
    origin = numbers.flatten()[0]
    strides = [
        int(numbers.select(dim, 1).flatten()[0] - origin) if size > 1 else 1
        for dim, size in enumerate(sizes)
    ]
    regular = torch.zeros(sizes, dtype=numbers.dtype)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        shape = [size if each == dim else 1 for each in range(len(sizes))]
        regular += stride * torch.arange(size, dtype=numbers.dtype).reshape(shape)
    if not torch.equal(regular, numbers):
        return None
    names = mesh.mesh_dim_names or ("",) * len(sizes)
    dims = (MeshDim(*fields) for fields in zip(names, sizes, strides, strict=True))
    try:
        return RankMesh(tuple(dim for dim in dims if dim.size > 1))
    except ValueError:  # a rank twice, which torch does not check
        return None

"""torchrun script: four processes place real DTensors. Each is compared with the slices of the
global tensor it was cut from.

Rank r writes `FOLDER/r.json`: case -> problems; an empty list if there were none.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel

import unified_ckpt as uc
from tests.support.processes.worker import started
from unified_ckpt.core.sharding.declarations import describe_sharding
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.rank_mesh import RankMesh
from unified_ckpt.core.sharding.shardings import Sharding, missing_coordinates
from unified_ckpt.errors import LayoutError, RankError
from unified_ckpt.runtime.comm.comm import from_torch
from unified_ckpt.runtime.torch_state.meshes import rank_mesh
from unified_ckpt.runtime.torch_state.placements import ShardingResolver

WORLD = 4
Problems = list[str]
CASES: dict[str, Callable[[int], Problems]] = {}


def case(act: Callable[[int], Problems]) -> Callable[[int], Problems]:
    CASES[act.__name__] = act
    return act


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


def compare(
    rank: int,
    label: str,
    tensor: torch.Tensor,
    whole: torch.Tensor,
    *,
    placer: ShardingResolver | None = None,
    everywhere: bool = True,
) -> Problems:
    """Compare a resolved tensor with the global tensor that it was cut from."""
    placed = (placer or ShardingResolver(rank, range(WORLD), None)).resolve("w", tensor)
    if placed is None:
        return [f"{label}: rank {rank} is said to be outside the mesh"]
    rule = f"{label}: rank {rank}: {describe_sharding(placed.sharding)}"
    if placed.shape != tuple(whole.shape):
        return [f"{rule}: global shape {placed.shape}, really {tuple(whole.shape)}"]
    actual = torch.full_like(placed.local, -1)
    for in_global, in_local in placed.sharding.boxes(rank, placed.shape):
        actual[slices(in_local)] = whole[slices(in_global)]
    problems = (
        []
        if torch.equal(actual, placed.local)
        else [f"{rule}: says {actual.tolist()}, really {placed.local.tolist()}"]
    )
    rules: list[Sharding] = [placed.sharding] * WORLD
    if everywhere:
        dist.all_gather_object(rules, placed.sharding)
        problems += [
            f"{rule}: rank {r} says {describe_sharding(other)}"
            for r, other in enumerate(rules)
            if other != placed.sharding
        ]
        problems += [
            f"{rule}: nobody holds {missing}"
            for missing in missing_coordinates(placed.sharding, range(WORLD))
        ]
    return problems


def slices(box: object) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))  # type: ignore[attr-defined]


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut a DTensor from a tensor that every rank has. Nothing is sent, and uneven strided shards
    work.
    """
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


NONE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


# ranks of a mesh, by its dims; shapes of tensors; placements of each
MESHES: list[tuple[list[Any], list[tuple[int, ...]], Sequence[Sequence[Placement]]]] = [
    (
        [0, 1, 2, 3],
        [(8, 4), (5, 3), (3, 9), (1, 1), (4, 0, 4)],
        [[NONE], [ROWS], [COLUMNS], [Shard(-1)], [strided(0, 2)]],
    ),
    (
        [[0, 1], [2, 3]],
        [(8, 8), (5, 7), (3, 2)],
        list(product([NONE, ROWS, COLUMNS], [NONE, ROWS, COLUMNS])),
    ),
    (
        [[0, 1], [2, 3]],
        [(8, 8), (16, 12), (9, 7), (3, 5)],
        [
            [strided(0, 2), ROWS],
            [strided(0, 2), COLUMNS],
            [strided(0, 2), NONE],
            [NONE, strided(0, 2)],
            [COLUMNS, strided(0, 2)],
            [strided(1, 4), ROWS],
            [strided(1, 3), NONE],
        ],
    ),
    *(
        (
            ranks,
            [(8, 4), (5, 3)],
            [[ROWS] * dims, [COLUMNS] * dims, [Shard(i % 2) for i in range(dims)]],
        )
        for ranks, dims in (
            ([[0, 1, 2, 3]], 2),
            ([[0], [1], [2], [3]], 2),
            ([[[0, 1]], [[2, 3]]], 3),
            ([[[0, 1], [2, 3]]], 3),
        )
    ),
    (
        [[0, 2], [1, 3]],
        [(8, 8), (5, 7)],
        [[ROWS, COLUMNS], [ROWS, ROWS], [ROWS, NONE], [NONE, COLUMNS], [NONE, NONE]],
    ),
    (  # no stride gives these coordinates
        [[0, 3], [1, 2]],
        [(8, 8), (5, 7)],
        [[NONE, ROWS], [NONE, COLUMNS], [NONE, NONE]],
    ),
]


@case
def placements_on_meshes(rank: int) -> Problems:
    problems = []
    for ranks, shapes, placements in MESHES:
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        for shape, placement in product(shapes, placements):
            whole, label = numbered(*shape), f"{placement} of {shape} over {ranks}"
            problems += compare(rank, label, cut(whole, mesh, placement), whole)
    return problems


@case
def descending_meshes(rank: int) -> Problems:
    """Torch's collectives sort the ranks of a group; mesh coordinates do not. Only the gathered
    tensor shows its contents.
    """
    problems = []
    for ranks in ([[3, 2], [1, 0]], [[1, 0], [2, 3]], [[1, 3], [0, 2]], [[0, 3], [1, 2]]):
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        for placement in ([Shard(0), Shard(1)], [Shard(0), Replicate()]):
            tensor = distribute_tensor(numbered(4, 4), mesh, placement)
            try:
                problems += compare(
                    rank,
                    f"{placement} over {ranks}",
                    tensor,
                    tensor.full_tensor(),
                    everywhere=False,
                )
            except LayoutError:
                continue  # a refusal of such a mesh is right, too
    return problems


@case
def sub_meshes(rank: int) -> Problems:
    problems = []
    for ranks in ([1, 3], [0, 1], [0, 3], [0, 1, 3], [1, 2, 3]):
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        whole = numbered(5, 3)
        tensor = cut(whole, mesh, [Shard(0)])
        if rank in ranks:
            problems += compare(rank, f"ranks {ranks}", tensor, whole, everywhere=False)
        elif ShardingResolver(rank, range(WORLD), None).resolve("w", tensor) is not None:
            problems.append(f"rank {rank} is not in a mesh of {ranks}")
    return problems


@case
def slices_of_a_mesh(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    whole = numbered(6, 5)
    return compare(rank, "tp of (pp, tp)", cut(whole, mesh["tp"], [Shard(0)]), whole)


def pieces(
    rank: int, label: str, module: nn.Module, full_tensors: dict[str, torch.Tensor]
) -> Problems:
    state = module.state_dict()
    return [
        text
        for fqn, full in full_tensors.items()
        for text in compare(rank, f"{label} {fqn}", state[fqn], full)
    ]


def layers(shapes: Sequence[tuple[int, int]]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Linear layers with numbered weights, and their whole state."""
    module = nn.Sequential(*(nn.Linear(columns, rows) for rows, columns in shapes))
    for parameter in module.parameters():
        parameter.data.copy_(numbered(*parameter.shape))
    return module, {fqn: tensor.clone() for fqn, tensor in module.state_dict().items()}


@case
def fsdp2_over_columns(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    module, full_tensors = layers([(5, 8), (3, 4)])
    fully_shard(
        module, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0)
    )
    return pieces(rank, "fsdp", module, full_tensors)


@case
def fsdp2_over_packed_tensor_parallel(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    problems = []
    for rows, split_factor in [(16, 2), (24, 3), (16, 4), (8, 2), (12, 2), (20, 2)]:
        module, full_tensors = layers([(rows, 3)])
        for name in ("weight", "bias"):
            packed = cut(
                full_tensors[f"0.{name}"], mesh["tp"], [_StridedShard(0, split_factor=split_factor)]
            )
            module[0].register_parameter(name, nn.Parameter(packed))  # type: ignore[index]
        problems += pieces(
            rank,
            f"{split_factor} packed in {rows} rows",
            fully_shard(module, mesh=mesh["dp"]),
            full_tensors,
        )
    return problems


@case
def fsdp2_over_packed_columns(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module, full_tensors = layers([(6, 16)])
    packed = cut(full_tensors["0.weight"], mesh["tp"], [_StridedShard(1, split_factor=2)])
    module[0].weight = nn.Parameter(packed)  # type: ignore[index,union-attr]
    module[0].bias = nn.Parameter(cut(full_tensors["0.bias"], mesh["tp"], [Replicate()]))  # type: ignore[index,union-attr]
    return pieces(rank, "packed columns", fully_shard(module, mesh=mesh["dp"]), full_tensors)


@case
def experts(rank: int) -> Problems:
    """Experts over one mesh dim, FSDP over the rows of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    whole = numbered(4, 6, 3)
    module = nn.Module()
    module.experts = nn.Parameter(cut(whole, mesh["ep"], [Shard(0)]))
    fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(1))
    return pieces(rank, "experts", module, {"experts": whole})


@case
def layout_rules_name_other_mesh_dims(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layout = Layout(mesh={"dp": 2, "tp": 2}, rules={"w": {"tp": 0}})
    tensor = cut(numbered(4, 4), mesh["tp"], [Shard(1)])
    text = "w: Layout rule 'w' names mesh dim(s) tp of the DTensor's own mesh"
    return raised(text, lambda: ShardingResolver(rank, range(WORLD), layout).resolve("w", tensor))


def raised(text: str, act: Callable[[], object], kind: type[Exception] = LayoutError) -> Problems:
    try:
        act()
    except kind as error:
        return [] if text in str(error) else [f"needed {text!r}, got {error}"]
    return [f"needed {text!r}, got no error"]


@case
def partial_sums_are_refused(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = DTensor.from_local(numbered(2, 2), mesh, [Shard(0), Partial()])
    text = "on mesh dim 1, expected Shard or Replicate; redistribute the tensor first"
    return raised(text, lambda: ShardingResolver(rank, range(WORLD), None).resolve("w", tensor))


@case
def meshes_name_global_ranks(rank: int) -> Problems:
    """In a call of a subgroup, positions count inside the group; meshes use global ranks."""
    members = (1, 3)
    group = dist.new_group(list(members))
    mesh = DeviceMesh("cpu", torch.tensor(members))
    whole = numbered(5, 3)
    tensor = cut(whole, mesh, [Shard(0)])
    if rank not in members:
        return raised(
            f"process group: rank {rank} is not a member", lambda: from_torch(group), RankError
        )
    comm = from_torch(group)
    if (comm.rank, comm.ranks, comm.world) != (members.index(rank), members, 2):
        return [f"comm of {members} says {comm.rank} of {comm.ranks}"]
    comm.begin_collective("save", cached=True, timeout_seconds=30).finish_step("written")
    placer = ShardingResolver(comm.rank, comm.ranks, None)
    problems = compare(
        comm.rank, "group of 1 and 3", tensor, whole, placer=placer, everywhere=False
    )
    return problems + raised(
        "w: its device mesh has ranks outside of the process group",
        lambda: ShardingResolver(0, (rank,), None).resolve("w", tensor),
    )


@case
def groups_of_one_replica(rank: int) -> Problems:
    """A group that holds some replicas of each shard; the mesh has the others too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    problems = []
    for placements, groups in (
        ([NONE, ROWS], [(0, 1), (2, 3)]),
        ([COLUMNS, NONE], [(0, 2), (1, 3)]),
        ([NONE, NONE], [(0,), (1, 2), (0, 1, 3)]),
    ):
        for ranks in groups:
            if rank in ranks:
                placer, whole = ShardingResolver(ranks.index(rank), ranks, None), numbered(5, 7)
                tensor = cut(whole, mesh, placements)
                problems += compare(
                    *(placer.rank, f"{placements} in {ranks}", tensor, whole),
                    placer=placer,
                    everywhere=False,
                )
    outside = ShardingResolver(0, (rank, rank ^ 2), None)
    return problems + raised(
        "which hold other shards", lambda: outside.resolve("w", cut(whole, mesh, [NONE, ROWS]))
    )


@case
def shards_in_another_order(rank: int) -> Problems:
    """A dim cut by mesh dim 1, then by 0. No public call of torch 2.13 makes such a tensor."""
    mesh, whole = init_device_mesh("cpu", (2, 2)), numbered(8, 3)
    default = cut(whole, mesh, [Shard(0), Shard(0)])
    spec = default._spec
    (entry,) = spec.shard_order
    other = copy.copy(spec)
    other.shard_order = (entry._replace(mesh_dims=(1, 0)),)
    row, column = mesh.get_coordinate() or (0, 0)
    tensor = DTensor(whole.chunk(2)[column].chunk(2)[row].clone(), other, requires_grad=False)
    problems = [] if torch.equal(tensor.full_tensor(), whole) else ["torch reads other rows"]
    placer = ShardingResolver(rank, range(WORLD), None)
    problems += compare(rank, "default order", default, whole, placer=placer)
    expected = "w: got dim 0 sharded over mesh dims [1, 0] in this order, expected [0, 1]"
    problems += raised(expected, lambda: placer.resolve("w", tensor))
    layout = Layout(mesh={"x": 2, "y": 2}, rules={"other": {"x": 0}})
    problems += raised(
        expected, lambda: ShardingResolver(rank, range(WORLD), layout).resolve("w", tensor)
    )
    way_out = tensor.redistribute(placements=[Replicate(), Replicate()])
    way_out = way_out.redistribute(placements=tensor.placements)
    return problems + compare(rank, "way out", way_out, whole, placer=placer)


@case
def mesh_shapes_for_messages(rank: int) -> Problems:
    placer = ShardingResolver(rank, range(WORLD), None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(3):
        placer.resolve("w", cut(numbered(4, 4), mesh, [Shard(0), Replicate()]))
    return [] if placer.mesh_shapes == {"dp tp": (2, 2)} else [str(placer.mesh_shapes)]


@case
def meshes_of_all_ranks(rank: int) -> Problems:
    """The mesh that all ranks form, of tensors on meshes of some ranks, slices and flat meshes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    by_ranks = {
        names: DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names.split())
        for names, ranks in (("tp dp", [[0, 2], [1, 3]]), ("dp", [0, 2, 1, 3]))
    }
    world = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("world",))
    unnamed = init_device_mesh("cpu", (WORLD,))
    halves = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3])]
    problems = []
    for label, meshes, expected in (
        ("a slice", [mesh["tp"]], [("dp", 2, 2), ("tp", 2, 1)]),
        ("a flattened slice", [mesh["dp", "tp"]._flatten("all")], [("dp", 2, 2), ("tp", 2, 1)]),
        ("known names", [world, mesh["dp"], unnamed], [("dp", 2, 2), ("tp", 2, 1)]),
        ("columns", [by_ranks["tp dp"]], [("tp", 2, 1), ("dp", 2, 2)]),
        ("no strides", [by_ranks["dp"]], None),
        ("no names", [unnamed], [("", 4, 1)]),
        ("one dim", [init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))], [("dp", 4, 1)]),
        ("some ranks", [halves[rank // 2]], None),
    ):
        placer = ShardingResolver(rank, range(WORLD), None)
        for each in meshes:
            placer.resolve("w", cut(numbered(4, 4), each, [NONE] * each.ndim))
        made = rank_mesh(placer)
        dims = None if made is None else [tuple(dim) for dim in made.dims]
        if dims != expected:
            problems.append(f"{label}: got {dims}, expected {expected}")
    saved = RankMesh.row_major([("", WORLD)])
    placer.resolve("v", cut(numbered(4, 4), unnamed, [Shard(0)]))
    placer.resolve("u", cut(numbered(4, 4), mesh, [Shard(0), Shard(1)]))
    if rank_mesh(placer, saved=saved) != saved:
        problems.append("the saved mesh is preferred")
    return problems


class Position:
    """A position in the data."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def on_mesh(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if kind == "ddp":
        return DistributedDataParallel(model)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    if kind == "unnamed tp":
        return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
    if kind == "unnamed":
        return fully_shard(model)
    if kind == "dp":
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        return fully_shard(model, mesh=mesh)
    names = ("dp", "tp") if kind == "dp tp" else ("tp", "dp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"]) if kind == "dp tp" else model


@case
def rank_extra_on_another_mesh(rank: int) -> Problems:
    """Ranks that read the same data get equal positions, or keep theirs and are told."""
    problems = []
    saved_ranks = {"dp tp": [0, 0, 1, 1]}  # what they store; by rank elsewhere
    for saved, current, expected in (
        ("dp", "dp", [0, 1, 2, 3]),
        ("dp", "ddp", [0, 1, 2, 3]),
        ("ddp", "dp", [0, 1, 2, 3]),
        ("dp", "dp tp", None),
        ("dp tp", "dp tp", [0, 0, 1, 1]),
        ("dp tp", "tp dp", [0, 1, 0, 1]),
        ("dp tp", "dp", None),
        ("unnamed", "unnamed", [0, 1, 2, 3]),
        ("unnamed", "unnamed tp", None),
        ("unnamed tp", "unnamed tp", [0, 1, 2, 3]),
    ):
        path = Path(sys.argv[1], f"{saved} {current}".replace(" ", "-"))
        extra = {"loader": Position(saved_ranks.get(saved, [0, 1, 2, 3])[rank])}
        uc.save(path, model=on_mesh(saved), rank_extra=extra, options=uc.SaveOptions(fsync=False))
        target = Position(-1)
        report = uc.load(path, model=on_mesh(current), rank_extra={"loader": target})
        kept = report.kept == ("rank_extra.loader",)
        value = None if expected is None else expected[rank]
        if (target.value, kept) != ((-1, True) if value is None else (value, False)):
            problems.append(
                f"{saved} -> {current}: {target.value}, expected {value}; {report.notes}"
            )
        if (report.rank_extra or {"loader": {"value": None}})["loader"] != {"value": value}:
            problems.append(f"{saved} -> {current}: the report has {report.rank_extra}")
    return problems


class Renamed(nn.Module):
    """Reads `old` into `new`, and doubles `first`, by a method of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.loads = nn.Linear(5, 7), 0
        self.add_module(name, nn.Linear(7, 3))

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        self.loads += 1
        state = {name.replace("old.", "new."): value for name, value in state_dict.items()}
        state["first.weight"] = state["first.weight"] * 2
        return super().load_state_dict(state, strict=strict)


@case
def modules_that_load_themselves(rank: int) -> Problems:
    """Their method gets DTensors under FSDP2, also of names that the module does not have."""
    mesh, path = init_device_mesh("cpu", (WORLD,)), Path(sys.argv[1], "renamed")
    torch.manual_seed(0)
    saved = Renamed("old")
    uc.save(path, model=saved, options=uc.SaveOptions(fsync=False))
    target = Renamed("new")
    fully_shard(target, mesh=mesh)
    uc.load(path, model=target)
    problems = [] if target.loads == 1 else [f"rank {rank}: {target.loads} loads"]
    for name, tensor in target.state_dict().items():
        expected = saved.state_dict()[name.replace("new.", "old.")]
        expected = expected * 2 if name == "first.weight" else expected
        if not torch.equal(tensor.full_tensor(), expected):
            problems.append(f"rank {rank}: {name} is wrong")
    return problems


def results(rank: int) -> Iterator[tuple[str, Problems]]:
    for name, act in CASES.items():
        try:
            problems = act(rank)
        except Exception:
            problems = [traceback.format_exc()]
        dist.barrier()
        yield name, problems


def main() -> None:
    with started() as (rank, _):
        warnings.simplefilter("ignore")
        Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(dict(results(rank))))


if __name__ == "__main__":
    main()

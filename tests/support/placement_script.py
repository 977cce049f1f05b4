"""Four gloo processes that place real DTensors and compare each with the slices of the global
tensor that it was made from.

Run as a script: `placing.py FOLDER`. Rank r writes `FOLDER/r.json`: case -> what was found wrong,
empty when nothing was.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import product
from math import prod
from pathlib import Path

import torch

# DTensor imports it at its first operation: once here, not once in each process
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.multiprocessing import start_processes

from unified_ckpt.core.sharding.declarations import describe_sharding
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.shardings import Sharding, missing_coordinates
from unified_ckpt.errors import LayoutError, RankError
from unified_ckpt.runtime.comm.comm import from_torch
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
    what: str,
    tensor: torch.Tensor,
    whole: torch.Tensor,
    *,
    placer: ShardingResolver | None = None,
    everywhere: bool = True,
) -> Problems:
    """What the placed tensor says, against the tensor that it was cut from."""
    placed = (placer or ShardingResolver(rank, range(WORLD), None)).resolve("w", tensor)
    if placed is None:
        return [f"{what}: rank {rank} is said to be outside the mesh"]
    rule = f"{what}: rank {rank}: {describe_sharding(placed.sharding)}"
    if placed.shape != tuple(whole.shape):
        return [f"{rule}: global shape {placed.shape}, really {tuple(whole.shape)}"]
    found = torch.full_like(placed.local, -1)
    for in_global, in_local in placed.sharding.boxes(rank, placed.shape):
        found[slices(in_local)] = whole[slices(in_global)]
    problems = (
        []
        if torch.equal(found, placed.local)
        else [f"{rule}: says {found.tolist()}, really {placed.local.tolist()}"]
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
    """The DTensor that torch makes of a tensor which every rank has: nothing is sent, and uneven
    strided shards work too.
    """
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


def spread(
    rank: int,
    mesh: DeviceMesh,
    shapes: Sequence[tuple[int, ...]],
    placements: Sequence[Sequence[Placement]],
) -> Problems:
    problems = []
    for shape, one in product(shapes, placements):
        whole = numbered(*shape)
        problems += compare(rank, f"{one} of {shape}", cut(whole, mesh, one), whole)
    return problems


@case
def one_mesh_dim(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    shapes = [(8, 4), (5, 3), (3, 9), (1, 1), (4, 0, 4)]
    return spread(
        rank,
        mesh,
        shapes,
        [[Replicate()], [Shard(0)], [Shard(1)], [Shard(-1)], [_StridedShard(0, split_factor=2)]],
    )


@case
def two_mesh_dims(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    each = [Replicate(), Shard(0), Shard(1)]
    return spread(rank, mesh, [(8, 8), (5, 7), (3, 2)], list(product(each, each)))


@case
def strided_shards_of_two_mesh_dims(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    strided = _StridedShard(0, split_factor=2)
    placements: list[list[Placement]] = [
        [strided, Shard(0)],
        [strided, Shard(1)],
        [strided, Replicate()],
        [Replicate(), strided],
    ]
    placements += [
        [Shard(1), strided],
        [_StridedShard(1, split_factor=4), Shard(0)],
        [_StridedShard(1, split_factor=3), Replicate()],
    ]
    return spread(rank, mesh, [(8, 8), (16, 12), (9, 7), (3, 5)], placements)


@case
def mesh_dims_of_one(rank: int) -> Problems:
    problems = []
    for sizes in [(1, 4), (4, 1), (2, 1, 2), (1, 2, 2)]:
        mesh = init_device_mesh("cpu", sizes)
        each: list[list[Placement]] = [
            [Shard(0)] * len(sizes),
            [Shard(1)] * len(sizes),
            [Shard(i % 2) for i in range(len(sizes))],
        ]
        problems += spread(rank, mesh, [(8, 4), (5, 3)], each)
    return problems


@case
def permuted_meshes(rank: int) -> Problems:
    none = Replicate()
    regular = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("a", "b"))
    placements = [
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Shard(0), none],
        [none, Shard(1)],
        [none, none],
    ]
    problems = spread(rank, regular, [(8, 8), (5, 7)], placements)
    listed = DeviceMesh(
        "cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("a", "b")
    )  # no stride gives these coordinates
    return problems + spread(
        rank, listed, [(8, 8), (5, 7)], [[none, Shard(0)], [none, Shard(1)], [none, none]]
    )


@case
def descending_meshes(rank: int) -> Problems:
    """Torch's collectives sort the ranks of a group and its coordinates do not, so only what it
    gathers says what the tensor is.
    """
    problems = []
    for ranks in ([[3, 2], [1, 0]], [[1, 0], [2, 3]], [[1, 3], [0, 2]], [[0, 3], [1, 2]]):
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        for one in ([Shard(0), Shard(1)], [Shard(0), Replicate()]):
            tensor = distribute_tensor(numbered(4, 4), mesh, one)
            try:
                problems += compare(
                    rank, f"{one} over {ranks}", tensor, tensor.full_tensor(), everywhere=False
                )
            except LayoutError:
                continue  # to refuse such a mesh is right, too
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


def pieces(rank: int, what: str, module: nn.Module, wholes: dict[str, torch.Tensor]) -> Problems:
    state = module.state_dict()
    return [
        text
        for fqn, whole in wholes.items()
        for text in compare(rank, f"{what} {fqn}", state[fqn], whole)
    ]


def layers(shapes: Sequence[tuple[int, int]]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Linear layers with numbered weights, and their whole state."""
    module = nn.Sequential(*(nn.Linear(columns, rows) for rows, columns in shapes))
    for parameter in module.parameters():
        parameter.data.copy_(numbered(*parameter.shape))
    return module, {fqn: tensor.clone() for fqn, tensor in module.state_dict().items()}


@case
def fsdp2(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    module, wholes = layers([(8, 4), (5, 3), (3, 7), (1, 2), (9, 1)])
    return pieces(rank, "fsdp", fully_shard(module, mesh=mesh), wholes)


@case
def fsdp2_over_columns(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    module, wholes = layers([(5, 8), (3, 4)])
    fully_shard(
        module, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0)
    )
    return pieces(rank, "fsdp", module, wholes)


@case
def hsdp(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module, wholes = layers([(8, 4), (5, 3), (1, 7)])
    return pieces(rank, "hsdp", fully_shard(module, mesh=mesh), wholes)


@case
def tensor_parallel(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    module, wholes = layers([(8, 4), (4, 8), (6, 5), (5, 6)])
    plan = {
        "0": ColwiseParallel(),
        "1": RowwiseParallel(),
        "2": ColwiseParallel(),
        "3": RowwiseParallel(),
    }
    return pieces(rank, "tp", parallelize_module(module, mesh, plan), wholes)


@case
def fsdp2_and_tensor_parallel(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module, wholes = layers([(8, 4), (4, 8), (12, 5), (7, 12)])
    plan = {
        "0": ColwiseParallel(),
        "1": RowwiseParallel(),
        "2": ColwiseParallel(),
        "3": RowwiseParallel(),
    }
    parallelize_module(module, mesh["tp"], plan)
    return pieces(rank, "fsdp x tp", fully_shard(module, mesh=mesh["dp"]), wholes)


@case
def fsdp2_and_tensor_parallel_uneven(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module, wholes = layers([(9, 4), (7, 3), (3, 3), (1, 2)])
    parallelize_module(module, mesh["tp"], {str(i): ColwiseParallel() for i in range(4)})
    return pieces(rank, "fsdp x tp", fully_shard(module, mesh=mesh["dp"]), wholes)


@case
def fsdp2_over_packed_tensor_parallel(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    problems = []
    for rows, split_factor in [(16, 2), (24, 3), (16, 4), (8, 2), (12, 2), (20, 2)]:
        module, wholes = layers([(rows, 3)])
        for name in ("weight", "bias"):
            packed = cut(
                wholes[f"0.{name}"], mesh["tp"], [_StridedShard(0, split_factor=split_factor)]
            )
            module[0].register_parameter(name, nn.Parameter(packed))  # type: ignore[index]
        problems += pieces(
            rank,
            f"{split_factor} packed in {rows} rows",
            fully_shard(module, mesh=mesh["dp"]),
            wholes,
        )
    return problems


@case
def fsdp2_over_packed_columns(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module, wholes = layers([(6, 16)])
    packed = cut(wholes["0.weight"], mesh["tp"], [_StridedShard(1, split_factor=2)])
    module[0].weight = nn.Parameter(packed)  # type: ignore[index,union-attr]
    module[0].bias = nn.Parameter(cut(wholes["0.bias"], mesh["tp"], [Replicate()]))  # type: ignore[index,union-attr]
    return pieces(rank, "packed columns", fully_shard(module, mesh=mesh["dp"]), wholes)


@case
def experts(rank: int) -> Problems:
    """Experts over one mesh dim, FSDP over the rows of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    whole = numbered(4, 6, 3)
    module = nn.Module()
    module.experts = nn.Parameter(cut(whole, mesh["ep"], [Shard(0)]))
    fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(1))
    return pieces(rank, "experts", module, {"experts": whole})


def split_by_hand(
    rank: int, rule: dict[str, object], part: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh
) -> Problems:
    module = nn.Module()
    module.w = nn.Parameter(part.clone())
    fully_shard(module, mesh=mesh)
    layout = Layout(mesh={"dp": 2, "tp": 2}, rules={"w": rule})  # type: ignore[dict-item]
    return compare(
        rank,
        f"by hand {rule}",
        module.state_dict()["w"],
        whole,
        placer=ShardingResolver(rank, range(WORLD), layout),
    )


@case
def layout_rules_over_fsdp2(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh.get_local_rank("tp")
    rows, columns = numbered(12, 5), numbered(5, 12)
    return [
        *split_by_hand(rank, {"tp": 0}, rows.chunk(2)[tp], rows, mesh["dp"]),
        *split_by_hand(rank, {"tp": 1}, columns.chunk(2, 1)[tp], columns, mesh["dp"]),
    ]


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
def sums_to_come_are_refused(rank: int) -> Problems:
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = DTensor.from_local(numbered(2, 2), mesh, [Shard(0), Partial()])
    text = "on mesh dim 1, expected Shard or Replicate; redistribute the tensor first"
    return raised(text, lambda: ShardingResolver(rank, range(WORLD), None).resolve("w", tensor))


@case
def meshes_speak_of_global_ranks(rank: int) -> Problems:
    """A call of a subgroup: positions count inside it, meshes use global rank numbers."""
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
def what_people_read(rank: int) -> Problems:
    placer = ShardingResolver(rank, range(WORLD), None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(3):
        placer.resolve("w", cut(numbered(4, 4), mesh, [Shard(0), Replicate()]))
    return [] if placer.mesh_shapes == {"dp tp": (2, 2)} else [str(placer.mesh_shapes)]


def run(rank: int, folder: str, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(dict(results(rank))))
    dist.barrier()
    dist.destroy_process_group()


def results(rank: int) -> Iterator[tuple[str, Problems]]:
    for name, act in CASES.items():
        try:
            found = act(rank)
        except Exception:
            found = [traceback.format_exc()]
        dist.barrier()
        yield name, found


if __name__ == "__main__":
    server = dist.TCPStore(
        "127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    start_processes(run, args=(sys.argv[1], server.port), nprocs=WORLD, start_method="fork")

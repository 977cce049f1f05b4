"""DTensors loaded into other placements, other meshes and other numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.support.dcp_cases.table import Run, case, check, clear, fill

RESHARDING = "test_dtensor_resharding"
NONE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
ONE_DIM = [[NONE], [ROWS], [COLUMNS]]
TWO_DIMS = [list(pair) for pair in product([NONE, ROWS, COLUMNS], repeat=2)]
SHAPES = [(4, 4), (16, 12), (5, 7), (3, 2), (1, 9)]  # even, uneven, fewer rows than ranks


def cut(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(torch.zeros(tuple(shape)), mesh, placements, src_data_rank=None)


def cuts(mesh: DeviceMesh, placements: list[list[Placement]], turn: int) -> dict[str, Any]:
    """A state of all shapes and placements; `turn` gives each name another placement."""
    return {
        f"{shape} {number}": cut(shape, mesh, placements[(number + turn) % len(placements)])
        for shape in SHAPES
        for number in range(max(len(ONE_DIM), len(TWO_DIMS)))
    }


def loads_from(run: Run, saved: dict[str, Any], *targets: dict[str, Any]) -> None:
    folder = run.folder()
    run.dcp.save(fill(saved), checkpoint_id=folder)
    for target in targets:
        run.dcp.load(clear(target), checkpoint_id=folder)
        check(target)


@case(RESHARDING, thin=True)
def one_dim_to_one_dim(run: Run) -> None:
    mesh = init_device_mesh("cpu", (run.world,))
    states = [cuts(mesh, ONE_DIM, turn) for turn in range(len(ONE_DIM))]
    loads_from(run, states[0], *states[1:])


@case(RESHARDING)
def two_dims_to_two_dims(run: Run) -> None:
    mesh = init_device_mesh("cpu", (2, run.world // 2))
    states = [cuts(mesh, TWO_DIMS, turn) for turn in range(len(TWO_DIMS))]
    loads_from(run, states[0], *states[1:])


@case(RESHARDING)
def one_dim_to_two_dims(run: Run) -> None:
    flat, mesh = (init_device_mesh("cpu", shape) for shape in ((run.world,), (2, run.world // 2)))
    loads_from(run, cuts(flat, ONE_DIM, 0), *(cuts(mesh, TWO_DIMS, turn) for turn in (0, 4, 8)))


@case(RESHARDING)
def two_dims_to_one_dim(run: Run) -> None:
    flat, mesh = (init_device_mesh("cpu", shape) for shape in ((run.world,), (2, run.world // 2)))
    loads_from(run, cuts(mesh, TWO_DIMS, 0), *(cuts(flat, ONE_DIM, turn) for turn in range(3)))


@case(f"{RESHARDING} (world size)", thin=True)
def fewer_and_more_ranks(run: Run) -> None:
    """Four ranks save, two and one load; two save, four load."""
    few = list(range(run.world // 2))
    group, mesh = dist.new_group(few), init_device_mesh("cpu", (run.world,))
    small = DeviceMesh("cpu", few)
    folder = run.folder()
    run.dcp.save(fill(cuts(mesh, ONE_DIM, 0)), checkpoint_id=folder)
    alone = {f"{shape} {number}": torch.zeros(shape) for shape in SHAPES for number in range(9)}
    run.dcp.load(alone, checkpoint_id=folder, no_dist=True)
    check(alone)
    second = run.folder()
    if run.rank in few:
        state = cuts(small, ONE_DIM, 1)
        run.dcp.load(state, checkpoint_id=folder, process_group=group)
        check(state)
        run.dcp.save(state, checkpoint_id=second, process_group=group)
    dist.barrier()
    state = cuts(mesh, ONE_DIM, 2)
    run.dcp.load(state, checkpoint_id=second)
    check(state)


@case("test_file_system_checkpoint_cpu (sharded to tensor)")
def tensors_and_dtensors(run: Run) -> None:
    """A name is a plain tensor on one side and a DTensor on the other."""
    mesh = init_device_mesh("cpu", (run.world,))

    def state(plain: str, sharded: str) -> dict[str, Any]:
        return {plain: torch.zeros(10, 4), sharded: cut((10, 4), mesh, [ROWS])}

    run.round_trip(state("a", "b"), state("b", "a"))


@case("test_dtensor_checkpoint")
def modules_of_dtensors(run: Run) -> None:
    mesh = init_device_mesh("cpu", (run.world,))

    def module() -> torch.nn.Module:
        made = torch.nn.Module()
        made.sharded = torch.nn.Parameter(cut((8,), mesh, [ROWS]))
        made.replicated = torch.nn.Parameter(cut((4,), mesh, [NONE]))
        return made

    run.round_trip(module().state_dict(), module().state_dict())
    saved, loaded, folder = module(), module(), run.folder()
    fill(saved.state_dict())
    run.dcp.save({"m": saved}, checkpoint_id=folder)
    run.dcp.load({"m": loaded}, checkpoint_id=folder)
    check(loaded.state_dict())


@case("e2e/test_fsdp_ep")
def meshes_of_some_ranks(run: Run) -> None:
    """Each half of the ranks holds tensors that the other half lacks."""
    halves = [list(range(run.world // 2)), list(range(run.world // 2, run.world))]
    meshes = [DeviceMesh("cpu", ranks) for ranks in halves]
    half = int(run.rank in halves[1])
    world = init_device_mesh("cpu", (run.world,))
    saved = {f"expert{half}": cut((6, 3), meshes[half], [ROWS]), "all": cut((5,), world, [ROWS])}
    everywhere = {f"expert{i}": cut((6, 3), world, [COLUMNS]) for i in range(2)}
    other = {f"expert{1 - half}": cut((6, 3), meshes[half], [NONE])}
    loads_from(run, saved, everywhere, other, saved)


@case(RESHARDING)
def three_dims_of_mesh(run: Run) -> None:
    mesh = init_device_mesh("cpu", (1, 2, run.world // 2))
    flat = init_device_mesh("cpu", (run.world,))
    loads_from(
        run,
        {
            "a": cut((6, 4, 5), mesh, [ROWS, Shard(2), ROWS]),
            "b": cut((9,), mesh, [NONE, ROWS, NONE]),
        },
        {"a": cut((6, 4, 5), flat, [Shard(2)]), "b": cut((9,), flat, [NONE])},
    )


@case("test_dtensor_checkpoint")
def dtypes_and_scalars(run: Run) -> None:
    mesh = init_device_mesh("cpu", (run.world,))

    def state(placement: Placement) -> dict[str, Any]:
        dtypes = (torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)
        whole = {str(d)[6:]: torch.zeros(9, 2, dtype=d) for d in dtypes}
        made = {
            name: distribute_tensor(t, mesh, [placement], src_data_rank=None)
            for name, t in whole.items()
        }
        return made | {"scalar": cut((), mesh, [NONE])}

    run.round_trip(state(ROWS), state(COLUMNS))


@case(RESHARDING)
def dtypes_are_cast(run: Run) -> None:
    mesh, folder = init_device_mesh("cpu", (run.world,)), run.folder()
    run.dcp.save(fill({"w": cut((6, 5), mesh, [ROWS])}), checkpoint_id=folder)
    target = {"w": cut((6, 5), mesh, [COLUMNS]).to(torch.bfloat16)}
    run.dcp.load(target, checkpoint_id=folder)
    check(target)

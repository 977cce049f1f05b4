"""Models and optimizers of each parallelism, by torch's state dicts and as Stateful objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.dcp_cases.table import Run, case, check, clear, fill

STATE_DICT, E2E, HSDP = "test_state_dict", "e2e/test_e2e_save_and_load", "test_hsdp_checkpoint"
FSDP1 = "test_fsdp_model_state, test_fsdp_optim_state"


class Model(nn.Module):
    """Rows that four ranks divide evenly, and unevenly; of 3 rows, the last rank has none."""

    def __init__(self, rows: int = 7) -> None:
        super().__init__()
        self.even = nn.Linear(8, 16)
        self.tail = nn.Linear(16, 8)
        self.uneven = nn.Sequential(nn.Linear(8, 10), nn.Linear(10, rows, bias=False))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.uneven(self.tail(self.even(inputs)))


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.uneven:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def hsdp2(model: nn.Module) -> nn.Module:
    shape = (2, dist.get_world_size() // 2)
    return fsdp2(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp", "shard")))


def tensor_parallel(model: nn.Module, mesh: Any = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"even": ColwiseParallel(), "tail": RowwiseParallel()})


def two_dims(model: nn.Module) -> nn.Module:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return fsdp2(tensor_parallel(model, mesh["tp"]), mesh=mesh["dp"])


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True} | options
    for number, layer in enumerate(model.uneven):
        model.uneven[number] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def flat_fsdp1(model: nn.Module) -> nn.Module:
    return fsdp1(model, use_orig_params=False)


def mesh_fsdp1(model: nn.Module) -> nn.Module:
    return fsdp1(model, device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp1(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return fsdp1(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


Wrap = Callable[[nn.Module], nn.Module]
Optim = Callable[..., torch.optim.Optimizer]


def job(
    wrap: Wrap, optim: Optim = torch.optim.AdamW, rows: int = 7, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = wrap(Model(rows))
    return model, optim(model.parameters(), **{"lr": 0.1} | options)


def state_of(model: Any, optimizer: Any, options: StateDictOptions | None = None) -> dict[str, Any]:
    states = get_state_dict(model, optimizer, options=options)
    return dict(zip(("model", "optim"), states, strict=True))


def put(state: dict[str, Any], model: Any, optimizer: Any, options: Any = None) -> None:
    set_state_dict(
        *(model, optimizer),
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=options,
    )


def resume(
    run: Run, saved: Wrap, loaded: Wrap, optim: Optim = torch.optim.AdamW, rows: int = 7
) -> None:
    """Save the state of a job, load it into a job of another parallelism."""
    folder, state = run.folder(), state_of(*job(saved, optim, rows))
    run.dcp.save(fill(state), checkpoint_id=folder)
    model, optimizer = job(loaded, optim, rows, lr=0.2)
    state = clear(state_of(model, optimizer))
    run.dcp.load(state, checkpoint_id=folder)
    check(state)
    put(state, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    check(state_of(model, optimizer))


@case(f"{STATE_DICT} (fsdp2)")
def fsdp2_to_fsdp2(run: Run) -> None:
    resume(run, fsdp2, fsdp2)
    resume(run, fsdp2, ddp, rows=3)


@case(f"{STATE_DICT} (ddp)")
def ddp_to_plain_and_back(run: Run) -> None:
    resume(run, ddp, plain)
    resume(run, plain, ddp, torch.optim.Adam)


@case("test_tp_checkpoint")
def tensor_parallel_to_itself(run: Run) -> None:
    resume(run, tensor_parallel, tensor_parallel)


@case("test_fsdp_tp_checkpoint_conversion", thin=True)
def fsdp2_to_tensor_parallel(run: Run) -> None:
    resume(run, fsdp2, tensor_parallel)


@case("test_2d_fsdp_dt_checkpoint")
def two_dims_to_one_dim_and_back(run: Run) -> None:
    resume(run, two_dims, fsdp2)
    resume(run, fsdp2, two_dims)


@case(HSDP)
def hsdp2_to_fsdp2_and_back(run: Run) -> None:
    resume(run, hsdp2, hsdp2)
    resume(run, hsdp2, fsdp2)
    resume(run, fsdp2, hsdp2)


@case(FSDP1)
def fsdp1_to_itself(run: Run) -> None:
    """Without a mesh, its state dicts have ShardedTensors."""
    resume(run, fsdp1, fsdp1)
    resume(run, flat_fsdp1, flat_fsdp1)


@case(FSDP1)
def fsdp1_to_other_forms(run: Run) -> None:
    resume(run, fsdp1, flat_fsdp1)
    resume(run, fsdp1, fsdp2)
    resume(run, fsdp2, fsdp1)


@case(
    *(FSDP1,),
    not_dcp="a load fails on a rank without an element of a FlatParameter",
)
def fsdp1_of_few_rows(run: Run) -> None:
    for saved, loaded in ((flat_fsdp1, flat_fsdp1), (fsdp1, flat_fsdp1), (flat_fsdp1, fsdp2)):
        resume(run, saved, loaded, rows=3)


@case(HSDP)
def hsdp1_to_fsdp1(run: Run) -> None:
    """With a mesh, its state dicts have DTensors."""
    resume(run, hsdp1, mesh_fsdp1)
    resume(run, mesh_fsdp1, fsdp1)


@case("test_fsdp_tp_checkpoint_conversion")
def fsdp1_to_tensor_parallel(run: Run) -> None:
    resume(run, fsdp1, tensor_parallel)


@case(f"{STATE_DICT} (activation checkpointing)")
def activation_checkpointing(run: Run) -> None:
    """Wrappers leave no trace in names."""

    def wrapped(model: nn.Module) -> nn.Module:
        apply_activation_checkpointing(model)
        return fsdp2_of_wrapped(model)

    def fsdp2_of_wrapped(model: nn.Module) -> nn.Module:
        return fully_shard(model)

    resume(run, wrapped, plain)
    resume(run, plain, wrapped)


@case(f"{STATE_DICT} (meta device)")
def models_on_the_meta_device(run: Run) -> None:
    folder = run.folder()
    run.dcp.save(fill({"model": Model().state_dict()}), checkpoint_id=folder)
    with torch.device("meta"):
        model = Model()
    model = fsdp2(model).to_empty(device="cpu")
    run.dcp.load({"model": model}, checkpoint_id=folder)
    check({"model": model.state_dict()})


@case("e2e/test_pipeline", thin=True)
def pipeline_stages_to_fsdp(run: Run) -> None:
    """Each rank has a layer of its own, with its optimizer."""

    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(6, 5 + number) for number in range(run.world)))

    folder, model = run.folder(), layers()
    stage = nn.ModuleDict({str(run.rank): model[run.rank]})
    run.dcp.save(fill(state_of(stage, torch.optim.Adam(stage.parameters()))), checkpoint_id=folder)
    model = fully_shard(layers())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    state = clear(state_of(model, optimizer))
    run.dcp.load(state, checkpoint_id=folder)
    check(state)
    assert state["optim"]["param_groups"][0]["lr"] == 1e-3


@case("e2e/test_fsdp_ep")
def experts_on_their_ranks(run: Run) -> None:
    """A rank has the modules of its expert; FSDP2 shards the rest."""

    class Experts(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            names = [str(number)] if number >= 0 else [str(n) for n in range(run.world)]
            self.experts = nn.ModuleDict({name: nn.Linear(4, 6) for name in names})
            self.common = fully_shard(nn.Linear(4, 7))

    folder, model = run.folder(), Experts(run.rank)
    state = state_of(model, torch.optim.AdamW(model.parameters()))
    run.dcp.save(fill(state), checkpoint_id=folder)
    for number in ((run.rank + 1) % run.world, -1):
        model = Experts(number)
        state = clear(state_of(model, torch.optim.AdamW(model.parameters())))
        run.dcp.load(state, checkpoint_id=folder)
        check(state)

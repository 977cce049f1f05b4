"""Optimizers: forms of their state, parameter groups, frozen and tied parameters, training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from tests.support.dcp_cases.models import (
    Model,
    ddp,
    fsdp2,
    hsdp2,
    job,
    plain,
    put,
    resume,
    state_of,
    tensor_parallel,
    two_dims,
)
from tests.support.dcp_cases.table import Run, case, check, clear, fill

STATE_DICT, E2E, HSDP = "test_state_dict", "e2e/test_e2e_save_and_load", "test_hsdp_checkpoint"
FSDP1 = "test_fsdp_model_state, test_fsdp_optim_state"


@case(f"{STATE_DICT} (flattened), test_optimizer_flattened_missing_state", thin=True)
def flat_optimizer_states(run: Run) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    folder, state = run.folder(), state_of(*job(fsdp2), options)
    run.dcp.save(fill(state), checkpoint_id=folder)
    model, optimizer = job(tensor_parallel, lr=0.2)
    state = clear(state_of(model, optimizer, options))
    run.dcp.load(state, checkpoint_id=folder)
    check(state)
    put(state, model, optimizer, options)
    assert optimizer.param_groups[0]["lr"] == 0.1


@case(f"{STATE_DICT}, test_optimizer_stateless")
def optimizers_without_state(run: Run) -> None:
    def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr)

    resume(run, fsdp2, fsdp2, sgd)
    folder, options = run.folder(), StateDictOptions(flatten_optimizer_state_dict=True)
    state = state_of(*job(fsdp2, sgd), options)
    run.dcp.save(state, checkpoint_id=folder)
    state = state_of(*job(fsdp2, sgd, lr=0.2), options)
    run.dcp.load(state, checkpoint_id=folder)
    assert state["optim"]["param_groups.even.weight.lr"] == 0.1


@case(f"{STATE_DICT} (multiple parameter groups)")
def several_parameter_groups(run: Run) -> None:
    def optimizer_of(model: nn.Module, factor: float) -> torch.optim.Optimizer:
        groups = [
            {"params": [*model.even.parameters()], "lr": 0.1 * factor},
            {"params": [], "lr": 0.5 * factor},
            {"params": [*model.tail.parameters(), *model.uneven.parameters()]},
        ]
        return torch.optim.AdamW(groups, lr=0.2 * factor)

    folder, model = run.folder(), fsdp2(Model())
    state = state_of(model, optimizer_of(model, 1))
    run.dcp.save(fill(state), checkpoint_id=folder)
    model = two_dims(Model())
    state = clear(state_of(model, optimizer_of(model, 7)))
    run.dcp.load(state, checkpoint_id=folder)
    check(state)
    assert [group["lr"] for group in state["optim"]["param_groups"]] == [0.1, 0.5, 0.2]


@case(f"{STATE_DICT} (parameter matching)")
def options_that_a_scheduler_added(run: Run) -> None:
    folder, (model, optimizer) = run.folder(), job(fsdp2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    run.dcp.save(fill(state_of(model, optimizer)), checkpoint_id=folder)
    model, optimizer = job(fsdp2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    state = state_of(model, optimizer)
    run.dcp.load(state, checkpoint_id=folder)
    put(state, model, optimizer)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    assert optimizer.param_groups[0]["lr"] == 0.1


@case(f"{STATE_DICT} (full state dicts, cpu_offload)")
def full_states_of_rank_0(run: Run) -> None:
    """All tensors are on rank 0; the other ranks have no key."""
    folder, options = run.folder(), StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = job(fsdp2)
    put(fill(state_of(model, optimizer)), model, optimizer)
    state = state_of(model, optimizer, options)
    assert bool(state["model"]) == (run.rank == 0)
    run.dcp.save(state, checkpoint_id=folder)
    model, optimizer = job(fsdp2, lr=0.2)
    state = clear(state_of(model, optimizer))
    run.dcp.load(state, checkpoint_id=folder)
    check(state)


@case(f"{STATE_DICT} (broadcast_from_rank0)")
def loads_by_rank_0_alone(run: Run) -> None:
    """Rank 0 loads whole tensors and broadcasts them."""
    folder = run.folder()
    run.dcp.save(fill(state_of(*job(fsdp2))), checkpoint_id=folder)
    state = state_of(*job(plain)) if run.rank == 0 else {"model": {}, "optim": {}}
    if run.rank == 0:
        run.dcp.load(clear(state), checkpoint_id=folder, no_dist=True)
        check(state)
    model, optimizer = job(fsdp2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    check(state_of(model, optimizer))


@case(f"{STATE_DICT} (frozen), e2e/test_fine_tuning")
def frozen_parameters(run: Run) -> None:
    """A pretrained part from one folder, the trained rest from another."""

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pretrain = Model().requires_grad_(False)
            self.head = nn.Linear(5, 9)

    def tuned() -> nn.Module:
        model = Tuned()
        fsdp2(model.pretrain)
        return fully_shard(model)

    pretrained, folder = run.folder(), run.folder()
    part = {"model": get_model_state_dict(fsdp2(Model()))}
    run.dcp.save(fill(part), checkpoint_id=pretrained)
    options = StateDictOptions(ignore_frozen_params=True)
    model = tuned()
    optimizer = torch.optim.AdamW(model.head.parameters())
    state = state_of(model, optimizer, options)
    assert all("pretrain" not in key for key in state["model"] if "count" not in key)
    run.dcp.save(fill(state), checkpoint_id=folder)

    model = tuned()
    part = {"model": clear(get_model_state_dict(model.pretrain))}
    run.dcp.load(part, checkpoint_id=pretrained)
    check(part)
    optimizer = torch.optim.AdamW(model.head.parameters())
    state = clear(state_of(model, optimizer, options))
    run.dcp.load(state, checkpoint_id=folder)
    check(state)


@case(f"{STATE_DICT} (shared weight)")
def tied_weights(run: Run) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.embedding.weight

    folder, model = run.folder(), fully_shard(Tied())
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model, optimizer)
    state["model"]["embedding.weight"].to_local().copy_(
        torch.distributed.tensor.distribute_tensor(
            torch.arange(60.0).reshape(10, 6),
            state["model"]["embedding.weight"].device_mesh,
            state["model"]["embedding.weight"].placements,
            src_data_rank=None,
        ).to_local()
    )
    run.dcp.save(state, checkpoint_id=folder)
    model = fully_shard(Tied())
    state = state_of(model, torch.optim.AdamW(model.parameters()))
    run.dcp.load(clear(state), checkpoint_id=folder)
    for tensor in (model.head.weight, model.embedding.weight):
        assert torch.equal(tensor.full_tensor(), torch.arange(60.0).reshape(10, 6))


class AppState:
    """The Stateful of PyTorch's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        put(state_dict, self.model, self.optimizer)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Train by one step; all ranks have the same inputs."""
    inputs = torch.sin(torch.arange(16.0).reshape(2, 8) + number)
    loss = model(inputs).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@case(f"{E2E} (e2e)")
def training_continues(run: Run) -> None:
    """Losses after a resume, in the same parallelism, are bitwise those of the run that goes on."""
    for wrap in (fsdp2, ddp):
        model, optimizer = job(wrap)
        if wrap is fsdp2:
            for module in model.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no average
        for number in range(2):
            step(model, optimizer, number)
        folder = run.folder()
        run.dcp.save({"app": AppState(model, optimizer), "step": 2}, checkpoint_id=folder)
        expected = [step(model, optimizer, number) for number in range(2, 4)]
        model, optimizer = job(wrap, lr=0.7)
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
        state = {"app": AppState(model, optimizer), "step": 0}
        run.dcp.load(state, checkpoint_id=folder)
        assert state["step"] == 2
        assert [step(model, optimizer, number) for number in range(2, 4)] == expected


@case(f"{E2E} (init state dict)")
def values_of_an_optimizer(run: Run) -> None:
    """The dicts of the caller are filled; the learning rate is the saved one."""
    folder, (model, optimizer) = run.folder(), job(plain)
    run.dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    model, optimizer = job(plain, lr=0.2)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    folder = run.folder()
    before = state["model"], state["optimizer"]
    run.dcp.save(fill(state), checkpoint_id=folder)
    run.dcp.load(clear(state), checkpoint_id=folder)
    assert state["model"] is before[0]
    assert state["optimizer"] is before[1]
    check(state)


@case(f"{E2E} (partial load)")
def models_without_their_optimizer(run: Run) -> None:
    folder, (model, optimizer) = run.folder(), job(fsdp2)
    run.dcp.save(fill(state_of(model, optimizer)), checkpoint_id=folder)
    model, optimizer = job(hsdp2)
    state = {"model": clear(get_model_state_dict(model))}
    run.dcp.load(state, checkpoint_id=folder)
    check(state)
    state = {"optim": clear(get_optimizer_state_dict(model, optimizer))}
    run.dcp.load(state, checkpoint_id=folder)
    check(state)


@case(f"{STATE_DICT} (optimizer as it is)")
def optimizers_by_their_own_state_dict(run: Run) -> None:
    """A plain module and optimizer are Stateful: parameters have numbers, not names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder, (model, optimizer) = run.folder(), job(plain)
        step(model, optimizer, 0)
        run.dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        expected = [step(model, optimizer, number) for number in (1, 2)]
        model, optimizer = job(plain, lr=0.3)
        step(model, optimizer, 5)  # a load needs the state's tensors
        run.dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert [step(model, optimizer, number) for number in (1, 2)] == expected


@case(f"{STATE_DICT} (several optimizers)")
def several_optimizers(run: Run) -> None:
    folder, model = run.folder(), fsdp2(Model())

    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        rest = [*module.tail.parameters(), *module.uneven.parameters()]
        return [torch.optim.AdamW(module.even.parameters()), torch.optim.Adam(rest)]

    run.dcp.save(fill(state_of(model, optimizers(model))), checkpoint_id=folder)
    model = two_dims(Model())
    state = clear(state_of(model, optimizers(model)))
    run.dcp.load(state, checkpoint_id=folder)
    check(state)

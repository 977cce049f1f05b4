"""What a run resumes beside tensors: read from each format, and schedules that continue bit for
bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import unified_ckpt as uc
from tests.support.foreign import megatron_models, megatrons, nanotrons, paddleformers
from tests.support.foreign.dcp_folders import save_dcp
from tests.support.foreign.paddles import FIXTURES
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.torch_training import small_net
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.integrations.random_states import random_states_outcome, saved_random_states
from unified_ckpt.integrations.run_state import (
    RunState,
    log_resumed_state,
    read_run_state,
    resume_schedule,
)
from unified_ckpt.runtime.comm.comm import Comm

KINDS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda sgd: LambdaLR(sgd, lambda step: 1 / (1 + step)),
    "cosine": lambda sgd: CosineAnnealingLR(sgd, 7, eta_min=0.01),
    "multiplicative": lambda sgd: MultiplicativeLR(sgd, lambda step: 1 - 1 / (5 + step)),
    "cyclic": lambda sgd: CyclicLR(sgd, 0.1, 0.3, step_size_up=3),
    "one cycle": lambda sgd: OneCycleLR(sgd, 0.5, 40),
    "sequential": lambda sgd: SequentialLR(
        sgd, [ConstantLR(sgd, 0.5, 3), StepLR(sgd, 2)], milestones=[4]
    ),
    "chained": lambda sgd: ChainedScheduler([ConstantLR(sgd, 0.5, 3), ExponentialLR(sgd, 0.9)]),
}


def schedule(kind: str) -> tuple[torch.optim.Optimizer, Any]:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.2}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return sgd, KINDS[kind](sgd)


def run_state(**fields: Any) -> RunState:
    return RunState("run", "torch.save", "torch", frozenset({"model"}), **fields)


def trace(sgd: Any, scheduler: Any, count: int) -> list[Any]:
    """What the next steps train with."""
    seen = []
    for _ in range(count):
        seen.append([(group["lr"], group["momentum"]) for group in sgd.param_groups])
        sgd.step()
        scheduler.step()
    return seen


@given(
    kind=st.sampled_from(sorted(KINDS)),
    count=st.integers(0, 20),
    form=st.sampled_from(["state", "Paddle", "DeepSpeed", "step"]),
)
def test_resumed_schedule_equals_the_uninterrupted_one(kind: str, count: int, form: str) -> None:
    """Whatever says how far the schedule is, and whatever rates the loaded optimizer has."""
    sgd, scheduler = schedule(kind)
    trace(sgd, scheduler, count)
    saved = {
        "state": scheduler.state_dict(),
        "Paddle": {"last_epoch": count, "last_lr": 0.7},
        "DeepSpeed": {"last_batch_iteration": count - 1},
        "step": None,
    }[form]
    resumed_sgd, resumed = schedule(kind)
    if form == "state":
        resumed_sgd.load_state_dict(sgd.state_dict())
    else:
        for group in resumed_sgd.param_groups:  # of another schedule
            group["lr"] = 123.0
    groups = [{"names": [], "options": dict(group)} for group in resumed_sgd.param_groups]
    outcome = resume_schedule(resumed, run_state(scheduler=saved, groups=groups), steps=count)
    assert outcome == ("loaded" if form == "state" else f"advanced to step {count}")
    assert trace(resumed_sgd, resumed, 5) == trace(sgd, scheduler, 5)


def test_loaded_schedule_sets_rates_that_no_group_has() -> None:
    sgd, scheduler = schedule("lambda")
    trace(sgd, scheduler, 3)
    resumed_sgd, resumed = schedule("lambda")
    groups = [{"names": [], "options": {"weight_decay": 0.0}}]
    state = run_state(scheduler=scheduler.state_dict(), groups=groups)
    assert resume_schedule(resumed, state, steps=3) == "loaded"
    assert trace(resumed_sgd, resumed, 3) == trace(sgd, scheduler, 3)


@pytest.mark.parametrize(
    ("count", "steps", "scaler", "expected"),
    [
        (3, 3, None, "loaded"),
        (4, 3, None, "loaded"),  # steps are numbered from 0
        (2, 3, None, "loaded"),  # saved before the scheduler's step
        (6, 3, None, "advanced to step 3"),  # Accelerate's, on two processes
        (1, 9, None, "advanced to step 9"),  # one step per epoch
        (7, 9, {"scale": 1.0}, "loaded"),  # two overflows
        (7, None, None, "loaded"),
    ],
)
def test_count_in_another_unit_is_not_loaded(
    count: int, steps: int | None, scaler: Any, expected: str
) -> None:
    sgd, scheduler = schedule("lambda")
    trace(sgd, scheduler, count)
    _, resumed = schedule("lambda")
    state = run_state(scheduler=scheduler.state_dict(), scaler=scaler)
    assert resume_schedule(resumed, state, steps=steps) == expected


def test_schedules_that_cannot_be_advanced() -> None:
    sgd, fresh = schedule("cosine")
    assert resume_schedule(fresh, run_state(), steps=None) == "begins anew"
    assert resume_schedule(ReduceLROnPlateau(sgd), run_state(), steps=3) == "begins anew"
    trace(sgd, fresh, 5)
    assert resume_schedule(fresh, run_state(), steps=3) == "stays at step 5"
    plateau = ReduceLROnPlateau(sgd, patience=0)
    for metric in (1.0, 2.0):
        plateau.step(metric)
    loaded = ReduceLROnPlateau(schedule("cosine")[0], patience=0)
    assert resume_schedule(loaded, run_state(scheduler=plateau.state_dict()), steps=500) == "loaded"
    assert loaded.best == 1.0


# ---- formats


def lambda_state(count: int) -> Any:
    sgd, scheduler = schedule("lambda")
    trace(sgd, scheduler, count)
    return scheduler.state_dict()


def unified(root: Path) -> Path:
    net, optimizer = small_net("plain")
    extra = {"schedules": {"lr": lambda_state(4)}, "epoch": 2}
    random = {"random": uc.RandomStates()}
    path = root / "last"
    uc.save(path, model=net, optimizer=optimizer, step=4, extra=extra, rank_extra=random)
    return path


def unnumbered(root: Path) -> Path:
    """Neither a step nor a number in the name: Adam counted."""
    net, optimizer = torch.nn.Linear(2, 2), None
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    uc.save(root / "last", model=net, optimizer=optimizer)
    return root / "last"


def torch_file(root: Path) -> Path:
    net, optimizer = small_net("plain")
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(
        {**state, "scheduler": lambda_state(7), "iteration": 7, "epoch": 1}, root / "last.pt"
    )
    return root / "last.pt"


def lightning(root: Path) -> Path:
    net, optimizer = small_net("plain")
    content = {
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [lambda_state(5)],
        "pytorch-lightning_version": "2.6",
        "epoch": 1,
        "global_step": 5,
    }
    torch.save(content, root / "last.ckpt")
    return root / "last.ckpt"


def torchtitan(root: Path) -> Path:
    net, _ = small_net("plain")
    state = {**net.state_dict(), "lr_scheduler": lambda_state(6)}
    return save_dcp({**state, "train_state": {"step": 6}}, root / "step-6")


def paddle(_: Path) -> Path:
    return FIXTURES / "single_bf16"


def paddleformers_unified(_: Path) -> Path:
    return paddleformers.FIXTURES / "single_unified" / "checkpoint-2"


def paddleformers_flex(_: Path) -> Path:
    return paddleformers.FIXTURES / "single_flex" / "checkpoint-2"


def nanotron(root: Path) -> Path:
    nanotrons.write(root)
    return root


def megatron(root: Path) -> Path:
    kind, job, more = megatron_models.JOBS[next(iter(megatron_models.JOBS))]
    _, hub = megatron_models.drawn(kind, job, root)
    return megatrons.write(root / "job", job, hub, consumed_train_samples=56, **more)


@pytest.mark.parametrize(
    ("write", "fields"),
    [
        (unified, {"step": 4, "epoch": 2, "schedule_steps": 4, "has_random_states": True}),
        (unnumbered, {"step": 3, "schedule_steps": None, "has_random_states": False}),
        (torch_file, {"step": 7, "epoch": 1, "schedule_steps": 7, "title": "torch.save"}),
        (lightning, {"step": 5, "epoch": 1, "schedule_steps": 5}),
        (torchtitan, {"step": 6, "schedule_steps": 6}),
        (paddle, {"step": 2, "epoch": 0.015625, "samples": 4, "schedule_steps": 2}),
        (paddleformers_unified, {"step": 2, "epoch": 0.03125, "samples": 2, "schedule_steps": 2}),
        (paddleformers_flex, {"step": 2, "epoch": 0.03125, "samples": 2, "schedule_steps": 2}),
        (nanotron, {"step": 20, "samples": 160, "title": "nanotron"}),
        (megatron, {"step": 7, "samples": 56, "schedule_steps": None}),
    ],
)
def test_run_state_of_each_format(
    tmp_path: Path, write: Callable[[Path], Path], fields: dict[str, Any]
) -> None:
    state = read_run_state(str(write(tmp_path)))
    assert {name: getattr(state, name) for name in fields} == fields


def test_scaler_of_paddle_becomes_torchs(tmp_path: Path) -> None:
    saved = {
        "scale": torch.tensor([1024.0]),
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_count": 3,
        "decr_count": 0,
        "use_dynamic_loss_scaling": True,
    }
    net, _ = small_net("plain")
    uc.save(tmp_path / "step-1", model=net, extra={"scaler": saved})
    state = read_run_state(str(tmp_path / "step-1"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(dict(state.scaler or {}))
    assert (state.step, scaler.state_dict()["scale"], scaler._init_growth_tracker) == (1, 1024.0, 3)


def test_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    state = run_state(step=3, epoch=0.5)
    outcomes = {"schedule": "advanced to step 3", "scaler": "", "random states": "begin anew"}
    report = LoadReport(3, None, None, (), (), (), 0, 0, {}, 0.0, saved_ranks=2)
    log_resumed_state(state, report, outcomes, rank=1)
    with caplog.at_level(logging.INFO, "unified_ckpt"):
        log_resumed_state(state, report, outcomes, rank=0)
        log_resumed_state(run_state(step=None), report, {"schedule": "loaded"}, rank=0)
    warning, info = caplog.records
    assert (warning.levelno, info.levelno) == (logging.WARNING, logging.INFO)
    assert warning.getMessage() == (
        "resumed from run (torch.save): step 3, epoch 0.5, saved by 2 ranks, loaded by 1 rank; "
        "model; schedule: advanced to step 3; random states: begin anew"
    )
    beginning = "resumed from run (torch.save): without a step, saved by 2 ranks"
    assert info.getMessage().startswith(beginning)


@pytest.mark.parametrize("key", ["random", None])
def test_random_states_of_another_number_of_ranks(tmp_path: Path, key: str | None) -> None:
    """They are derived, and the log says so; a trainer of any kind resumes them by this rule."""
    model, states = {"w": torch.zeros(1)}, uc.RandomStates()

    def save(comm: Comm) -> None:
        values = {key: states} if key is not None else {"seed": comm.rank}
        make_checkpointer(comm).save(tmp_path / "c", model=model, rank_extra=values)

    run_ranks(2, save)
    report, state = uc.load(tmp_path / "c", model=model), read_run_state(str(tmp_path / "c"))
    before = torch.get_rng_state()
    derived = saved_random_states(state, report, uc.SourceOptions())
    outcome = random_states_outcome(state, report)
    if key is None:
        assert (derived, outcome) == (None, "begin anew")
        assert torch.equal(torch.get_rng_state(), before)
    else:
        assert outcome == "derived from those of 2 ranks"
        assert torch.equal(derived["torch"], torch.get_rng_state())
        assert not torch.equal(derived["torch"], before)

"""When an exception ends the loop, the last whole step is saved or nothing is; no rank hangs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import counting
from tests.support.harness import run_ranks
from tests.support.manager.managers import manager_of, state, steps_in, warnings_of
from unified_ckpt.manager.events.file import read_events
from unified_ckpt.manager.stopping.exception_agreement import (
    ExceptionAgreement,
    LoopStatus,
    Outcome,
    find_problem,
)
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.key_store import KeyStore

# the agreement


@pytest.mark.parametrize(
    ("statuses", "problem"),
    [
        ([LoopStatus(7)], ""),
        ([LoopStatus(7), LoopStatus(7)], ""),
        (
            [LoopStatus(7), LoopStatus(8), LoopStatus(8)],
            "different steps: rank(s) 4 at 7, rank(s) 5-6 at 8",
        ),
        ([LoopStatus(7), LoopStatus(problem="late")], "rank 5: late"),
    ],
)
def test_ranks_agree_only_on_one_whole_step(statuses: list[LoopStatus], problem: str) -> None:
    ranks = range(4, 4 + len(statuses))
    assert find_problem(statuses, ranks).endswith(problem)
    assert bool(find_problem(statuses, ranks)) == bool(problem)


def agreement_of(store: KeyStore, rank: int, world: int, seconds: float) -> ExceptionAgreement:
    return ExceptionAgreement(
        store, rank=rank, ranks=range(world), seconds=seconds, silent_seconds=seconds / 3
    )


def outcomes(
    statuses: list[LoopStatus | None], *, seconds: float = 30.0, alive: bool = False
) -> list[Outcome]:
    """What each rank that answers concludes; None never answers, but may be alive."""
    store = KeyStore(dist.HashStore())

    def answer(comm: Comm) -> Outcome | None:
        agreement = agreement_of(store, comm.rank, len(statuses), seconds)
        if alive:
            agreement.acknowledge()
        status = statuses[comm.rank]
        return agreement.reach(status) if status is not None else None

    return [outcome for outcome in run_ranks(len(statuses), answer) if outcome is not None]


@pytest.mark.parametrize(
    ("statuses", "problem"),
    [
        ([LoopStatus(7)] * 4, ""),
        ([LoopStatus(7), LoopStatus(7), LoopStatus(8)], "different steps"),
        ([LoopStatus(problem="it is saving"), None, None], "rank 0: it is saving"),
    ],
)
def test_all_ranks_reach_the_same_outcome(statuses: list[LoopStatus | None], problem: str) -> None:
    """A rank with a problem does not wait for the others."""
    answers = outcomes(statuses)
    assert len({outcome.problem for outcome in answers}) == 1
    assert problem in answers[0].problem
    assert bool(answers[0].problem) == bool(problem)
    assert sum(outcome.is_author for outcome in answers) == 1, "one rank logs it"


@pytest.mark.parametrize("alive", [False, True])
def test_wait_for_a_silent_rank_is_bounded(alive: bool) -> None:
    started = time.monotonic()
    answers = outcomes([LoopStatus(7), None, LoopStatus(7)], seconds=0.6, alive=alive)
    assert time.monotonic() - started < 10
    seconds = 0.6 if alive else 0.2
    problem = f"rank(s) 1 did not answer within {seconds} s"
    assert {outcome.problem for outcome in answers} == {problem}


def test_rank_whose_loop_has_ended_is_not_waited_for() -> None:
    store = KeyStore(dist.HashStore())
    first, ended = (agreement_of(store, rank, 2, 30) for rank in (0, 1))
    ended.leave()
    assert first.requested_step() is None
    assert first.reach(LoopStatus(7)).problem == "rank 1: its loop has ended without an exception"


# one rank


@dataclass
class Loop:
    """A loop whose state is tensors, a scheduler, a sampler and random numbers."""

    model: nn.Module = field(default_factory=lambda: nn.Linear(8, 8))
    fused: bool = False
    optimizer_class: type[torch.optim.AdamW] = torch.optim.AdamW

    def __post_init__(self) -> None:
        self.optimizer = self.optimizer_class(self.model.parameters(), lr=0.01, fused=self.fused)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        data: Any = TensorDataset(torch.arange(64.0).reshape(64, 1))
        self.sampler = uc.ElasticSampler(data, seed=3)
        self.loader = DataLoader(data, batch_size=2, sampler=self.sampler)
        self.batches: Iterator[Any] | None = None

    def backward(self) -> None:
        self.batches = self.batches or self.sampler.batches(self.loader)
        (batch,) = next(self.batches)
        inputs = torch.randn(4, 8) * batch.mean()
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.scheduler.step()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "extra": {"scheduler": self.scheduler, "sampler": self.sampler, "epoch": 0},
            "rank_extra": {"random": uc.RandomStates()},
        }


def seeded_loop(**arguments: Any) -> Loop:
    torch.manual_seed(0)
    return Loop(**arguments)


def contents(folder: Path) -> dict[str, object]:
    """The bytes of each file, and the manifest without the time and the id of the save."""
    files: dict[str, object] = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads((folder / "unified_checkpoint.json").read_text())
    for name in ("save_id", "created", "seconds", "crc"):
        del manifest[name]
    return files | {"unified_checkpoint.json": manifest}


def end_by(error: BaseException, manager: uc.CheckpointManager, loop: Callable[[], object]) -> None:
    """Run a loop that an error ends. That error leaves the manager."""

    def run() -> None:
        with manager:
            loop()
            raise error

    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error


def run_until(root: Path, loop: Loop, last: int, error: BaseException, act: Any) -> None:
    """Train until `last`, then raise after `act`."""
    manager = manager_of(None, root, save_on_exception=True, interval_steps=2)

    def train() -> None:
        for step in range(1, last + 1):
            loop.step()
            manager.save(step, metrics={"loss": float(step)}, **loop.state)
        act(loop)

    end_by(error, manager, train)


def next_forward_and_backward(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.param_groups[0]["lr"] = 7.0  # a scheduler, at the begin of the next step
    loop.scheduler.last_epoch = 99


def replace_data(loop: Loop) -> None:
    loop.model.get_parameter("weight").data = torch.zeros(8, 8)


class OtherAdam(torch.optim.AdamW):
    """May change parameters before it runs the closure."""


def fail_in_closure(loop: Loop) -> None:
    """Raise in the forward pass, which the step of the optimizer runs."""

    def closure() -> float:
        loop.backward()
        raise RuntimeError("in the closure")

    with pytest.raises(RuntimeError, match="in the closure"):
        loop.optimizer.step(closure)


def step_with_closure(loop: Loop) -> None:
    def closure() -> float:
        loop.backward()
        return 0.0

    loop.optimizer.step(closure=closure)


@pytest.mark.parametrize(
    ("error", "act"),
    [
        (ValueError("x"), next_forward_and_backward),
        (KeyboardInterrupt(), next_forward_and_backward),
        (SystemExit(1), next_forward_and_backward),
        (ValueError("x"), fail_in_closure),
    ],
)
def test_saved_state_is_what_save_would_have_stored(
    tmp_path: Path,
    error: BaseException,
    act: Callable[[Loop], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Gradients, random numbers, the sampler and the scheduler have moved on."""
    run_until(tmp_path / "run", seeded_loop(), 5, error, act)
    assert steps_in(tmp_path / "run") == [2, 4, 5]
    assert not warnings_of(caplog)
    expected = seeded_loop()
    with manager_of(None, tmp_path / "straight", interval_steps=5) as manager:
        for step in range(1, 6):
            expected.step()
            manager.save(step, metrics={"loss": float(step)}, **expected.state)
    folders = [tmp_path / name / "checkpoint-5" for name in ("run", "straight")]
    assert contents(folders[0]) == contents(folders[1])
    assert uc.verify(folders[0], deep=True).ok


def test_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    run_until(tmp_path, seeded_loop(), 5, ValueError(), next_forward_and_backward)
    straight = seeded_loop()
    for _ in range(8):
        straight.step()
    resumed = Loop()
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(**resumed.state).step == 5
    for _ in range(3):
        resumed.step()
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def fail_in_step(loop: Loop) -> None:
    """Let the optimizer change a part of the state only."""
    loop.backward()
    loop.optimizer.param_groups[0]["params"][1].grad = None
    loop.optimizer.step()


def load(loop: Loop) -> None:
    loop.model.load_state_dict({name: 0 * value for name, value in loop.model.state_dict().items()})


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("arguments", "act", "problem"),
    [
        ({}, fail_in_step, "an optimizer step has begun since"),
        ({"fused": True}, fail_in_step, "an optimizer step has begun since"),
        ({"fused": True}, step_with_closure, "an optimizer step has begun since"),
        ({"optimizer_class": OtherAdam}, fail_in_closure, "an optimizer step has begun since"),
        ({}, load, "model:weight has changed since"),
        ({}, replace_data, "model:weight has changed since"),
        ({"model": batch_norm}, Loop.backward, "model:1.num_batches_tracked has changed since"),
    ],
)
def test_state_that_is_not_a_whole_step_is_not_saved(
    tmp_path: Path,
    arguments: dict[str, Any],
    act: Callable[[Loop], object],
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "model" in arguments:
        arguments = {**arguments, "model": arguments["model"]()}
    run_until(tmp_path, seeded_loop(**arguments), 5, ValueError(), act)
    assert steps_in(tmp_path) == [2, 4]
    (warning,) = warnings_of(caplog)
    assert problem in warning
    assert "the last save stays" in warning


def test_shards_that_get_another_tensor_are_saved_as_they_were(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    held = [uc.Shards.flat(whole + number, (8,), 0) for number in range(3)]
    manager = manager_of(None, tmp_path, save_on_exception=True, interval_steps=9)

    def train() -> None:
        model, optimizer, masters = (
            {name: h} for name, h in zip(("w", "w/m", "w"), held, strict=True)
        )
        manager.save(1, model=model, optimizer=optimizer, master_weights=masters)
        for each in held:
            each.tensor = each.tensor - 9  # of the next step

    end_by(ValueError(), manager, train)
    with uc.open(tmp_path / "checkpoint-1") as source:
        parts = (("model", "w"), ("optimizer", "w/m"), ("master_weights", "w"))
        for number, (part, name) in enumerate(parts):
            assert torch.equal(source[part][name][:], whole + number)


def raise_after(
    root: Path, comm: Comm | None, act: Callable[[uc.CheckpointManager], object]
) -> None:
    """Save step 1, and raise after `act`."""
    manager = manager_of(
        comm,
        root,
        save_on_exception=True,
        notice_seconds=0.02,
        interval_steps=1000,
        save_options=uc.SaveOptions(timeout_seconds=2),
    )

    def run() -> None:
        manager.save(1, force=True, **state(1))
        act(manager)

    end_by(ValueError("the loop"), manager, run)


def test_without_a_step_or_the_option_nothing_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(None, tmp_path, interval_steps=9)
    end_by(ValueError(), manager, lambda: manager.save(1, **state(1)))
    assert not warnings_of(caplog)
    end_by(ValueError(), manager_of(None, tmp_path, save_on_exception=True), lambda: None)
    assert "no step has ended since the run began" in warnings_of(caplog)[-1]
    assert steps_in(tmp_path) == []


def test_state_that_cannot_be_stored_is_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raise_after(tmp_path, None, lambda manager: manager.save(2, **state(2), extra=object()))
    assert "step 2 cannot be saved: extra: " in warnings_of(caplog)[-1]
    with torch.inference_mode():
        average = {"w": torch.ones(2)}
    raise_after(tmp_path, None, lambda manager: manager.save(2, **state(2), parts={"ema": average}))
    assert "ema:w: got a tensor of inference mode" in warnings_of(caplog)[-1]
    assert steps_in(tmp_path) == [1]


def test_failed_save_leaves_the_error_of_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: str) -> None:
        raise OSError(28, "No space left on device")

    raise_after(tmp_path, None, lambda manager: manager.save(2, **state(2), attach=fail))
    assert "No space left on device" in warnings_of(caplog)[-1]
    assert steps_in(tmp_path) == [1]


def test_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    raise_after(tmp_path, None, lambda manager: manager.finish(1, **state(1)))
    kinds = [event.event for event in read_events(str(tmp_path))]
    assert kinds == ["save", "stop"]


def test_hook_ends_with_the_manager(tmp_path: Path) -> None:
    count = len(_global_optimizer_pre_hooks)
    with manager_of(None, tmp_path, save_on_exception=True) as manager:
        manager.save(1, **state(1))
        assert len(_global_optimizer_pre_hooks) == count + 1
    assert len(_global_optimizer_pre_hooks) == count


@pytest.mark.parametrize("part", ["model", "ema"])
def test_change_before_the_commit_fails_the_save(tmp_path: Path, part: str) -> None:
    """The loop of another rank may run on while its state is saved."""
    arguments: dict[str, Any] = {"model": {"w": torch.zeros(3)}}
    tensor = arguments["model"]["w"]
    if part == "ema":
        arguments = {"parts": {"ema": arguments["model"]}}
    with uc.Checkpointer(tmp_path) as checkpointer:
        request = checkpointer.session.capture(arguments)
        checkpointer.session.save_captured("same", request)
        tensor.zero_()
        with pytest.raises(uc.CheckpointError, match=f"{part}:w has changed since the end"):
            checkpointer.session.save_captured("changed", request)
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_load_counts_as_a_change(tmp_path: Path) -> None:
    targets: dict[str, Any] = {"model": {"w": torch.zeros(1 << 20)}}
    with uc.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save("one", **targets)
        request = checkpointer.session.capture(targets)
        checkpointer.load("one", **targets)
        with pytest.raises(uc.CheckpointError, match="model:w has changed"):
            request.check_unchanged()


# several ranks


def test_rank_that_raises_alone_saves_with_the_others(tmp_path: Path) -> None:
    """The loops of the others wait for it in a collective, for ever."""
    saved, barrier = threading.Event(), threading.Barrier(3)

    def act(comm: Comm) -> None:
        def wait(manager: uc.CheckpointManager) -> None:
            manager.save(2, **state(2))
            barrier.wait(30)
            if comm.rank != 1:
                assert saved.wait(60)

        raise_after(tmp_path, comm, wait)
        saved.set()

    run_ranks(3, act)
    assert steps_in(tmp_path) == [1, 2]
    assert uc.verify(tmp_path / "checkpoint-2", deep=True).ok


def test_ranks_at_different_steps_save_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    barrier = threading.Barrier(2)

    def act(comm: Comm) -> None:
        def run_ahead(manager: uc.CheckpointManager) -> None:
            for step in range(2, 4 + comm.rank):
                manager.save(step, **state(step))
            barrier.wait(30)

        raise_after(tmp_path, comm, run_ahead)

    run_ranks(2, act)
    assert steps_in(tmp_path) == [1]
    (warning,) = warnings_of(caplog)
    assert "rank(s) 0 at 3, rank(s) 1 at 4" in warning


def test_loop_that_is_a_little_behind_catches_up(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        def lag(manager: uc.CheckpointManager) -> None:
            time.sleep(0.2 * comm.rank)
            manager.save(2, **state(2))
            time.sleep(0.4 * comm.rank)

        raise_after(tmp_path, comm, lag)

    run_ranks(2, act)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.slow
def test_loop_that_is_saving_is_waited_for_in_vain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its save waits for the rank that failed."""
    barrier = threading.Barrier(2)

    def act(comm: Comm) -> None:
        def save_alone(manager: uc.CheckpointManager) -> None:
            manager.save(2, **state(2))
            barrier.wait(30)
            if comm.rank == 0:
                with pytest.raises(uc.RankError):
                    manager.finish(2, **state(2))
            else:
                time.sleep(0.5)  # until the other one is in its save

        started = time.monotonic()
        raise_after(tmp_path, comm, save_alone)
        assert time.monotonic() - started < 20

    run_ranks(2, act)
    assert steps_in(tmp_path) == [1]
    assert "rank 0: it is saving" in "".join(warnings_of(caplog))


def test_optimizer_step_waits_for_the_save(tmp_path: Path) -> None:
    """The loop of a rank reaches its optimizer while a thread saves: it changes nothing before."""
    in_save, order = threading.Event(), list[str]()

    def attach(_: str) -> None:
        in_save.set()
        time.sleep(0.3)
        order.append("saved")

    def act(comm: Comm) -> None:
        def reach_optimizer(manager: uc.CheckpointManager) -> None:
            manager.save(2, **state(2), attach=attach)
            if comm.rank == 0:
                assert in_save.wait(30)
                manager.run.on_exception._mark_step()  # ranks that are threads share hooks
                order.append("stepped")

        raise_after(tmp_path, comm, reach_optimizer)

    run_ranks(2, act)
    assert order == ["saved", "stepped"]
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("raises", [False, True])
def test_store_keeps_no_key_of_a_closed_manager(tmp_path: Path, raises: bool) -> None:
    """But two counters of managers for each rank."""
    sizes, everyone = list[int](), threading.Barrier(3)

    def act(comm: Comm) -> None:
        for number in range(4):
            manager = manager_of(
                comm,
                tmp_path / str(number),
                save_on_exception=True,
                on_preemption=True,
                interval_seconds=1000,
                notice_seconds=0.01,
                margin_steps=1,
            )

            def run(manager: uc.CheckpointManager = manager) -> None:
                for step in range(1, 10):
                    everyone.wait(30)
                    if step == 3 and comm.rank == 1:
                        manager.request_stop()
                    if step == 2 if raises else manager.should_stop:
                        break
                    manager.save(step, **state(step))
                    time.sleep(0.02)

            if raises:
                end_by(ValueError(), manager, run)
            else:
                with manager:
                    run()
            with counting(comm):
                if comm.rank == 0:
                    sizes.append(comm._store.num_keys())

    run_ranks(3, act)
    assert len(set(sizes[1:])) == 1, sizes

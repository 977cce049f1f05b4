"""Public reports about runs that were started again."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.managers import (
    check_state,
    delete_manifest,
    manager_of,
    save_steps,
    state,
    steps_in,
    warnings_of,
)
from tests.support.refusals import same_error
from unified_ckpt.runtime.comm.comm import Comm

W = {"w": torch.arange(6.0)}


class Position:
    """The data position of a rank."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def resume_positions(
    path: Path, states: list[Any], *, world: int | None = None, kind: str = "rank_extra"
) -> tuple[list[Any], list[uc.LoadReport]]:
    """Save the position of each rank, and resume on as many ranks or on `world`."""

    def save(comm: Comm) -> None:
        values: dict[str, Any] = {kind: {"data": Position(states[comm.rank])}}
        make_checkpointer(comm).save(path, model=W, **values)

    positions = [Position("fresh") for _ in range(world or len(states))]

    def load(comm: Comm) -> uc.LoadReport:
        values: dict[str, Any] = {kind: {"data": positions[comm.rank]}}
        return make_checkpointer(comm).load(path, model={"w": torch.zeros(6)}, **values)

    run_ranks(len(states), save)
    reports = run_ranks(len(positions), load)
    return [position.state for position in positions], reports


def check_restores(root: Path, step: int) -> None:
    """Check that a manager without options restores this step."""
    targets = state(0)
    with manager_of(None, root) as manager:
        report = manager.restore(**targets)
    assert report.step == step
    check_state(targets, step)


def build() -> dict[str, Any]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "extra": {"scheduler": scheduler}}


def train(job: dict[str, Any], steps: int) -> None:
    for number in range(steps):
        job["optimizer"].zero_grad()
        job["model"](torch.full((4,), number + 1.0)).square().sum().backward()
        job["optimizer"].step()
        job["extra"]["scheduler"].step()


@pytest.mark.incident("verl#7952")
def test_background_saves_are_found_without_a_tracker(tmp_path: Path) -> None:
    """The file that names the latest step was written by nobody, so a restart began at step 0."""
    with manager_of(None, tmp_path, interval_steps=5, asynchronous=True) as manager:
        for step in range(1, 12):
            manager.save(step, **state(step))
    check_restores(tmp_path, 10)


@pytest.mark.incident("Automodel#3254")
def test_folder_that_an_interrupted_save_left(tmp_path: Path) -> None:
    """Rank 0 refused the existing folder alone; the other ranks waited for it for ever."""
    save_steps(tmp_path, 10, 20)
    delete_manifest(tmp_path / "checkpoint-20")
    (tmp_path / "checkpoint-20" / "optimizer.safetensors").unlink()

    def act(comm: Comm) -> int | None:
        targets = state(0)
        with manager_of(comm, tmp_path, interval_steps=10) as manager:
            report = manager.restore(**targets)
            check_state(targets, 10)
            manager.save(20, **state(20))
        return report.step if report else None

    assert run_ranks(2, act) == [10, 10]
    targets = state(0)
    assert uc.load(tmp_path / "checkpoint-20", **targets).step == 20
    check_state(targets, 20)


@pytest.mark.incident("transformers#35782")
def test_newest_step_is_incomplete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The Trainer takes the newest folder, and ends because a file is missing in it."""
    save_steps(tmp_path, 1, 2)
    (tmp_path / "checkpoint-2" / "optimizer.safetensors").unlink()
    check_restores(tmp_path, 1)
    assert any("optimizer.safetensors" in text for text in warnings_of(caplog))


@pytest.mark.incident("torchtitan#4011")
def test_newest_step_has_lost_its_data(tmp_path: Path) -> None:
    """A step counted as valid because its metadata file exists, whatever became of its data."""
    save_steps(tmp_path, 1, 2)
    flip(tmp_path / "checkpoint-2" / "optimizer.safetensors")
    check_restores(tmp_path, 1)


@pytest.mark.incident("speculators#739")
def test_newest_step_was_truncated(tmp_path: Path) -> None:
    """Any folder with a number as its name was resumed; a file cut short ended each restart."""
    save_steps(tmp_path, 1, 2)
    os.truncate(tmp_path / "checkpoint-2" / "model.safetensors", 200)
    check_restores(tmp_path, 1)
    with manager_of(None, tmp_path) as manager:
        assert [record.step for record in manager.steps()] == [1]


@pytest.mark.incident("Automodel#763")
def test_learning_rate_continues(tmp_path: Path) -> None:
    """Optimizer and scheduler were read into dicts and never loaded: the schedule began again."""

    job, other = build(), build()
    train(job, 3)
    uc.save(tmp_path / "c", **job)
    uc.load(tmp_path / "c", **other)
    assert other["optimizer"].param_groups[0]["lr"] == 0.125
    assert other["extra"]["scheduler"].last_epoch == 3
    other["extra"]["scheduler"].step()
    assert other["optimizer"].param_groups[0]["lr"] == 0.0625


@pytest.mark.incident("Automodel#836")
def test_run_of_another_model_in_the_root(tmp_path: Path) -> None:
    """The checkpoints of the last experiment are in the folder, of another model."""
    root = tmp_path / "run"
    uc.save(root / "checkpoint-3", model=nn.Linear(4, 4), step=3)
    model = nn.Linear(8, 2)
    before = copy.deepcopy(model.state_dict())
    with manager_of(None, root) as manager, pytest.raises(uc.MismatchError, match="weight"):
        manager.restore(model=model)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert steps_in(root) == [3]


@pytest.mark.incident("DLRover#907")
def test_ranks_that_load_different_steps(tmp_path: Path) -> None:
    """Each rank loads what it holds in memory: after a crash these may be different steps."""
    save_steps(tmp_path, 1, 2)
    targets = [state(0), state(0)]

    def load(comm: Comm) -> uc.LoadReport:
        path = tmp_path / f"checkpoint-{comm.rank + 1}"
        return make_checkpointer(comm).load(path, **targets[comm.rank])

    same_error(try_ranks(2, load), uc.StorageError, "the ranks opened different checkpoints")
    for of_rank in targets:
        check_state(of_rank, 0)


@pytest.mark.incident("accelerate#4165")
def test_each_rank_continues_its_own_stream(tmp_path: Path) -> None:
    """All ranks wrote the position in the data to one file; that of the last writer remained."""
    states = [{"batch": 3 + rank, "shard": f"data-{rank}"} for rank in range(3)]
    assert resume_positions(tmp_path / "c", states)[0] == states


@pytest.mark.incident("prime-rl#1035")
def test_packing_buffers_differ_between_ranks(tmp_path: Path) -> None:
    """Buckets that each rank fills from its own samples were not saved, or were those of rank 0."""
    states = [
        {"buckets": [[rank] * rank, []], "timers": [None, rank], "rows": torch.full((2,), rank)}
        for rank in range(2)
    ]
    loaded, _ = resume_positions(tmp_path / "c", states, kind="extra")
    for expected, actual in zip(states, loaded, strict=True):
        assert torch.equal(actual.pop("rows"), expected.pop("rows"))
        assert actual == expected


@pytest.mark.incident("Megatron-Bridge#5637")
def test_data_position_of_more_ranks_is_not_dropped_silently(tmp_path: Path) -> None:
    """On fewer ranks each took the file of its number, and the rest of the stream was lost."""
    states = [{"sample": 10}, {"sample": 20}]
    loaded, reports = resume_positions(tmp_path / "c", states, world=1)
    assert loaded == ["fresh"]
    assert reports[0].kept == ("rank_extra.data",)
    assert "saved by 2 rank(s), loaded by 1 rank(s)" in reports[0].notes[0]


@pytest.mark.incident("Megatron-LM#6858")
def test_random_states_of_all_ranks_return(tmp_path: Path) -> None:
    """The state of an expert's generator was stored once for all data-parallel ranks: 252 of 256
    ranks resumed with that of another.
    """
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
    states = [generator.get_state() for generator in generators]
    draws = [torch.rand(3, generator=generator) for generator in generators]
    loaded, _ = resume_positions(tmp_path / "c", states)
    for rng_state, expected in zip(loaded, draws, strict=True):
        generator = torch.Generator()
        generator.set_state(rng_state)
        assert torch.equal(torch.rand(3, generator=generator), expected)


@pytest.mark.incident("Megatron-LM#602")
def test_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    """While the loss scale is searched no step is made, and the save fails or lacks the state."""

    job, other = build(), build()
    job["optimizer"].param_groups[0]["lr"] = 0.25
    uc.save(tmp_path / "c", **job, step=20)
    assert uc.load(tmp_path / "c", **other).step == 20
    assert not other["optimizer"].state
    assert other["optimizer"].param_groups[0]["lr"] == 0.25


@pytest.mark.incident("transformers#29059")
def test_step_without_the_state_of_the_trainer(tmp_path: Path) -> None:
    """Without `trainer_state.json`, weights and optimizer of a Trainer's folder were useless."""
    job, other = build(), build()
    train(job, 2)
    model, optimizer = job["model"], job["optimizer"]
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    uc.load(folder, model=other["model"], optimizer=other["optimizer"])
    moment = other["optimizer"].state[other["model"].weight]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model.weight]["exp_avg"])
    assert torch.equal(other["model"].weight, model.weight)
    assert other["optimizer"].param_groups[0]["lr"] == 0.25


@pytest.mark.incident("marin#5217")
def test_run_that_moved_takes_the_newer_of_two_places(tmp_path: Path) -> None:
    """Newer temporary checkpoints lay elsewhere: a restart took the older permanent one."""
    local = tmp_path / "local"
    options = {"local_directory": str(local), "local_interval_steps": 1, "interval_steps": 2}
    with manager_of(None, tmp_path / "root", **options) as manager:
        for step in range(1, 4):
            manager.save(step, **state(step))
    targets = state(0)
    with manager_of(None, tmp_path / "root", **options) as manager:
        report = manager.restore(**targets)
    assert report.step == 3
    check_state(targets, 3)
    shutil.rmtree(local)
    with manager_of(None, tmp_path / "root", **options) as manager:
        report = manager.restore(**targets)
    assert report.step == 2
    check_state(targets, 2)


@pytest.mark.incident("verl#7953")
def test_scheduler_that_is_saved_and_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule was saved at every step and dropped at every resume, by default."""
    job = build()
    train(job, 2)
    uc.save(tmp_path / "c", **job)
    other = build()
    report = uc.load(tmp_path / "c", model=other["model"], optimizer=other["optimizer"])
    assert report.unused == ("extra:scheduler",)
    assert any("no rank loaded extra:scheduler" in text for text in warnings_of(caplog))


@pytest.mark.incident("tinker-feedback#127")
def test_next_step_is_that_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """A resume with the optimizer was equal, bit for bit, to one that loads the weights only."""
    job = build()
    train(job, 3)
    uc.save(tmp_path / "c", **job)
    train(job, 1)
    resumed, cold = build(), build()
    uc.load(tmp_path / "c", **resumed)
    uc.load(tmp_path / "c", model=cold["model"], options=uc.LoadOptions(parts=("model",)))
    for each in (resumed, cold):
        train(each, 1)
    assert torch.equal(resumed["model"].weight, job["model"].weight)
    assert not torch.equal(cold["model"].weight, job["model"].weight)

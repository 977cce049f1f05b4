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
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.manager.managers import (
    check_state,
    delete_manifest,
    manager_of,
    restored,
    save_steps,
    state,
    steps_in,
    train,
)
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


def build() -> dict[str, Any]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "extra": {"scheduler": scheduler}}


def advance(job: dict[str, Any], steps: int) -> None:
    for number in range(steps):
        job["optimizer"].zero_grad()
        job["model"](torch.full((4,), number + 1.0)).square().sum().backward()
        job["optimizer"].step()
        job["extra"]["scheduler"].step()


@pytest.mark.incident("verl#7952")
def test_background_saves_are_found_without_a_tracker(tmp_path: Path) -> None:
    """The file that names the latest step was written by nobody, so a restart began at step 0."""
    with manager_of(None, tmp_path, interval_steps=5, asynchronous=True) as manager:
        train(manager, range(1, 12))
    assert restored(tmp_path) == 10


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


@pytest.mark.incident("torchtitan#4011")
def test_newest_step_has_lost_its_data(tmp_path: Path) -> None:
    """A step counted as valid because its metadata file exists, whatever became of its data."""
    save_steps(tmp_path, 1, 2)
    flip(tmp_path / "checkpoint-2" / "optimizer.safetensors")
    assert restored(tmp_path) == 1


@pytest.mark.incident("speculators#739")
def test_newest_step_was_truncated(tmp_path: Path) -> None:
    """Any folder with a number as its name was resumed; a file cut short ended each restart."""
    save_steps(tmp_path, 1, 2)
    os.truncate(tmp_path / "checkpoint-2" / "model.safetensors", 200)
    assert restored(tmp_path) == 1
    with manager_of(None, tmp_path) as manager:
        assert [record.step for record in manager.steps()] == [1]


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


@pytest.mark.incident("accelerate#4165")
def test_each_rank_continues_its_own_stream(tmp_path: Path) -> None:
    """All ranks wrote the position in the data to one file; that of the last writer remained."""
    states = [{"batch": 3 + rank, "shard": f"data-{rank}"} for rank in range(3)]

    def resume(comm: Comm) -> Any:
        checkpointer, position = make_checkpointer(comm), Position("fresh")
        saved = {"data": Position(states[comm.rank])}
        checkpointer.save(tmp_path / "c", model=W, rank_extra=saved)
        checkpointer.load(tmp_path / "c", model=W, rank_extra={"data": position})
        return position.state

    assert run_ranks(3, resume) == states


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
    advance(job, 2)
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
        train(manager, range(1, 4))
    assert restored(tmp_path / "root", **options) == 3
    shutil.rmtree(local)
    assert restored(tmp_path / "root", **options) == 2


@pytest.mark.incident("tinker-feedback#127")
def test_next_step_is_that_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """A resume with the optimizer was equal, bit for bit, to one that loads the weights only."""
    job = build()
    advance(job, 3)
    uc.save(tmp_path / "c", **job)
    advance(job, 1)
    resumed, cold = build(), build()
    uc.load(tmp_path / "c", **resumed)
    uc.load(tmp_path / "c", model=cold["model"], options=uc.LoadOptions(parts=("model",)))
    for each in (resumed, cold):
        advance(each, 1)
    assert torch.equal(resumed["model"].weight, job["model"].weight)
    assert not torch.equal(cold["model"].weight, job["model"].weight)

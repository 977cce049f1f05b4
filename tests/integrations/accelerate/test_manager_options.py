"""`attach(accelerator, manager_options=…)`: failed saves, signals, two tiers, and what the
configuration of the project decides.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.integrations.accelerates import FAST, Job, same
from unified_ckpt.integrations.accelerate import after_step, attach

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated"
)  # torchdata 0.11 calls it
RUN: dict[str, Any] = {"notice_seconds": 0.001, "retry_seconds": 0.0}


def managed(job: Job, **options: Any) -> uc.CheckpointManager:
    return attach(
        job.accelerator, manager_options=uc.ManagerOptions(**RUN | options), save_options=FAST
    )


def each_step(
    job: Job, checkpoints: uc.CheckpointManager, signal_at: int = -1, **metrics: float
) -> Callable[[], bool]:
    """What a script does after each step. A signal arrives after a number of batches."""

    def step() -> bool:
        if len(job.losses) == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        after_step(job.accelerator, metrics=metrics)
        return checkpoints.should_stop

    return step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint_*"))


@pytest.mark.parametrize(
    ("options", "naming", "words"),
    [
        ({"keep_latest": 3}, {"total_limit": 2}, r"total_limit=2"),
        ({"step_prefix": "step-"}, {}, "Accelerate's names, checkpoint_<n>"),
        ({"save_on_exception": True}, None, "automatic_checkpoint_naming=False"),
        ({"load_full_state_path": "x"}, {}, "decides what to load"),
        ({"on_completion": True}, {}, r"save_state\(\), which saves the last step"),
        ({"interval_steps": 3}, None, "automatic_checkpoint_naming=False"),
        ({"keep_every_steps": 3}, None, "automatic_checkpoint_naming=False"),
        (
            {"local_interval_steps": 1, "local_directory": "x"},
            None,
            "automatic_checkpoint_naming=False",
        ),
    ],
)
def test_contradiction_names_both(
    tmp_path: Path, options: dict[str, Any], naming: dict[str, Any] | None, words: str
) -> None:
    job = Job(project=tmp_path, **naming or {})
    job.accelerator.project_configuration.automatic_checkpoint_naming = naming is not None
    with pytest.raises(uc.CheckpointError, match=words) as caught:
        managed(job, **options)
    assert f"ManagerOptions({[*options][-1]}=" in str(caught.value)


def test_no_folder_of_the_run_raises() -> None:
    with pytest.raises(uc.LayoutError, match="set ProjectConfiguration"):
        managed(Job())
    with pytest.raises(uc.CheckpointError, match="call attach"):
        after_step(Job().accelerator)


def test_signal_stops_and_the_resume_is_bitwise(tmp_path: Path, straight: Job) -> None:
    job = Job(project=tmp_path)
    with managed(job) as checkpoints:
        job.run(3, after_step=each_step(job, checkpoints, signal_at=9))
        assert checkpoints.should_stop
    assert len(job.losses) % 2 == 0, "not while gradients accumulate"
    assert 9 < len(job.losses) < 18
    resumed = Job(seed=7, project=tmp_path)
    managed(resumed)
    resumed.accelerator.load_state()
    resumed.epoch = len(job.losses) // 6
    resumed.run(3)
    assert resumed.losses == straight.losses[len(job.losses) :]
    assert same(resumed, straight)


def test_signals_stay_with_a_script_that_counts_no_steps(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    job = Job(project=tmp_path)
    checkpoints = managed(job)
    job.accelerator.save_state()
    assert signal.getsignal(signal.SIGTERM) == before
    after_step(job.accelerator)
    assert signal.getsignal(signal.SIGTERM) != before
    loops = vars(job.accelerator.gradient_state)
    assert "_add_dataloader" in loops, "the positions of data loaders are corrected"
    job.accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) == before
    assert "_add_dataloader" not in loops
    assert names(Path(checkpoints.root)) == ["checkpoint_0"], "the save in flight is waited for"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    job, failures = Job(project=tmp_path, total_limit=1), iter(range(2))
    checkpoints = managed(job, asynchronous=asynchronous, retries=0, raise_after=3)
    configuration = type(job.accelerator.unwrap_model(job.model).config)
    original = configuration.save_pretrained

    def save(self: Any, folder: str, *arguments: Any, **keywords: Any) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, folder, *arguments, **keywords)

    monkeypatch.setattr(configuration, "save_pretrained", save)
    paths = [job.accelerator.save_state() for _ in range(4)]
    job.accelerator.end_training()
    assert [path is None for path in paths] == [not asynchronous] * 2 + [False] * 2
    assert names(Path(checkpoints.root)) == [f"checkpoint_{3 if asynchronous else 1}"]
    assert uc.verify(Path(checkpoints.root) / names(Path(checkpoints.root))[0], deep=True).ok


def test_too_many_failures_raise(tmp_path: Path) -> None:
    job = Job(project=tmp_path)
    managed(job, asynchronous=False, retries=0, raise_after=2)
    (tmp_path / "checkpoints").write_text("a file where the folder has to be")
    assert job.accelerator.save_state() is None
    with pytest.raises(uc.StorageError, match="checkpoints"):
        job.accelerator.save_state()


def test_intervals_and_the_newest_of_both_tiers(tmp_path: Path) -> None:
    local = tmp_path / "local"
    options = {
        "interval_steps": 4,
        "local_interval_steps": 2,
        "local_directory": str(local),
        "keep_best": 1,
        "best_metric": "loss",
    }
    job = Job(project=tmp_path / "run", total_limit=1)
    with managed(job, **options) as checkpoints:
        job.run(2, after_step=each_step(job, checkpoints, loss=1.0))  # six optimizer steps
    # steps 2, 4 and 6; only 4 is due in the root
    assert names(tmp_path / "run/checkpoints") == ["checkpoint_1"]
    assert "checkpoint_2" in names(local)
    resumed = Job(seed=7, project=tmp_path / "run", total_limit=1)
    with managed(resumed, **options) as checkpoints:
        resumed.accelerator.load_state()
        assert same(resumed, job), "the newest is in the local directory"
        assert resumed.accelerator.save_iteration == 3
        resumed.epoch = 2
        resumed.run(3, stop=4, after_step=each_step(resumed, checkpoints, loss=2.0))
        checkpoints.wait()
    kept = ["checkpoint_1", "checkpoint_3"]
    assert names(tmp_path / "run/checkpoints") == kept, "step 8 is the latest, step 4 the best"
    again = Job(seed=8, project=tmp_path / "run")
    (local / "checkpoint_3/model.safetensors").unlink()
    attach(again.accelerator, manager_options=uc.ManagerOptions(**RUN | options))
    again.accelerator.load_state()
    assert same(again, resumed), "the root has what the local directory lost"


def test_damaged_step_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(project=tmp_path)
    with managed(job):
        job.run(1, stop=2).accelerator.save_state()
        first = {name: tensor.clone() for name, tensor in job.tensors().items()}
        job.run(1, stop=4).accelerator.save_state()
    flip(tmp_path / "checkpoints/checkpoint_1/model.safetensors", -1)
    resumed = Job(seed=7, project=tmp_path)
    with managed(resumed):
        resumed.accelerator.load_state()
        assert all(torch.equal(resumed.tensors()[name], first[name]) for name in first)
        assert resumed.accelerator.save_iteration == 2
    assert "checkpoint_1" in caplog.text


def test_nothing_to_load_raises(tmp_path: Path) -> None:
    job = Job(project=tmp_path)
    managed(job)
    with pytest.raises(uc.NotFoundError, match="got no checkpoint"):
        job.accelerator.load_state()


def test_a_run_that_does_not_load_replaces_nothing(tmp_path: Path) -> None:
    first = Job(project=tmp_path)
    with managed(first):
        first.accelerator.save_state()
    fresh = Job(seed=7, project=tmp_path)
    managed(fresh)
    with pytest.raises(uc.StorageError, match="checkpoint_0: already exists; call load_state"):
        fresh.accelerator.save_state()


def test_paths_of_a_script(tmp_path: Path) -> None:
    job = Job(project=tmp_path)
    job.accelerator.project_configuration.automatic_checkpoint_naming = False
    with managed(job) as checkpoints:
        for _ in range(2):
            path = job.accelerator.save_state(tmp_path / "latest")
        assert path == tmp_path / "latest"
        job.run(3, after_step=each_step(job, checkpoints, signal_at=4))
        job.accelerator.save_state(tmp_path / "stopped")
        assert uc.verify(tmp_path / "stopped").ok, "the last save is in the foreground"
    assert sorted(path.parent.name for path in tmp_path.glob("*/unified_checkpoint.json")) == [
        "latest",
        "stopped",
    ]
    resumed = Job(seed=7, project=tmp_path)
    managed(resumed)
    resumed.accelerator.load_state(tmp_path / "stopped")
    assert same(resumed, job)


def test_numbers_go_on_after_a_stock_run(tmp_path: Path) -> None:
    native = Job(project=tmp_path).run(1, stop=2)
    native.accelerator.save_state()
    native.accelerator.save_state()
    job = Job(seed=7, project=tmp_path)
    with managed(job):
        job.accelerator.load_state()
        assert same(job, native)
        job.accelerator.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert uc.verify(tmp_path / "checkpoints/checkpoint_2").ok

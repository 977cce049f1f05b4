"""Public reports about which checkpoints of a run stay."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.support.manager.managers import (
    check_state,
    folders,
    manager_of,
    restored,
    save_steps,
    state,
    steps_in,
    train,
)


class Gate:
    """Holds a save before its commit, as slow storage does, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, folder: Path) -> None:
        self.reached.set()
        assert self.opened.wait(60)


@pytest.mark.incident("Megatron-Bridge#4678")
def test_old_step_stays_until_the_new_one_is_committed(tmp_path: Path) -> None:
    """Bridge deleted the only complete checkpoint as soon as the next save was scheduled."""
    save_steps(tmp_path, 500)
    gate = Gate()
    with manager_of(
        None, tmp_path, interval_steps=500, keep_latest=1, asynchronous=True
    ) as manager:
        manager.save(1000, **state(1000), attach=gate)
        assert gate.reached.wait(60)
        seen = manager.steps()
        gate.opened.set()
        manager.wait()
        assert [record.step for record in seen] == [500]
        assert steps_in(tmp_path) == [1000]


@pytest.mark.incident("Megatron-Bridge#5184")
def test_committed_step_stays_beside_a_folder_in_flight(tmp_path: Path) -> None:
    """Retention took the unfinished folder of a later save for the newest checkpoint."""
    unfinished = tmp_path / "checkpoint-1500"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    with manager_of(None, tmp_path, interval_steps=500, keep_latest=1) as manager:
        save_steps(tmp_path, 500)
        manager.save(1000, **state(1000))
        assert [record.step for record in manager.steps()] == [1000]
    assert folders(tmp_path) == ["checkpoint-1000", "checkpoint-1500"]


@pytest.mark.incident("Megatron-Bridge#5296")
def test_folders_below_a_sibling_are_not_counted(tmp_path: Path) -> None:
    """The data position in `energon/iter_N` took the place of the model in `iter_N`."""
    with manager_of(None, tmp_path, interval_steps=1, keep_latest=1) as manager:
        for step in (1, 2):
            save_steps(tmp_path / "energon", step, full=False)
            manager.save(step, **state(step))
    assert steps_in(tmp_path) == [2]
    assert steps_in(tmp_path / "energon") == [1, 2]


@pytest.mark.incident("transformers#25129")
def test_limit_of_one_keeps_the_best_and_the_latest(tmp_path: Path) -> None:
    """`save_total_limit=1` with `load_best_model_at_end` left no checkpoint to resume from."""
    options = {"keep_latest": 1, "keep_best": 1, "best_metric": "loss"}
    with manager_of(None, tmp_path, interval_steps=1, **options) as manager:
        for step, loss in enumerate((3.0, 1.0, 2.0, 5.0), 1):
            manager.save(step, **state(step), metrics={"loss": loss})
        best, latest = manager.best(), manager.latest()
    assert (best.step, latest.step) == (2, 4)
    assert steps_in(tmp_path) == [2, 4]


@pytest.mark.incident("transformers#27138")
def test_copied_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    """After a copy that changed the file times, rotation by time deleted the newest."""
    save_steps(tmp_path, 2, 10)
    for step, seconds in ((10, 1), (2, 2_000_000_000)):
        for path in (tmp_path / f"checkpoint-{step}", *(tmp_path / f"checkpoint-{step}").iterdir()):
            os.utime(path, (seconds, seconds))
    with manager_of(None, tmp_path, interval_steps=1, keep_latest=2) as manager:
        manager.save(11, **state(11))
    assert steps_in(tmp_path) == [10, 11]


@pytest.mark.incident("NeMo-Speech#13581")
def test_checkpoint_that_somebody_removed(tmp_path: Path) -> None:
    """Removing an older checkpoint that was already gone ended the training."""
    with manager_of(None, tmp_path, interval_steps=1, keep_latest=1) as manager:
        manager.save(1, **state(1))
        shutil.rmtree(tmp_path / "checkpoint-1")
        for step in (2, 3):
            assert manager.save(step, **state(step)) is not None
    assert steps_in(tmp_path) == [3]


@pytest.mark.incident("transformers#48315")
def test_best_checkpoint_that_was_not_copied_along(tmp_path: Path) -> None:
    """A resumed run remembers the path of the best checkpoint, and ends by an error."""
    options = {"interval_steps": 1, "keep_latest": 1, "keep_best": 1, "best_metric": "loss"}
    with manager_of(None, tmp_path / "old", **options) as manager:
        for step, loss in ((1, 0.5), (2, 2.0)):
            manager.save(step, **state(step), metrics={"loss": loss})
    shutil.copytree(tmp_path / "old" / "checkpoint-2", tmp_path / "new" / "checkpoint-2")
    shutil.rmtree(tmp_path / "old")
    targets = state(0)
    with manager_of(None, tmp_path / "new", **options) as manager:
        assert manager.restore(**targets) is not None
        for step, loss in ((3, 4.0), (4, 3.0)):
            manager.save(step, **state(step), metrics={"loss": loss})
        manager.finish(4, **state(4), metrics={"loss": 3.0})
        best = manager.best()
    check_state(targets, 2)
    assert best.step == 2
    assert steps_in(tmp_path / "new") == [2, 4]


@pytest.mark.incident("KempnerForge#102")
def test_pointer_never_names_a_save_in_flight(tmp_path: Path) -> None:
    """`latest` named a step before it was durable; a job that died then had nothing to resume."""
    gate = Gate()
    with manager_of(None, tmp_path, interval_steps=1, asynchronous=True) as manager:
        manager.save(1, **state(1))
        manager.wait()
        manager.save(2, **state(2), attach=gate)
        assert gate.reached.wait(60)
        step = restored(tmp_path)  # what a restarted job sees
        gate.opened.set()
    assert step == 1


@pytest.mark.incident("verl#4667")
def test_background_saves_with_removal_of_the_previous(tmp_path: Path) -> None:
    """The previous checkpoint was removed while the next was still being written."""
    steps_beside_each_save: list[list[int]] = []
    with manager_of(None, tmp_path, interval_steps=1, keep_latest=1, asynchronous=True) as manager:
        for step in range(1, 6):
            manager.save(
                step,
                **state(step),
                attach=lambda folder: steps_beside_each_save.append(steps_in(tmp_path)),
            )
    assert steps_beside_each_save == [[], [1], [2], [3], [4]]
    assert steps_in(tmp_path) == [5]


@pytest.mark.incident("fairchem#1242")
def test_link_to_a_step_is_no_step(tmp_path: Path) -> None:
    """The link to a preempted step was counted and removed like a folder, which failed."""
    with manager_of(None, tmp_path, interval_steps=1, keep_latest=1) as manager:
        manager.save(1, **state(1))
        (tmp_path / "checkpoint-0").symlink_to("checkpoint-1")
        train(manager, (2, 3))
        assert [record.step for record in manager.steps()] == [3]
    assert (tmp_path / "checkpoint-0").is_symlink()
    assert folders(tmp_path) == ["checkpoint-0", "checkpoint-3"]

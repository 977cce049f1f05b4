"""`log_saves`: what a save took is in the Trainer's log, and in nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

import unified_ckpt as uc
from tests.support.integrations.trainers import StopAt, check_same
from tests.support.integrations.trainers import trainer as native_trainer
from unified_ckpt.integrations.loggers import METRICS
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

NAMES = set(METRICS) | {"checkpoint/bytes/model", "checkpoint/bytes/optimizer"}


def trainer(out: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    run = native_trainer(out, *callbacks, native=True, **arguments)
    UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False), log_saves=True).attach(run)
    return run


def logged_saves(history: list[dict[str, Any]]) -> dict[int, int]:
    """Step of an entry -> step of the save that it describes. The last entry is negative."""
    return {
        -entry["step"] if "train_loss" in entry else entry["step"]: entry["checkpoint/step"]
        for entry in history
        if "checkpoint/step" in entry
    }


def test_entries_about_training_describe_the_last_save(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=4, save_steps=1, logging_steps=2, eval_strategy="steps")
    run.train()
    assert logged_saves(run.state.log_history) == {2: 1, 4: 3, -4: 4}
    for entry in run.state.log_history:
        assert entry.keys() & NAMES in (NAMES, set())
        if "checkpoint/step" in entry:
            assert "eval_loss" not in entry
            folder = tmp_path / f"checkpoint-{entry['checkpoint/step']}"
            assert entry["checkpoint/bytes"] == uc.verify(folder).nbytes
            assert entry["checkpoint/blocked_seconds"] == entry["checkpoint/seconds"] > 0
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert logged_saves(saved["log_history"]) == {2: 1, 4: 3}
    manifest = json.loads((tmp_path / "checkpoint-4" / "unified_checkpoint.json").read_text())
    assert "loss" in manifest["metrics"]
    assert NAMES & manifest["metrics"].keys() == set()  # those of the save of step 3


@pytest.mark.integration
def test_resumed_run_equals_one_that_logs_nothing(tmp_path: Path) -> None:
    straight = native_trainer(tmp_path / "straight")
    straight.train()
    trainer(tmp_path / "run", StopAt(4)).train()
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
    assert logged_saves(resumed.state.log_history) == {3: 2, -6: 6}
    assert logged_saves(straight.state.log_history) == {}


@pytest.mark.integration
def test_hooks_get_the_commits_of_every_run(tmp_path: Path) -> None:
    callback = UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False))
    reports: list[uc.SaveReport] = []
    callback.on_commit(reports.append)
    for register in (callback.on_commit, callback.on_failure):
        with pytest.raises(TypeError, match="hook: got int, expected a function"):
            register(1)  # type: ignore[arg-type, operator]
    run = native_trainer(tmp_path, native=True)
    callback.attach(run)
    run.train()
    run.train()
    assert [report.step for report in reports] == [2, 4, 6, 2, 4, 6]

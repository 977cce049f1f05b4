"""`async_save`: a background save holds the state of its step, and counts only after its commit."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import unified_ckpt as uc
from tests.support.adapter_models import lora
from tests.support.trainer_arguments import BEST, state_of
from tests.support.trainers import StopAt, check_same, model
from tests.support.trainers import trainer as plain_trainer
from unified_ckpt.engine.folder import commit
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback


def trainer(
    out: Path, *callbacks: TrainerCallback, of: torch.nn.Module | None = None, **arguments: Any
) -> Trainer:
    made = plain_trainer(out, *callbacks, stock=True, **arguments)
    if of is not None:
        made.model = made.model_wrapped = of
    UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False), async_save=True).attach(
        made
    )
    return made


class Gate:
    """Blocks every commit until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open, publish = threading.Event(), commit.publish
        patch.setattr(
            commit,
            "publish",
            lambda *args, **more: (self._open.wait(60), publish(*args, **more))[1],
        )

    def open(self) -> None:
        self._open.set()


class At(TrainerCallback):
    """Calls a function at a step."""

    def __init__(self, step: int, function: Any) -> None:
        self._step, self._function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._function()


def test_background_checkpoint_has_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = plain_trainer(tmp_path / "stock", stock=True)
    straight.train()
    gate, seen = Gate(monkeypatch), []

    def look() -> None:
        seen.extend(name for name in os.listdir(tmp_path / "run") if name.startswith("checkpoint-"))
        gate.open()

    made = trainer(tmp_path / "run", At(3, look))
    made.train()
    assert seen == [], "step 3 is done, and checkpoint-2 still being written"
    check_same(made, straight)
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for step in (2, 4, 6):
        assert uc.verify(tmp_path / "run" / f"checkpoint-{step}", deep=True).ok
        assert state_of(tmp_path / "run" / f"checkpoint-{step}") == state_of(
            tmp_path / "stock" / f"checkpoint-{step}"
        )
    for step in (2, 4):
        resumed = trainer(tmp_path / "run")
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        check_same(resumed, straight)


class Writes(TrainerCallback):
    """Writes a file into each checkpoint folder in `on_save`."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "mine.txt"), "w") as file:
            file.write(str(state.global_step))


def test_files_of_callbacks_are_moved_into_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They come while the checkpoint is being written. What the stock Trainer has left there half
    written is kept.
    """
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"half")
    trainer(tmp_path, Writes()).train()
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-4-before-1",
        "checkpoint-6",
    ]
    for step in (2, 4, 6):
        assert uc.verify(tmp_path / f"checkpoint-{step}", deep=True).ok
        assert (tmp_path / f"checkpoint-{step}" / "mine.txt").read_text() == str(step)
    assert (tmp_path / "checkpoint-4-before-1" / "optimizer.pt").read_bytes() == b"half"
    assert "checkpoint-4-before-1" in caplog.text


def test_failed_background_save_raises_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = trainer(tmp_path, StopAt(2))
    stopped.train()

    def full(*_: Any, **__: Any) -> None:
        raise uc.StorageError("no space left")

    made = trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "publish", full)
        with pytest.raises(uc.CheckpointError, match="no space left"):
            made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 6, "the save of step 4 fails at that of step 6"
    assert os.listdir(tmp_path) == ["checkpoint-2"], "the last good one stays, and nothing else"


def test_older_checkpoint_stays_until_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, StopAt(2), save_total_limit=1).train()
    gate, seen = Gate(monkeypatch), []

    def look() -> None:
        seen.extend(name for name in os.listdir(tmp_path) if name.startswith("checkpoint-"))
        gate.open()

    trainer(tmp_path, At(5, look), save_total_limit=1).train(resume_from_checkpoint=True)
    assert seen == ["checkpoint-2"]
    assert os.listdir(tmp_path) == ["checkpoint-6"]


def test_best_checkpoint_is_awaited_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {**BEST, "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    straight = plain_trainer(tmp_path / "stock", stock=True, **arguments)
    straight.train()
    made = trainer(tmp_path / "run", **arguments)
    made.train()
    check_same(made, straight)
    assert os.listdir(tmp_path / "run") == os.listdir(tmp_path / "stock")


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_adapters(tmp_path: Path) -> None:
    made = trainer(tmp_path, of=lora())
    made.train()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        *os.listdir(tmp_path / "checkpoint-6")
    }
    assert uc.verify(tmp_path / "checkpoint-6", deep=True).ok


def test_push_to_hub_is_refused(tmp_path: Path) -> None:
    made = plain_trainer(tmp_path, stock=True)
    made.model = model()
    made.args.push_to_hub = True
    with pytest.raises(uc.LayoutError, match="use async_save=False"):
        UnifiedCheckpointCallback(async_save=True).attach(made)

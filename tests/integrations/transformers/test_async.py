"""`async_save`: a background save has the state of its step, and counts only after its commit."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import unified_ckpt as uc
from tests.support.integrations.adapter_models import lora
from tests.support.integrations.trainer_arguments import BEST, state_of
from tests.support.integrations.trainers import At, StopAt, check_same, entries, model
from tests.support.integrations.trainers import trainer as native_trainer
from unified_ckpt.engine.folder.publish.renames import RenamePublisher
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

pytestmark = pytest.mark.integration


def trainer(
    out: Path, *callbacks: TrainerCallback, net: torch.nn.Module | None = None, **arguments: Any
) -> Trainer:
    run = native_trainer(out, *callbacks, native=True, **arguments)
    if net is not None:
        run.model = run.model_wrapped = net
    UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False), async_save=True).attach(run)
    return run


class CommitBarrier:
    """Blocks every commit until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open, publish = threading.Event(), RenamePublisher.publish
        patch.setattr(
            RenamePublisher,
            "publish",
            lambda *args, **more: (self._open.wait(60), publish(*args, **more))[1],
        )

    def open(self) -> None:
        self._open.set()


def test_background_checkpoint_has_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = native_trainer(tmp_path / "native", native=True)
    straight.train()
    barrier, names = CommitBarrier(monkeypatch), []

    def list_checkpoints() -> None:
        names.extend(
            name for name in os.listdir(tmp_path / "run") if name.startswith("checkpoint-")
        )
        barrier.open()

    run = trainer(tmp_path / "run", At(3, list_checkpoints))
    run.train()
    assert names == [], "step 3 is done, and checkpoint-2 still being written"
    check_same(run, straight)
    assert entries(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for step in (2, 4, 6):
        assert uc.verify(tmp_path / "run" / f"checkpoint-{step}", deep=True).ok
        assert state_of(tmp_path / "run" / f"checkpoint-{step}") == state_of(
            tmp_path / "native" / f"checkpoint-{step}"
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
    """Callbacks add files while the checkpoint is being written.

    A half-written folder of the native Trainer under the same name is renamed, not deleted.
    """
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"half")
    trainer(tmp_path, Writes()).train()
    assert entries(tmp_path) == [
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
    trainer(tmp_path, StopAt(2)).train()

    def full(*_: Any, **__: Any) -> None:
        raise uc.StorageError("no space left")

    run = trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(RenamePublisher, "publish", full)
        with pytest.raises(uc.CheckpointError, match="no space left"):
            run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 6, "the save of step 4 fails at that of step 6"
    assert entries(tmp_path) == ["checkpoint-2"], "the last good one stays, and nothing else"


def test_older_checkpoint_stays_until_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, StopAt(2), save_total_limit=1).train()
    barrier, names = CommitBarrier(monkeypatch), []

    def list_checkpoints() -> None:
        names.extend(name for name in os.listdir(tmp_path) if name.startswith("checkpoint-"))
        barrier.open()

    trainer(tmp_path, At(5, list_checkpoints), save_total_limit=1).train(
        resume_from_checkpoint=True
    )
    assert names == ["checkpoint-2"]
    assert entries(tmp_path) == ["checkpoint-6"]


def test_best_checkpoint_is_awaited_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {**BEST, "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    straight = native_trainer(tmp_path / "native", native=True, **arguments)
    straight.train()
    run = trainer(tmp_path / "run", **arguments)
    run.train()
    check_same(run, straight)
    assert entries(tmp_path / "run") == entries(tmp_path / "native")


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_adapters(tmp_path: Path) -> None:
    trainer(tmp_path, net=lora()).train()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        *os.listdir(tmp_path / "checkpoint-6")
    }
    assert uc.verify(tmp_path / "checkpoint-6", deep=True).ok


def test_push_to_hub_is_refused(tmp_path: Path) -> None:
    run = native_trainer(tmp_path, native=True)
    run.model = model()
    run.args.push_to_hub = True
    with pytest.raises(uc.LayoutError, match="use async_save=False"):
        UnifiedCheckpointCallback(async_save=True).attach(run)

"""The mixin, alone and together with a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import unified_ckpt as uc
from tests.support.integrations.trainers import StopAt, check_same, trainer
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback, UnifiedCheckpointMixin

pytestmark = pytest.mark.integration


class MixedTrainer(UnifiedCheckpointMixin, Trainer):
    """Overrides the save of the mixin and calls it."""

    saved: int = 0

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.saved += 1
        super()._save_checkpoint(model, trial)


def mixed_trainer(out: Path, *callbacks: TrainerCallback) -> MixedTrainer:
    native = trainer(out, native=True)
    return MixedTrainer(
        model=native.model,
        args=native.args,
        train_dataset=native.train_dataset,
        callbacks=list(callbacks),
        save_options=uc.SaveOptions(fsync=False),
        log_saves=True,
    )


def test_mixin_resumes_like_the_native_trainer(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "native", native=True)
    straight.train()
    stopped = mixed_trainer(tmp_path / "run", StopAt(4))
    stopped.train()
    assert stopped.saved == 2
    assert uc.verify(tmp_path / "run" / "checkpoint-4").ok
    resumed = mixed_trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
    saves = [entry.get("checkpoint/step") for entry in resumed.state.log_history]
    assert [step for step in saves if step] == [2, 6]


def test_mixin_with_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(uc.CheckpointError, match="the Trainer already has one"):
        mixed_trainer(tmp_path, UnifiedCheckpointCallback())
    with pytest.raises(uc.CheckpointError, match="the Trainer already has one"):
        trainer(tmp_path, UnifiedCheckpointCallback())


def test_mixin_after_trainer_raises() -> None:
    with pytest.raises(
        TypeError, match="Late: got UnifiedCheckpointMixin after Trainer; write class Late"
    ):

        class Late(Trainer, UnifiedCheckpointMixin):
            pass

    with pytest.raises(TypeError, match="inherit from Trainer too"):
        UnifiedCheckpointMixin()

"""The mixin, alone and together with a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import unified_ckpt as uc
from tests.support.trainers import STEPS, Sequences, StopAt, check_same, model, trainer
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback, UnifiedCheckpointMixin


class Own(UnifiedCheckpointMixin, Trainer):
    """Overrides the save of the mixin and calls it."""

    saved: int = 0

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.saved += 1
        super()._save_checkpoint(model, trial)


def own(out: Path, *callbacks: TrainerCallback) -> Own:
    told = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        save_steps=2,
        logging_steps=1,
        seed=1,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    fast = uc.SaveOptions(fsync=False)
    return Own(
        model=model(),
        args=told,
        train_dataset=Sequences(),
        callbacks=list(callbacks),
        save_options=fast,
    )


def test_mixin_resumes_like_the_stock_trainer(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "stock", stock=True)
    straight.train()
    stopped = own(tmp_path / "run", StopAt(4))
    stopped.train()
    assert stopped.saved == 2
    assert uc.verify(tmp_path / "run" / "checkpoint-4").ok
    resumed = own(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)


def test_mixin_with_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(uc.CheckpointError, match="the Trainer already has one"):
        own(tmp_path, UnifiedCheckpointCallback())
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

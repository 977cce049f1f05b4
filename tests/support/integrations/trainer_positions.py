"""Data and trainers for tests of data positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import unified_ckpt as uc
from tests.support.integrations.trainers import model
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

LENGTH = 48


class Numbered(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples that begin with their number."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i >= LENGTH:
            raise IndexError(i)
        ids = torch.full((4 + i % 3,), i)  # of unequal length, for the samplers that group by it
        ids = torch.nn.functional.pad(ids, (0, 2 - i % 3))
        return {"input_ids": ids, "labels": ids}


class RecordingTrainer(Trainer):
    """Records the samples that it trained on."""

    samples: list[int]

    def training_step(
        self, model: Any, inputs: dict[str, torch.Tensor], *more: Any
    ) -> torch.Tensor:
        if not hasattr(self, "samples"):
            self.samples = []
        self.samples += inputs["input_ids"][:, 0].tolist()
        return super().training_step(model, inputs, *more)


def recording_trainer(
    out: Path,
    *callbacks: TrainerCallback,
    batch: int,
    native: bool = False,
    data: Any = None,
    net: Any = None,
    **more: Any,
) -> RecordingTrainer:
    in_background = more.pop("async_save", False)
    arguments = TrainingArguments(
        output_dir=str(out),
        **{"num_train_epochs": 3, "save_steps": 15, "seed": 5, "logging_steps": 100, **more},
        per_device_train_batch_size=batch,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    ours = (
        []
        if native
        else [
            UnifiedCheckpointCallback(
                save_options=uc.SaveOptions(fsync=False), async_save=in_background
            )
        ]
    )
    return RecordingTrainer(
        model=net or model(),
        args=arguments,
        train_dataset=data or Numbered(),
        callbacks=[*ours, *callbacks],
    )


def train(trainer: RecordingTrainer, resume: bool = False) -> list[int]:
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer.samples

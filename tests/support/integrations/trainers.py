"""Models and Trainers for tests of the callback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import unified_ckpt as uc
from tests.support.equality import check_equal
from unified_ckpt.format.events import EVENTS_NAME
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

STEPS = 6


def sample(i: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(i))
    return {"input_ids": ids, "labels": ids}


SEQUENCES: Any = [sample(i) for i in range(48)]


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = (
            control.should_training_stop or state.global_step >= self._step
        )


class At(TrainerCallback):
    """Calls a function at a step, from a method of a callback."""

    def __init__(
        self, step: int, function: Callable[[], object], *, method: str = "on_step_end"
    ) -> None:
        self._step, self._function = step, function
        setattr(self, method, self._act)

    def _act(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._function()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def trainer(
    out: Path,
    *callbacks: TrainerCallback,
    native: bool = False,
    net: torch.nn.Module | None = None,
    **arguments: Any,
) -> Trainer:
    training_arguments = TrainingArguments(
        output_dir=str(out),
        **{
            "max_steps": STEPS,
            "save_steps": 2,
            "logging_steps": 1,
            "seed": 1,
            "per_device_train_batch_size": 4,
            **arguments,
        },
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    ours = [] if native else [UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False))]
    return Trainer(
        model=net or model(),
        args=training_arguments,
        train_dataset=SEQUENCES,
        eval_dataset=SEQUENCES,
        callbacks=[*ours, *callbacks],
    )


def entries(run: Path) -> list[str]:
    """Return the names in a run's folder, without the file of events."""
    return sorted({path.name for path in run.iterdir()} - {EVENTS_NAME})


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def check_same(actual: Trainer, expected: Trainer) -> None:
    assert losses(actual) == losses(expected)
    check_equal(actual.model.state_dict(), expected.model.state_dict())

"""The small files of a trainer's step: its state, and that of the learning rate's scheduler."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.foreign.paddle.detect import PICKLED_TRAINER_STATE
from unified_ckpt.foreign.paddle.export.pickles import write_pickle

PADDLE_FORMATS = ("paddle", "paddleformers", "paddle-flex")
_SCHEDULER = "scheduler.pdparams"
_SCHEDULER_KEYS = {"last_epoch", "last_lr", "_last_lr"}  # the last is torch's

# The fields of `TrainerState` of PaddleNLP 2.6 to 3.0.
PADDLENLP_KEYS = frozenset(
    {
        "best_metric",
        "best_model_checkpoint",
        "consumed_samples",
        "epoch",
        "global_step",
        "is_local_process_zero",
        "is_world_process_zero",
        "last_saved_step",
        "log_history",
        "max_steps",
        "num_train_epochs",
        "total_flos",
        "trial_name",
        "trial_params",
    }
)


@dataclass
class TrainerState:
    """The class that PaddleFormers pickles, with its fields and defaults."""

    epoch: float | None = None
    global_step: int = 0
    consumed_samples: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    total_flos: float = 0
    log_history: list[Any] = field(default_factory=list)
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    trial_name: str | None = None
    trial_params: Any = None


PADDLEFORMERS_KEYS = frozenset(each.name for each in fields(TrainerState))
_CLASSES: Mapping[type, str] = {TrainerState: "paddleformers.trainer.trainer_callback"}


def trainer_state(metadata: SourceMetadata, keys: Collection[str]) -> dict[str, Any]:
    """Return these fields of a Trainer's state, with the step at which Paddle's resumes."""
    state = {key: value for key, value in _saved(metadata, "trainer_state").items() if key in keys}
    return state if metadata.step is None else {**state, "global_step": metadata.step}


def scheduler_state(metadata: SourceMetadata) -> dict[str, Any] | None:
    """Return the state of Paddle's scheduler; None if the step or the learning rate is unknown.

    It comes from the scheduler of Paddle or torch, else from the step and the param groups.
    """
    scheduler = _saved(metadata, "scheduler")
    if _is_scheduler(scheduler):
        rates, epoch = scheduler.get("last_lr", scheduler.get("_last_lr")), scheduler["last_epoch"]
    else:
        rates, epoch = [group["options"].get("lr") for group in metadata.groups], metadata.step
    distinct = set(rates) if isinstance(rates, list) else {rates}
    rate = next(iter(distinct), None)
    if len(distinct) != 1 or not isinstance(rate, int | float) or not isinstance(epoch, int):
        return None
    return {"last_epoch": epoch, "last_lr": float(rate)}


def _is_scheduler(state: Mapping[str, Any]) -> bool:
    return "last_epoch" in state and not _SCHEDULER_KEYS.isdisjoint(state.keys() - {"last_epoch"})


def unread_state(metadata: SourceMetadata, target_format: str) -> list[str]:
    """Return what a Trainer of Paddle cannot hold of a Trainer's state, and of its scheduler."""
    keys = PADDLENLP_KEYS if target_format == "paddle" else PADDLEFORMERS_KEYS
    if target_format not in PADDLE_FORMATS:
        return []
    trainer, scheduler = (_saved(metadata, name) for name in ("trainer_state", "scheduler"))
    unread = [f"extra:trainer_state.{key}" for key in trainer if key not in keys]
    if target_format == "paddle":
        return unread
    if not _is_scheduler(scheduler) or scheduler_state(metadata) is None:
        has_scheduler = isinstance(metadata.extra, dict) and "scheduler" in metadata.extra
        return [*unread, "extra:scheduler"] if has_scheduler else unread
    return unread + [f"extra:scheduler.{key}" for key in scheduler if key not in _SCHEDULER_KEYS]


def write_pickled_files(folder: str, metadata: SourceMetadata) -> None:
    """Write the files of PaddleFormers, which it pickles. A model alone has no step."""
    values: dict[str, Any] = {}
    if metadata.step is not None:
        values[PICKLED_TRAINER_STATE] = TrainerState(**trainer_state(metadata, PADDLEFORMERS_KEYS))
    scheduler = scheduler_state(metadata)
    if scheduler is not None:
        values[_SCHEDULER] = scheduler
    for name, value in values.items():
        with open(os.path.join(folder, name), "xb") as file:
            write_pickle(file, value, classes=_CLASSES)


def _saved(metadata: SourceMetadata, key: str) -> dict[str, Any]:
    """Return a dict in `extra`; {} if there is none."""
    value = metadata.extra.get(key) if isinstance(metadata.extra, dict) else None
    return value if isinstance(value, dict) else {}

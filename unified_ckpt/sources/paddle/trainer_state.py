"""What lies beside the tensors of a PaddleNLP folder: the trainer's state, the learning rate, the loss scale. Of pickles, plain values."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.errors import FormatError
from unified_ckpt.sources.paddle.files import json_at
from unified_ckpt.sources.paddle.lazy_pickles import load_arrays, plain

_PICKLED = {"scheduler": "scheduler.pdparams", "scaler": "scaler.pdparams"}


@dataclass(frozen=True, slots=True)
class Beside:
    """`options`: of the optimizer's one param group."""

    step: int | None
    extra: Mapping[str, Any]
    options: Mapping[str, Any]


def beside(root: str, entries: Collection[str]) -> Beside:
    """FormatError for a file that is damaged, or asks for classes."""
    extra = {
        name: plain(load_arrays(os.path.join(root, file)))
        for name, file in _PICKLED.items()
        if file in entries
    }
    trainer = json_at(root, "trainer_state.json")
    if trainer is not None and not isinstance(trainer, dict):
        raise FormatError(f"{root}/trainer_state.json: is no JSON object")
    step = (trainer or {}).get("global_step")
    counted = step if isinstance(step, int) and not isinstance(step, bool) else None
    return with_scheduler(Beside(counted, {"trainer_state": trainer} if trainer else {}, {}), extra)


def with_scheduler(told: Beside, more: Mapping[str, Any]) -> Beside:
    """With what else is there: a scheduler tells the learning rate."""
    extra = {**more, **told.extra}
    scheduler = extra.get("scheduler")
    rate = scheduler.get("last_lr") if isinstance(scheduler, dict) else None
    return Beside(told.step, extra, {"lr": rate} if isinstance(rate, float) else {})

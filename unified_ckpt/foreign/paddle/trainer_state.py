"""Reads the trainer's state in a PaddleNLP folder: step, learning rate, loss scale.

Pickles are reduced to plain values.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.huggingface.detect import TRAINER_STATE
from unified_ckpt.foreign.paddle.lazy_pickles import load_arrays, to_plain
from unified_ckpt.runtime.storage.regular_files import is_file

_PICKLED_FILES = {"scheduler": "scheduler.pdparams", "scaler": "scaler.pdparams"}


def read_trainer_state(
    root: str, entries: Collection[str], pickled: Mapping[str, Any]
) -> tuple[int | None, dict[str, Any], dict[str, Any]]:
    """Return the step, `extra`, and the options of the optimizer's single param group.

    `pickled`: what the optimizer's files hold of it. The learning rate is that of the scheduler.
    Raises FormatError if a file is damaged or names classes.
    """
    extra = dict(pickled) | {
        name: to_plain(load_arrays(os.path.join(root, file)))
        for name, file in _PICKLED_FILES.items()
        if file in entries
    }
    path = os.path.join(root, TRAINER_STATE)
    trainer = read_json_object(path) if is_file(path) else {}
    step = trainer.get("global_step")
    step_count = step if isinstance(step, int) and not isinstance(step, bool) else None
    extra |= {"trainer_state": trainer} if trainer else {}
    scheduler = extra.get("scheduler")
    learning_rate = scheduler.get("last_lr") if isinstance(scheduler, dict) else None
    return step_count, extra, {"lr": learning_rate} if isinstance(learning_rate, float) else {}

"""Reads the trainer's state in a Paddle folder: step, learning rate, loss scale.

Pickles are reduced to plain values. Random states, which hold an object of Paddle's C++ code, and
the pickled training arguments are not read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.files.parsing import expect_dict
from unified_ckpt.foreign.huggingface.detect import TRAINER_STATE
from unified_ckpt.foreign.paddle.detect import PICKLED_TRAINER_STATE
from unified_ckpt.foreign.paddle.lazy_pickles import load_arrays, to_plain
from unified_ckpt.foreign.restricted_pickle.placeholders import Placeholder

_TRAINER_STATE_CLASS = "paddleformers.trainer.trainer_callback.TrainerState"
_PICKLED_FILES = {"scheduler": "scheduler.pdparams", "scaler": "scaler.pdparams"}


def read_trainer_state(
    root: str, entries: Collection[str], pickled: Mapping[str, Any]
) -> tuple[int | None, dict[str, Any], dict[str, Any]]:
    """Return the step, `extra`, and the options of the optimizer's single param group.

    `pickled`: what the optimizer's files hold of it. The learning rate is that of the scheduler.
    Raises FormatError if a file is damaged or names classes.
    """
    extra = dict(pickled) | {
        name: _plain(os.path.join(root, file), load_arrays(os.path.join(root, file)))
        for name, file in _PICKLED_FILES.items()
        if file in entries
    }
    trainer = _trainer_fields(root, entries)
    extra |= {"trainer_state": trainer} if trainer else {}
    scheduler = extra.get("scheduler")
    learning_rate = scheduler.get("last_lr") if isinstance(scheduler, dict) else None
    options = {"lr": learning_rate} if isinstance(learning_rate, float) else {}
    return _step(trainer), extra, options


def _trainer_fields(root: str, entries: Collection[str]) -> dict[str, Any]:
    """Return the fields of the trainer's state; {} if no file has it.

    A folder that an older and a newer version saved to has both files. Only those of one step are
    of one save.
    """
    by_file: dict[str, dict[str, Any]] = {}
    if TRAINER_STATE in entries:
        by_file[TRAINER_STATE] = dict(read_json_object(os.path.join(root, TRAINER_STATE)))
    if PICKLED_TRAINER_STATE in entries:
        path = os.path.join(root, PICKLED_TRAINER_STATE)
        state = load_arrays(path, classes=[_TRAINER_STATE_CLASS])
        fields = state.state if isinstance(state, Placeholder) else state
        by_file[PICKLED_TRAINER_STATE] = dict(
            expect_dict(_plain(path, fields), path, "fields of TrainerState")
        )
    steps = {file: _step(fields) for file, fields in by_file.items()}
    if len(set(steps.values())) > 1:
        raise FormatError(
            f"{root}: {TRAINER_STATE} has step {steps[TRAINER_STATE]}, but "
            f"{PICKLED_TRAINER_STATE} {steps[PICKLED_TRAINER_STATE]}; remove that of the older save"
        )
    return by_file.get(PICKLED_TRAINER_STATE, by_file.get(TRAINER_STATE, {}))


def _step(trainer: Mapping[str, Any]) -> int | None:
    step = trainer.get("global_step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _plain(path: str, value: Any) -> Any:
    with error_prefix(path):
        return to_plain(value)

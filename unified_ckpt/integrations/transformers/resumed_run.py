"""What a Trainer's run resumes from, if the engine reads it: a checkpoint of any format, and the
`trainer_state.json` that the Trainer's own code reads.

A folder of another engine has none, or one with other fields. The Trainer then reads one that is
written to a temporary folder: the user's folder stays as it is.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import TrainerState

from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.errors import FormatError, MismatchError, NotFoundError
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.formats import format_title
from unified_ckpt.foreign.huggingface.detect import TRAINER_STATE
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.integrations.random_states import random_states_outcome
from unified_ckpt.integrations.run_state import (
    RunState,
    read_run_state,
    resume_scaler,
    resume_schedule,
    with_extra,
)
from unified_ckpt.integrations.transformers.compatibility import is_stock
from unified_ckpt.integrations.transformers.resume import check_path
from unified_ckpt.integrations.transformers.scheduler import regroup_state
from unified_ckpt.integrations.transformers.small_files import stateful_callbacks
from unified_ckpt.manager.run import Run
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder
from unified_ckpt.runtime.storage.roots import open_root
from unified_ckpt.runtime.torch_state.optimizer_wrappers import unwrap_optimizer

_LOG = logging.getLogger("unified_ckpt")
_TEMPORARY = "unified-trainer-state-"  # prefix of folders
_FIELDS = frozenset(field.name for field in fields(TrainerState))
_COPIED = {"log_history": list, "total_flos": int | float}  # of another engine's file of this name


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A checkpoint that the engine loads into a Trainer.

    `state_folder`: has the `trainer_state.json` of the Trainer's form; the checkpoint itself, or a
    temporary folder of this process. `counts_like_trainer`: whether a Trainer saved it, which steps
    a schedule once per optimizer step.
    """

    state: RunState
    state_folder: str
    counts_like_trainer: bool

    @property
    def path(self) -> str:
        """The checkpoint."""
        return self.state.path

    @property
    def has_optimizer(self) -> bool:
        """Whether it has optimizer state: none has with `save_only_model`."""
        return OPTIMIZER in self.state.parts

    def remove(self) -> None:
        """Remove the temporary folder."""
        if self.state_folder != self.path:
            shutil.rmtree(self.state_folder, ignore_errors=True)


def read_resumed_run(path: str, trainer: Any, run: Run) -> ResumedRun | None:
    """Return what the run resumes from; None if the stock Trainer loads it. Collective.

    Raises NotFoundError or FormatError if `path` is no checkpoint that can be read, and
    MismatchError if it has no step, on every rank.
    """
    timeout = run.load_options.timeout_seconds
    collective = run.session.comm.begin_collective("trainer resume", timeout_seconds=timeout)
    with collective.step("run-state"):
        check_path(path, run.load_options.source)
        state = None if is_stock(path, trainer) else read_run_state(path, run.load_options.source)
        local = None if state is None else [state.format, state.step]
        values = collective.all_gather_json("state", local)
        if values != [local] * len(values):
            raise FormatError(
                f"resume_from_checkpoint {path}: got format and step {values[0]} on rank 0 and "
                f"{local} on this rank, expected one checkpoint; pass a path that all ranks share"
            )
        if state is None:
            return None
        folder = _copy_trainer_state(path) if is_bucket_url(path) else path
        file = os.path.join(folder, TRAINER_STATE)
        if folder and is_file(file) and read_json_object(file).keys() <= _FIELDS:  # not PaddleNLP's
            return ResumedRun(state, folder, counts_like_trainer=True)
        if state.step is None:
            raise MismatchError(
                f"resume_from_checkpoint {path}: got no step, expected one; save it with "
                "step=..., or rename it to checkpoint-<step>"
            )
        folder = _write_trainer_state(state, trainer)
        return ResumedRun(state, folder, counts_like_trainer=False)


def _copy_trainer_state(url: str) -> str:
    """Copy the `trainer_state.json` of a bucket to a local folder, and return this, "" for none."""
    try:
        body = open_root(url).read(TRAINER_STATE)
    except NotFoundError:
        return ""
    folder = tempfile.mkdtemp(prefix=_TEMPORARY)
    Path(folder, TRAINER_STATE).write_bytes(body)
    return folder


def _write_trainer_state(state: RunState, trainer: Any) -> str:
    """Write the `trainer_state.json` of a run at this step, and return its folder."""
    saved = state.extra.get("trainer_state")
    copied = {
        name: saved[name]
        for name, kind in _COPIED.items()
        if isinstance(saved, dict) and isinstance(saved.get(name), kind)
    }
    written = TrainerState(
        global_step=state.step or 0,
        epoch=state.epoch or 0.0,
        train_batch_size=trainer._train_batch_size,
        stateful_callbacks=stateful_callbacks(trainer),
        **copied,
    )
    for name in ("logging_steps", "eval_steps", "save_steps"):
        count = getattr(trainer.args, name)
        if count is not None and count >= 1:  # a fraction is resolved later, by the run's steps
            setattr(written, name, int(count))
    folder = tempfile.mkdtemp(prefix=_TEMPORARY)
    written.save_to_json(os.path.join(folder, TRAINER_STATE))
    return folder


def resume_values(
    trainer: Any, resumed: ResumedRun, report: LoadReport, names: Mapping[int, str]
) -> dict[str, str]:
    """Resume the learning rate schedule and the scaler after a load. Return what becomes of the
    values beside tensors, for the log; the Trainer asks for random states later.

    `names`: id of a parameter -> its name.
    """
    state, outcomes = with_extra(resumed.state, report.extra), dict[str, str]()
    if trainer.lr_scheduler is not None:
        if state.scheduler is not None and state.groups:  # otherwise the groups match one by one
            optimizer = unwrap_optimizer(trainer.optimizer)
            schedule = regroup_state(state.scheduler, optimizer, names, state.groups)
            state = replace(state, scheduler=schedule)
        is_trusted = state.scheduler is not None and resumed.counts_like_trainer
        steps = None if is_trusted else state.step
        outcomes["schedule"] = resume_schedule(trainer.lr_scheduler, state, steps=steps)
    outcomes["scaler"] = resume_scaler(getattr(trainer.accelerator, "scaler", None), state)
    outcomes["random states"] = random_states_outcome(state, report)
    return outcomes


def log_stock_resume(path: str, trainer: Any) -> None:
    """Log on rank 0 that the stock Trainer has loaded its own checkpoint."""
    if not any(name.startswith(OPTIMIZER) for name in list_folder(path)):
        log_only_weights(path, trainer)
    elif trainer.is_world_process_zero():
        title, step = format_title("trainer"), trainer.state.global_step
        _LOG.info("resumed from %s (%s): step %d; by the stock Trainer", path, title, step)


def log_only_weights(path: str, trainer: Any) -> None:
    """Log on rank 0 what begins anew after a checkpoint without optimizer."""
    if trainer.is_world_process_zero():
        _LOG.warning(
            "%s: got only weights (save_only_model, or deleted since); the run continues "
            "with a new optimizer, learning rate schedule and random states",
            path,
        )

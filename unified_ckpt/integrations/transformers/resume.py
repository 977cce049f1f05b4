"""Which checkpoint of a Trainer's run to go on from, and what is wrong with a path that is none."""

from __future__ import annotations

import logging
import os
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from unified_ckpt.api import Checkpointer
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder import commit
from unified_ckpt.errors import IncompleteError, NotFoundError
from unified_ckpt.format.names import is_backup
from unified_ckpt.manager.steps.scan import foreign_steps, scan
from unified_ckpt.manager.steps.scan import has_unified_files as has_traces
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.sources.detect.names import TRAINER_STATE
from unified_ckpt.sources.step_names import list_steps, read_step

_LOG = logging.getLogger("unified_ckpt")
PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"


def sorted_steps(*paths: Any, **options: Any) -> list[str]:
    """transformers' `sort_checkpoints`, without what was in the way of a save: its names look like
    those of steps.
    """
    return [
        path
        for path in sort_checkpoints(*paths, **options)
        if not is_backup(os.path.split(path)[1])
    ]


def latest_checkpoint(
    checkpointer: Checkpointer, run: str, *, timeout_seconds: float
) -> str | bool:
    """The newest whole checkpoint of the run, ours or the Trainer's own, the same on every rank;
    True where there is none.

    IncompleteError where there are some and none is whole: the stock Trainer would take what is
    left of one, without its optimizer.
    """
    comm = checkpointer._get_comm()
    collective = comm.begin_collective(
        f"resume in {run}", cached=False, timeout_seconds=timeout_seconds
    )
    with collective.step("newest"):
        if collective.rank == 0:
            name, skipped = _select_latest(os.path.abspath(run))
            if skipped and not name:
                text = format_list(
                    f"{run}: has checkpoints, and none can be resumed from",
                    [f"{entry}: {problem}" for entry, problem in skipped.items()],
                )
                raise IncompleteError(
                    f"{text}\nRepair one, or start fresh with resume_from_checkpoint=False"
                )
            for entry, problem in skipped.items():
                _LOG.warning("%s/%s is passed over: %s", run, entry, problem)
            collective.put("newest", f".{name}".encode())
    name = collective.get("newest").decode()[1:]
    return os.path.join(run, name) if name else True


def _select_latest(run: str) -> tuple[str, dict[str, str]]:
    """The newest whole checkpoint, empty for none; and by name, why those that are newer, or all,
    are not.
    """
    scanned = scan(LocalStorage(run), PREFIX)
    native = {entry.path: entry for entry in foreign_steps(scanned, list_steps(run, prefix=PREFIX))}
    skipped: dict[str, str] = {}
    for record in sorted(scanned.steps, key=lambda record: _step_number(record.name), reverse=True):
        if record.path in native:
            problem = read_step(native[record.path]).problem
        elif record.status == "complete" or record.is_unified or record.unreadable:
            problem = record.problem
        else:
            continue  # nothing is in it
        if not problem and not os.path.isfile(os.path.join(record.path, TRAINER_STATE)):
            problem = f"it has no {TRAINER_STATE}"
        if not problem:
            return record.name, skipped
        skipped[record.name] = problem
    return "", skipped


def check_path(path: str) -> None:
    """NotFoundError that says what is there, where it is no checkpoint."""
    if not os.path.isdir(path):
        raise NotFoundError(
            f"resume_from_checkpoint {path}: is {'a file' if os.path.exists(path) else 'not there'}; needed a checkpoint folder"
        )
    if is_unified(path):
        return
    entries = dict.fromkeys(os.listdir(path), 0)
    if has_traces(entries):
        raise NotFoundError(
            f"resume_from_checkpoint {path}: has no valid manifest: it is unfinished, or damaged; pass a whole one"
        )
    if TRAINER_STATE in entries:
        return
    nested = [record.name for record in scan(LocalStorage(os.path.abspath(path)), PREFIX).complete]
    if nested:
        raise NotFoundError(
            f"resume_from_checkpoint {path}: is a run's folder; needed one of its checkpoints, the newest is {nested[-1]}"
        )
    problem = "has neither a manifest nor a trainer_state.json: it is unfinished, or no checkpoint"
    raise NotFoundError(f"resume_from_checkpoint {path}: {problem}")


def _step_number(name: str) -> int:
    return int(name.removeprefix(PREFIX))


def is_unified(path: str) -> bool:
    return commit.read_manifest_at(path) is not None

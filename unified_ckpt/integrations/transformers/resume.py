"""Which checkpoint of a Trainer's run to go on from, and what is wrong with a path that is none."""

from __future__ import annotations

import logging
import os
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from unified_ckpt.api import Checkpointer
from unified_ckpt.core.text import listed
from unified_ckpt.engine.folder import commit
from unified_ckpt.errors import IncompleteError, NotFoundError
from unified_ckpt.format.names import is_before
from unified_ckpt.manager.steps.scan import foreign_steps, scan
from unified_ckpt.manager.steps.scan import is_ours as has_traces
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.sources.detect.names import TRAINER_STATE
from unified_ckpt.sources.step_names import list_steps, read_step

_LOG = logging.getLogger("unified_ckpt")
PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"


def sorted_steps(*places: Any, **options: Any) -> list[str]:
    """transformers' `sort_checkpoints`, without what was in the way of a save: its names look like those of steps."""
    return [
        path
        for path in sort_checkpoints(*places, **options)
        if not is_before(os.path.split(path)[1])
    ]


def newest(checkpointer: Checkpointer, run: str, *, timeout_seconds: float) -> str | bool:
    """The newest whole checkpoint of the run, ours or the Trainer's own, the same on every rank; True where there is none.

    IncompleteError where there are some and none is whole: the stock Trainer would take what is left of one, without its optimizer.
    """
    comm = checkpointer._ranks()
    meeting = comm.meet(f"resume in {run}", same=False, timeout_seconds=timeout_seconds)
    with meeting.phase("newest"):
        if meeting.rank == 0:
            name, passed = _choose(os.path.abspath(run))
            if passed and not name:
                text = listed(
                    f"{run}: has checkpoints, and none can be resumed from",
                    [f"{one}: {why}" for one, why in passed.items()],
                )
                raise IncompleteError(
                    f"{text}\nRepair one, or start fresh with resume_from_checkpoint=False"
                )
            for one, why in passed.items():
                _LOG.warning("%s/%s is passed over: %s", run, one, why)
            meeting.put("newest", f".{name}".encode())
    name = meeting.get("newest").decode()[1:]
    return os.path.join(run, name) if name else True


def _choose(run: str) -> tuple[str, dict[str, str]]:
    """The newest whole checkpoint, empty for none; and by name, why those that are newer, or all, are not."""
    found = scan(LocalStorage(run), PREFIX)
    stock = {entry.path: entry for entry in foreign_steps(found, list_steps(run, prefix=PREFIX))}
    passed: dict[str, str] = {}
    for one in sorted(found.steps, key=lambda one: _number(one.name), reverse=True):
        if one.path in stock:
            why = read_step(stock[one.path]).problem
        elif one.status == "complete" or one.ours or one.unread:
            why = one.why
        else:
            continue  # nothing is in it
        if not why and not os.path.isfile(os.path.join(one.path, TRAINER_STATE)):
            why = f"it has no {TRAINER_STATE}"
        if not why:
            return one.name, passed
        passed[one.name] = why
    return "", passed


def check_path(path: str) -> None:
    """NotFoundError that says what is there, where it is no checkpoint."""
    if not os.path.isdir(path):
        raise NotFoundError(
            f"resume_from_checkpoint {path}: is {'a file' if os.path.exists(path) else 'not there'}; needed a checkpoint folder"
        )
    if is_ours(path):
        return
    entries = dict.fromkeys(os.listdir(path), 0)
    if has_traces(entries):
        raise NotFoundError(
            f"resume_from_checkpoint {path}: has no valid manifest: it is unfinished, or damaged; pass a whole one"
        )
    if TRAINER_STATE in entries:
        return
    inside = [one.name for one in scan(LocalStorage(os.path.abspath(path)), PREFIX).complete]
    if inside:
        raise NotFoundError(
            f"resume_from_checkpoint {path}: is a run's folder; needed one of its checkpoints, the newest is {inside[-1]}"
        )
    why = "has neither a manifest nor a trainer_state.json: it is unfinished, or no checkpoint"
    raise NotFoundError(f"resume_from_checkpoint {path}: {why}")


def _number(name: str) -> int:
    return int(name.removeprefix(PREFIX))


def is_ours(path: str) -> bool:
    return commit.committed_at(path) is not None

"""Which checkpoint of a Trainer's run to go on from, and what is wrong with a path that is none."""

from __future__ import annotations

import logging
import os

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from unified_ckpt.api import Checkpointer
from unified_ckpt.engine import commit
from unified_ckpt.errors import NotFoundError
from unified_ckpt.manager.steps import scan
from unified_ckpt.runtime.storage import LocalStorage
from unified_ckpt.sources import problem_of
from unified_ckpt.sources.marks import find_format

_LOG = logging.getLogger("unified_ckpt")
_ANNOUNCED = "checkpoint-is-incomplete.txt"
PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"


def newest(checkpointer: Checkpointer, run: str, *, timeout_seconds: float) -> str | bool:
    """The newest whole checkpoint of the run, ours or the Trainer's own, the same on every rank; True, where there is none."""
    comm = checkpointer._ranks()
    meeting = comm.meet(f"resume in {run}", same=False, timeout_seconds=timeout_seconds)
    with meeting.phase("newest"):
        if meeting.rank == 0:
            found = scan(LocalStorage(os.path.abspath(run)), PREFIX)
            good = [one.name for one in found.complete if os.path.isfile(os.path.join(run, one.name, "trainer_state.json"))]
            stock = [one.name for one in found.steps if one.status == "incomplete" and not one.ours and _is_stock(one.path)]
            name = max([*good, *stock], key=_number, default="")
            for one in found.steps:
                if one.status != "complete" and one.name not in stock and (not name or _number(one.name) > _number(name)):
                    _LOG.warning("%s/%s is passed over: %s", run, one.name, one.why)
            meeting.put("newest", f".{name}".encode())
    name = meeting.get("newest").decode()[1:]
    return os.path.join(run, name) if name else True


def check_path(path: str) -> None:
    """NotFoundError that says what is there, where it is no checkpoint."""
    if not os.path.isdir(path):
        raise NotFoundError(
            f"resume_from_checkpoint {path}: is {'a file' if os.path.exists(path) else 'not there'}; needed a checkpoint folder"
        )
    if is_ours(path) or os.path.isfile(os.path.join(path, "trainer_state.json")):
        return
    inside = [one.name for one in scan(LocalStorage(os.path.abspath(path)), PREFIX).complete]
    if inside:
        raise NotFoundError(f"resume_from_checkpoint {path}: is a run's folder; needed one of its checkpoints, the newest is {inside[-1]}")
    why = "has neither a manifest nor a trainer_state.json: it is unfinished, or no checkpoint"
    raise NotFoundError(f"resume_from_checkpoint {path}: {why}")


def drop_announcement(path: str) -> None:
    """Removes a checkpoint folder in which there is no more than the file by which `enable_jit_checkpoint` announces it."""
    if os.path.isdir(path) and os.listdir(path) == [_ANNOUNCED]:
        os.remove(os.path.join(path, _ANNOUNCED))
        os.rmdir(path)


def _is_stock(path: str) -> bool:
    """Whether it is a whole checkpoint of the Trainer's own."""
    return os.path.isfile(os.path.join(path, "trainer_state.json")) and find_format(path, told=None) is not None and not problem_of(path)


def _number(name: str) -> int:
    return int(name.removeprefix(PREFIX))


def is_ours(path: str) -> bool:
    return commit.committed_at(path) is not None

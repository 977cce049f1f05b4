"""Where a run starts from: its own newest valid step, else weights or a whole state from elsewhere, else nothing. One rank chooses."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from unified_ckpt.engine.checkpoint import open_path
from unified_ckpt.engine.inventory import take_inventory
from unified_ckpt.engine.prove import verify_folder
from unified_ckpt.engine.whole import choose as gathered
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.manager.steps import Leftover, Scan, StepRecord, claimed, step_name
from unified_ckpt.options import ManagerOptions
from unified_ckpt.sources import problem_of
from unified_ckpt.sources.marks import Format, find_format

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class Origin:
    """`kind`: the run's own step, one that another engine has left under the root, weights only, a whole state, or nothing. `bad`: own
    steps that are there and cannot be used. `local`: `path` is a name in the local directory of each machine."""

    kind: Literal["own", "foreign", "parameters", "full", "none"]
    path: str = ""
    step: int | None = None
    bad: tuple[int, ...] = ()
    local: bool = False


def encode(origin: Origin) -> bytes:
    return json.dumps(asdict(origin)).encode()


def decode(told: bytes) -> Origin:
    found = json.loads(told)
    return Origin(**{**found, "bad": tuple(found["bad"])})


def choose(
    found: Scan,
    options: ManagerOptions,
    *,
    root: str,
    step: int | None,
    parts: Collection[str],
    failed: Mapping[str, str],
    look: Callable[[StepRecord], str],
) -> Origin:
    """The newest valid step of what was found that has all `parts`; else the newest in another format; else what the options name.
    `step`: this one or NotFoundError.

    `failed`: folders that this load has tried in vain, and why. `look`: what is wrong with one, in a sentence, empty for a good one. Each
    folder that is passed over is told in one warning; none is changed.
    """
    if step is not None:
        return _given(found, step, root=root, prefix=options.step_prefix, failed=failed, look=look)
    others = _foreign(found)
    _tell_newer(found, others)
    bad = {one.step for one in found.steps if one.status == "incomplete" and one.step is not None}
    for one in reversed(found.complete):
        missing = sorted(set(parts) - set(one.parts))
        why = failed.get(one.path) or ("" if missing else look(one))
        if why:
            _warn(one.path, why)
            bad.add(one.saved.step)
        elif missing:
            _LOG.info("%s is passed over: it has no %s", one.path, ", ".join(missing))
        else:
            for path, (number, kind) in others.items():
                if one.step is not None and number > one.step:
                    _warn(path, f"is of another format ({kind}); step {one.step} of this run is taken; restore({number}) takes it")
            return Origin("own", one.path, one.step, tuple(sorted(bad)))
    numbers = tuple(sorted(bad))
    other = _readable(others, failed)
    if other is not None:
        return Origin("foreign", other, others[other][0], numbers)
    if options.load_parameters_path:
        return Origin("parameters", options.load_parameters_path, bad=numbers)
    if options.load_full_state_path:
        return Origin("full", options.load_full_state_path, bad=numbers)
    return Origin("none", bad=numbers)


def _tell_newer(found: Scan, others: Mapping[str, tuple[int, str]]) -> None:
    """What claims to be after the last good step, and is no step."""
    for left in found.newer_and_aside:
        _warn(left.path, _aside(left))
    for one in found.newer_and_bad:
        if one.path not in others:
            _warn(one.path, one.why)


def _foreign(found: Scan) -> dict[str, tuple[int, str]]:
    """Folders with names of steps that another engine has written: by path, the number in the name and the format's name."""
    known = [(one, _format_of(one.path)) for one in found.steps if one.status == "incomplete" and not (one.ours or one.unread)]
    return {one.path: (claimed(one.name), kind.name) for one, kind in known if kind is not None}


def _aside(left: Leftover) -> str:
    return f"an interrupted replacement left the only copy of a checkpoint there; needed its name, {left.checkpoint}: rename it back"


def _format_of(path: str) -> Format | None:
    """None also for a folder that does not let itself be looked at: the scan says why."""
    try:
        return find_format(path, told=None)
    except OSError:
        return None


def _readable(others: Mapping[str, tuple[int, str]], failed: Mapping[str, str]) -> str | None:
    """The newest folder of another format that can be opened. Each that is passed over is told."""
    for path, (_, kind) in sorted(others.items(), key=lambda item: item[1], reverse=True):
        why = failed.get(path) or problem_of(path)
        if not why:
            _LOG.warning("%s is of another format (%s): it is read as it is, what is saved next is ours", path, kind)
            return path
        _warn(path, why)
    return None


def _given(found: Scan, step: int, *, root: str, prefix: str, failed: Mapping[str, str], look: Callable[[StepRecord], str]) -> Origin:
    """The folder of a step that was asked for by its number: the next one where one of two is damaged, or the load has failed with it."""
    those = [one for one in reversed(found.complete) if one.step == step]
    for number, one in enumerate(those, 1):
        why = failed.get(one.path) or (look(one) if number < len(those) else "")  # of the last one the load says what is wrong
        if not why:
            return Origin("own", one.path, step)
        _warn(one.path, why)
    if those:
        return Origin("none")
    for path, (number, _) in _foreign(found).items():
        if number == step and path not in failed:
            return Origin("foreign", path, number)
    name = step_name(step, prefix)
    seen = [(left.checkpoint, f"is not there: {left.path}: {_aside(left)}") for left in found.leftovers if left.needed]
    seen += [(one.name, f"is {one.status}: {one.why}") for one in found.steps]
    why = next((text for there, text in seen if there == name), "is not there")
    there = ", ".join(dict.fromkeys(str(one.step) for one in found.complete)) or "none"
    raise NotFoundError(f"{os.path.join(root, name)}: {why}; complete steps are: {there}")


def damage(path: str) -> str:
    """What a look at every header finds wrong, in a sentence; empty for a good checkpoint."""
    try:
        folder = open_path(path, hold=False)
        try:
            if folder.manifest is not None and folder.manifest.island is not None:
                gathered(
                    [take_inventory(folder, machine=0, copy=False)], where=path
                )  # of several machines' folders this one may have enough
            problems = verify_folder(folder, deep=False).problems
        finally:
            folder.close()
    except CheckpointError as error:
        return str(error)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}" if problems else ""


def _warn(path: str, why: str) -> None:
    _LOG.warning("%s is skipped: %s", path, " ".join(why.split()))

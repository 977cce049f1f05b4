"""Where a run starts from: its own newest valid step, else weights or a whole state from elsewhere, else nothing. One rank chooses."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from unified_ckpt.engine.checkpoint import open_path
from unified_ckpt.engine.inventory import take_inventory
from unified_ckpt.engine.prove import verify_folder
from unified_ckpt.engine.whole import choose as gathered
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.manager.steps import Leftover, Scan, StepRecord, claimed, step_name
from unified_ckpt.options import LoadOptions, ManagerOptions
from unified_ckpt.sources import problem_of
from unified_ckpt.sources.marks import Format, find_format

_LOG = logging.getLogger("unified_ckpt")
_WEIGHTS = frozenset({"model", "master_weights"})  # either stands in for the other


@dataclass(frozen=True, slots=True)
class Bad:
    """An own step that is there and cannot be used. `local`: in the local tier; the save of that id in the root may be good."""

    step: int
    save_id: str
    local: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """`kind`: the run's own step, one that another engine has left under the root, weights only, a whole state, or nothing. `bad`: what
    the look has found. `local`: `path` is a name in the local directory of each machine. `save_id`: of an own step; `lasting`: that save is
    in the root."""

    kind: Literal["own", "foreign", "parameters", "full", "none"]
    path: str = ""
    step: int | None = None
    bad: tuple[Bad, ...] = ()
    local: bool = False
    save_id: str = ""
    lasting: bool = False


def encode(origin: Origin) -> bytes:
    return json.dumps(asdict(origin)).encode()


def decode(told: bytes) -> Origin:
    found = json.loads(told)
    return Origin(**{**found, "bad": tuple(Bad(**one) for one in found["bad"])})


def needs(targets: Mapping[str, Any], options: LoadOptions) -> list[frozenset[str]]:
    """What a step must have for these targets of a load: a part of each set."""
    given = {part for part in (*_WEIGHTS, "optimizer") if targets.get(part) is not None} | set(targets.get("parts") or ())
    wanted = given if options.parts is None else given & set(options.parts)
    return sorted({_WEIGHTS if part in _WEIGHTS else frozenset({part}) for part in wanted}, key=sorted)


def choose(
    found: Scan,
    options: ManagerOptions,
    *,
    root: str,
    step: int | None,
    needed: Sequence[frozenset[str]],
    strict: bool,
    failed: Mapping[str, str],
    look: Callable[[StepRecord], str],
) -> Origin:
    """The newest valid step of what was found that has all that is `needed`, or, unless `strict`, the newest that has some of it; else the
    newest in another format; else what the options name. `step`: this one or NotFoundError.

    `failed`: folders that this load has tried in vain, and why. `look`: what is wrong with one, in a sentence, empty for a good one. Each
    folder that is passed over is told in one warning; none is changed.
    """
    if step is not None:
        return _given(found, step, root=root, prefix=options.step_prefix, failed=failed, look=look)
    others = _foreign(found)
    _tell_newer(found, others)
    bad = [one for one in found.steps if one.status == "incomplete"]
    lacks = {one.path: _lacking(one, needed) for one in found.complete}
    those = [one for one in reversed(found.complete) if not lacks[one.path]]
    if not strict:
        those += [one for one in reversed(found.complete) if 0 < len(lacks[one.path]) < len(needed)]
    for one in those:
        why = failed.get(one.path) or look(one)
        if not why:
            _tell_chosen(one, found, others, lacks)
            return _own(one, found, root, bad)
        _warn(one.path, why)
        bad.append(one)
    _tell_none(root, found, lacks)
    known = _bad(bad, root)
    other = _readable(others, failed)
    if other is not None:
        return Origin("foreign", other, others[other][0], known)
    if options.load_parameters_path:
        return Origin("parameters", options.load_parameters_path, bad=known)
    if options.load_full_state_path:
        return Origin("full", options.load_full_state_path, bad=known)
    return Origin("none", bad=known)


def _own(one: StepRecord, found: Scan, root: str, bad: Sequence[StepRecord]) -> Origin:
    lasting = any(other.save_id == one.save_id and os.path.dirname(other.path) == root for other in found.complete)
    return Origin("own", one.path, one.step, _bad(bad, root), save_id=one.save_id or "", lasting=lasting)


def _bad(those: Sequence[StepRecord], root: str) -> tuple[Bad, ...]:
    where = {(one.step, one.save_id, os.path.dirname(one.path) != root) for one in those}
    return tuple(Bad(step, save_id, local) for step, save_id, local in sorted(where, key=str) if step is not None and save_id is not None)


def _lacking(one: StepRecord, needed: Sequence[frozenset[str]]) -> list[str]:
    """In words, what of the needed a step does not have."""
    return [" or ".join(sorted(parts, reverse=True)) for parts in needed if parts.isdisjoint(one.parts)]


def _tell_chosen(one: StepRecord, found: Scan, others: Mapping[str, tuple[int, str]], lacks: Mapping[str, list[str]]) -> None:
    for newer in reversed(found.complete[found.complete.index(one) + 1 :]):
        if lacks[newer.path]:
            _LOG.info("%s is passed over: it has no %s", newer.path, ", ".join(lacks[newer.path]))
    if lacks[one.path]:
        _LOG.warning("%s is taken for want of a better one (strict=False): it has no %s", one.path, ", ".join(lacks[one.path]))
    for path, (number, kind) in others.items():
        if one.step is not None and number > one.step:
            _warn(path, f"is of another format ({kind}); step {one.step} of this run is taken; restore({number}) takes it")


def _tell_none(root: str, found: Scan, lacks: Mapping[str, list[str]]) -> None:
    """Whole steps that are not taken look as if there were none: that is told."""
    newest = next((one for one in reversed(found.complete) if lacks[one.path]), None)
    if newest is not None:
        text = "%s: no step has all that is asked for; the newest, %s, has no %s; leave these targets out, or pass strict=False, to take it"
        _LOG.warning(text, root, newest.path, ", ".join(lacks[newest.path]))


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
            return _own(one, found, root, those[: number - 1])
        _warn(one.path, why)
    if those:
        return Origin("none", bad=_bad(those, root))
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

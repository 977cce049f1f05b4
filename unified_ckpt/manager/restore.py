"""Where a run starts from: its own newest valid step, else weights or a whole state from elsewhere, else nothing. One rank chooses."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from unified_ckpt.core.text import listed
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.engine.nodes.coverage import choose as gathered
from unified_ckpt.engine.nodes.inventory import take_inventory
from unified_ckpt.errors import CheckpointError, IncompleteError, LayoutError, NotFoundError
from unified_ckpt.manager.steps.scan import (
    Bad,
    Leftover,
    Scan,
    StepRecord,
    foreign_steps,
    step_name,
)
from unified_ckpt.manager.tiers.cluster_listing import Survey
from unified_ckpt.options import LoadOptions, ManagerOptions
from unified_ckpt.runtime.storage.storage import absolute, writable
from unified_ckpt.sources.step_names import (
    StepContents,
    StepEntry,
    list_steps,
    newest_first,
    read_step,
)

_LOG = logging.getLogger("unified_ckpt")
_WEIGHTS = frozenset({"model", "master_weights"})  # either stands in for the other


@dataclass(frozen=True, slots=True)
class Origin:
    """`kind`: the run's own step, one that another engine has left under the root, weights only, a whole state, or nothing. `bad`: what
    the look has found. `local`: `path` is a name in the local directory of each machine. `save_id`: of an own step; `lasting`: that save is
    in the root. `name`: another engine's step, below the root."""

    kind: Literal["own", "foreign", "parameters", "full", "none"]
    path: str = ""
    step: int | None = None
    bad: tuple[Bad, ...] = ()
    local: bool = False
    save_id: str = ""
    lasting: bool = False
    name: str = ""


def encode(origin: Origin) -> bytes:
    return json.dumps(asdict(origin)).encode()


def decode(told: bytes) -> Origin:
    found = json.loads(told)
    return Origin(**{**found, "bad": tuple(Bad(**one) for one in found["bad"])})


def needs(targets: Mapping[str, Any], options: LoadOptions) -> list[frozenset[str]]:
    """What a step must have for these targets of a load: a part of each set."""
    given = {part for part in (*_WEIGHTS, "optimizer") if targets.get(part) is not None} | set(
        targets.get("parts") or ()
    )
    wanted = given if options.parts is None else given & set(options.parts)
    return sorted(
        {_WEIGHTS if part in _WEIGHTS else frozenset({part}) for part in wanted}, key=sorted
    )


@dataclass(frozen=True, slots=True)
class Request:
    """What a restore asks for: `step`, or the newest with these parts (see `needs`); `strict` and `options` as of a load."""

    step: int | None
    needed: Sequence[frozenset[str]]
    strict: bool
    allow_fresh: bool
    options: LoadOptions


def weights(path: str, targets: Mapping[str, Any], options: LoadOptions) -> tuple[str, ...]:
    """The parts that `load_parameters_path` fills: all but the optimizer. LayoutError where no target is one of them."""
    given = [part for part in ("model", "master_weights") if targets.get(part) is not None] + list(
        targets.get("parts") or ()
    )
    wanted = tuple(part for part in given if options.parts is None or part in options.parts)
    if not wanted:
        raise LayoutError(
            f"load_parameters_path {path}: got no model and no parts to fill, expected one of them; pass `model`"
        )
    return wanted


def choose(
    found: Scan,
    options: ManagerOptions,
    request: Request,
    *,
    root: str,
    failed: Mapping[str, str],
    survey: Survey | None,
) -> Origin:
    """The newest valid step of what was found that has all that is needed, or, unless strict, the newest that has some of it; else the
    same of the steps that other engines wrote; else what the options name. Of a `step`: this one or NotFoundError.

    `failed`: steps that this load has tried in vain, and why. `survey`: of the other machines, if there are several. Each step that is
    passed over is told in one warning; none is changed. IncompleteError where there are steps and none can be used, unless the options
    name a path, or fresh starts are allowed.
    """
    needed, strict = request.needed, request.strict
    entries, absent = (
        (list_steps(root, prefix=options.step_prefix), {}) if survey is None else survey.entries()
    )

    @cache
    def read(entry: StepEntry) -> StepContents:
        where = absent.get(entry.path)
        return (
            read_step(entry, request.options.source)
            if where is None
            else StepContents(entry.number, problem=where)
        )

    def look(one: StepRecord) -> str:
        return damage(one.path) if survey is None else survey.damage(one, otherwise=damage)

    others = _others(foreign_steps(found, entries), read)
    if request.step is not None:
        return _given(
            found,
            others,
            request.step,
            root=root,
            prefix=options.step_prefix,
            failed=failed,
            look=look,
        )
    for left in found.newer_and_aside:
        _warn(left.path, _aside(left))
    passed = _newer_and_bad(found, others)
    unusable = {
        one.path: one.why
        for one in found.steps
        if one.status == "misnamed" or one.ours or one.unread
    }
    bad = [one for one in found.steps if one.status == "incomplete"]
    lacks = {one.path: _lacking(one.parts, needed) for one in found.complete}
    those = [one for one in reversed(found.complete) if not lacks[one.path]]
    if not strict:
        those += [one for one in reversed(found.complete) if 0 < len(lacks[one.path]) < len(needed)]
    for one in those:
        why = failed.get(one.path) or look(one)
        if not why:
            _tell_chosen(one, found, lacks, passed)
            _warn_of_newer(one.step or 0, others, read)
            return _own(one, found, root, bad)
        passed[one.path] = unusable[one.path] = why
        bad.append(one)
    lacking = {
        one.path: _without(lacks[one.path])
        for one in reversed(found.complete)
        if lacks[one.path] and one not in those
    }
    known = _bad(bad, root)
    unusable = {
        one.path: unusable[one.path] for one in reversed(found.steps) if one.path in unusable
    } | lacking
    chosen, why_not = _choose_foreign(others, needed, strict=strict, failed=failed, read=read)
    if chosen is not None:
        _tell_foreign(chosen, others, passed | dict(list(lacking.items())[:1]) | why_not)
        return Origin("foreign", chosen.path, chosen.number, known, name=chosen.name)
    if options.load_parameters_path:
        origin = Origin("parameters", options.load_parameters_path, bad=known)
    elif options.load_full_state_path:
        origin = Origin("full", options.load_full_state_path, bad=known)
    else:
        origin = Origin("none", bad=known)
    unusable |= why_not
    if unusable and not failed:  # else the error of the load is raised
        _check_fresh(root, unusable, origin, allow_fresh=request.allow_fresh)
    return origin


def _own(one: StepRecord, found: Scan, root: str, bad: Sequence[StepRecord]) -> Origin:
    lasting = any(
        other.save_id == one.save_id and os.path.dirname(other.path) == root
        for other in found.complete
    )
    return Origin(
        "own", one.path, one.step, _bad(bad, root), save_id=one.save_id or "", lasting=lasting
    )


def _bad(those: Sequence[StepRecord], root: str) -> tuple[Bad, ...]:
    where = {(one.step, one.save_id, os.path.dirname(one.path) != root) for one in those}
    return tuple(
        Bad(step, save_id, local)
        for step, save_id, local in sorted(where, key=str)
        if step is not None and save_id is not None
    )


def _lacking(parts: Collection[str], needed: Sequence[frozenset[str]]) -> list[str]:
    """In words, what of the needed a step with these parts does not have."""
    return [
        " or ".join(sorted(either, reverse=True)) for either in needed if either.isdisjoint(parts)
    ]


def _without(lacking: Sequence[str]) -> str:
    return (
        f"it has no {', '.join(lacking)}; leave these targets out, or pass strict=False, to load it"
        if lacking
        else ""
    )


def _tell_chosen(
    one: StepRecord, found: Scan, lacks: Mapping[str, list[str]], passed: Mapping[str, str]
) -> None:
    for path, why in passed.items():
        _warn(path, why)
    for newer in reversed(found.complete[found.complete.index(one) + 1 :]):
        if lacks[newer.path]:
            _LOG.info("%s is passed over: it has no %s", newer.path, ", ".join(lacks[newer.path]))
    if lacks[one.path]:
        _LOG.warning(
            "%s is taken for want of a better one (strict=False): it has no %s",
            one.path,
            ", ".join(lacks[one.path]),
        )


def _warn_of_newer(
    step: int, others: Sequence[StepEntry], read: Callable[[StepEntry], StepContents]
) -> None:
    """Of other engines' steps after this own one: the newest that could be taken, and those before it that could not."""
    for entry in others:
        if entry.number is None or entry.number <= step:
            continue
        problem = read(entry).problem
        taken = f"is of another format ({entry.format}); step {step} of this run is taken; restore({entry.number}) takes it"
        _warn(entry.path, problem or taken)
        if not problem:
            break


def _newer_and_bad(found: Scan, others: Sequence[StepEntry]) -> dict[str, str]:
    """What claims to be after the last good step, and is no step: by path, why."""
    paths = {entry.path for entry in others}
    return {one.path: one.why for one in found.newer_and_bad if one.path not in paths}


def _others(
    entries: Sequence[StepEntry], read: Callable[[StepEntry], StepContents]
) -> list[StepEntry]:
    """The one to resume from first. What has no number in its name is opened."""
    return newest_first(
        [
            entry if entry.number is not None else replace(entry, number=read(entry).step)
            for entry in entries
        ]
    )


def _choose_foreign(
    others: Sequence[StepEntry],
    needed: Sequence[frozenset[str]],
    *,
    strict: bool,
    failed: Mapping[str, str],
    read: Callable[[StepEntry], StepContents],
) -> tuple[StepEntry | None, dict[str, str]]:
    """The first of the others that can be opened and has what is needed; and by path, why those before it, or all, are not taken."""
    partial: StepEntry | None = None
    passed: dict[str, str] = {}
    for entry in others:
        contents = read(entry)
        problem, lacking = (
            failed.get(entry.path) or contents.problem,
            _lacking(contents.parts, needed),
        )
        if not problem and not lacking:
            return entry, passed
        if not problem and not strict and len(lacking) < len(needed):
            partial = partial or entry
        passed[entry.path] = problem or _without(lacking)
    if partial is not None:
        del passed[partial.path]
    return partial, passed


def _tell_foreign(entry: StepEntry, others: Sequence[StepEntry], passed: Mapping[str, str]) -> None:
    """What is taken, and what is passed over for it."""
    for path, why in passed.items():
        _warn(path, why)
    newest = max(others, key=lambda other: -1 if other.number is None else other.number)
    if entry.pointer and newest.path not in passed and newest.number != entry.number:
        _warn(
            newest.path,
            f"{entry.pointer} names {entry.name}, which is taken; restore({newest.number}) takes it",
        )
    _LOG.warning(
        "%s is of another format (%s): it is read as it is, what is saved next is ours",
        entry.path,
        entry.format,
    )


def _check_fresh(
    root: str, unusable: Mapping[str, str], origin: Origin, *, allow_fresh: bool
) -> None:
    """IncompleteError that names the steps that are there where a run would start fresh beside them; a warning where that is asked for."""
    steps = [
        f"{os.path.relpath(path, root)}: {' '.join(why.split())}" for path, why in unusable.items()
    ]
    text = listed(f"{root}: has steps, and none can be used", steps)
    if origin.kind != "none":
        _LOG.warning("%s\n%s is loaded", text, origin.path)
    elif allow_fresh:
        _LOG.warning("%s\nThe run starts fresh (allow_fresh=True)", text)
    else:
        raise IncompleteError(
            f"{text}\nRepair one, name another with load_full_state_path, or pass restore(..., allow_fresh=True) to start fresh"
        )


def _aside(left: Leftover) -> str:
    return f"an interrupted replacement left the only copy of a checkpoint there; needed its name, {left.checkpoint}: rename it back"


def _given(
    found: Scan,
    others: Sequence[StepEntry],
    step: int,
    *,
    root: str,
    prefix: str,
    failed: Mapping[str, str],
    look: Callable[[StepRecord], str],
) -> Origin:
    """The step that was asked for by its number: the next one where one of two is damaged, or the load has failed with it."""
    those = [one for one in reversed(found.complete) if one.step == step]
    for number, one in enumerate(those, 1):
        why = failed.get(one.path) or (
            look(one) if number < len(those) else ""
        )  # of the last one the load says what is wrong
        if not why:
            return _own(one, found, root, those[: number - 1])
        _warn(one.path, why)
    if those:
        return Origin("none", bad=_bad(those, root))
    for entry in others:
        if entry.number == step and entry.format and entry.path not in failed:
            return Origin("foreign", entry.path, step, name=entry.name)
    name = step_name(step, prefix)
    seen = [
        (left.checkpoint, f"is not there: {left.path}: {_aside(left)}")
        for left in found.leftovers
        if left.needed
    ]
    seen += [(one.name, f"is {one.status}: {one.why}") for one in found.steps]
    why = next((text for there, text in seen if there == name), "is not there")
    numbers = [one.step for one in found.complete] + [
        entry.number for entry in reversed(others) if entry.format
    ]
    there = ", ".join(dict.fromkeys(map(str, numbers))) or "none"
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


def resolved(options: ManagerOptions) -> ManagerOptions:
    """The options with paths that no later change of the working directory moves. StorageError for a local tier that is a URL."""
    reads = {
        name: absolute(path)
        for name in ("load_parameters_path", "load_full_state_path")
        if (path := getattr(options, name))
    }
    tier = (
        {}
        if options.local_directory is None
        else {"local_directory": writable(options.local_directory)}
    )
    return options.model_copy(update={**reads, **tier})

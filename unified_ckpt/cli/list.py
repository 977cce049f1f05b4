"""The verb `list`: the checkpoints under a root, ours and other engines', good and bad, and what interrupted saves have left.

Starts without torch; steps of other engines are opened, which needs it.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from unified_ckpt.cli.retention_args import problem, rules_of
from unified_ckpt.cli.text import count, human, plain
from unified_ckpt.core.retention import Rules, kept
from unified_ckpt.errors import NotFoundError
from unified_ckpt.manager.rules.when import local_rules
from unified_ckpt.manager.steps.scan import (
    Leftover,
    Scan,
    StepRecord,
    foreign_steps,
    scan,
    sizes_of,
)
from unified_ckpt.manager.tiers.run_marker import ids, read, strangers
from unified_ckpt.options import ManagerOptions, SourceOptions
from unified_ckpt.runtime.storage.storage import LocalStorage, writable
from unified_ckpt.sources.detect.names import title_of
from unified_ckpt.sources.step_names import UNIFIED, StepEntry, list_steps, read_step

_DEPTH = 2  # of runs below the root: runs/<name>/checkpoints
_HEAD = ("step", "size", "files", "created", "took", "kind", "status", "kept by")


@dataclass(frozen=True, slots=True)
class _Run:
    """A folder with checkpoints in it, and the local directory that goes with it, if one was given. `kept`: path -> why it stays.

    `apart`: saves in the local directory that are of other runs. `entries`: steps of other engines, by path; they are among those found,
    and do not count for what stays.
    """

    path: str
    found: Scan
    kept: dict[str, tuple[str, ...]]
    local: str | None = None
    apart: frozenset[str] = frozenset()
    entries: dict[str, StepEntry] = field(default_factory=dict)

    def tier(self, path: str) -> str:
        return "local" if self.local is not None and os.path.dirname(path) == self.local else "root"


def run(arguments: Namespace) -> int:
    """Takes `root`, `prefix`, the rules and `json`."""
    if (wrong := problem(arguments)) is not None:
        print(f"unified-ckpt list: {wrong}", file=sys.stderr)
        return 2
    root = os.path.realpath(writable(arguments.root))
    if not os.path.isdir(root):
        raise NotFoundError(f"{root}: there is no such folder")
    if arguments.local is None:
        listed: set[str] = set()
        folders = _folders(root, _DEPTH, arguments.prefix, listed)
        runs = [_run(path, arguments.prefix, rules_of(arguments), listed) for path in folders]
    else:
        runs = [_two_tiers(root, os.path.realpath(writable(arguments.local)), arguments)]
    runs = [one for one in runs if one.found.steps or one.found.leftovers]
    if arguments.json:
        print(json.dumps({"root": root, "runs": [_as_json(one) for one in runs]}, indent=2))
    elif not runs:
        print(f"{root}: no checkpoints named {arguments.prefix}<step>")
    else:
        print("\n\n".join("\n".join(_text(one)) for one in runs))
        if len(runs) > 1:
            records = [record for one in runs for record in one.found.steps]
            print(f"\n{count(len(runs), 'run')}: {_total(records)}")
    return 0


def _folders(folder: str, depth: int, prefix: str, listed: Collection[str]) -> Iterator[str]:
    """The folder and those below it that may be runs: no step, and none of the steps `listed` so far. One below that cannot be listed, as
    `lost+found`, is left out, and told."""
    yield folder
    for name in _below(folder) if depth else ():
        path = os.path.join(folder, name)
        if name.startswith(prefix) or path in listed:
            continue
        try:
            _below(path)
        except OSError as error:
            print(
                f"unified-ckpt list: {plain(path)} is left out: it cannot be read: {error.strerror}",
                file=sys.stderr,
            )
        else:
            yield from _folders(path, depth - 1, prefix, listed)


def _below(folder: str) -> list[str]:
    with os.scandir(folder) as found:
        return sorted(
            entry.name
            for entry in found
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        )


def _run(path: str, prefix: str, rules: Rules, listed: set[str]) -> _Run:
    """`listed`: steps of other engines that a run above has already; those of this one are added."""
    found = scan(LocalStorage(path), prefix)
    entries = _entries(path, found, prefix)
    entries = {path: one for path, one in entries.items() if path not in listed}
    listed.update(entries)
    return _Run(path, _with(found, entries), _kept(found.complete, rules), entries=entries)


def _entries(root: str, found: Scan, prefix: str) -> dict[str, StepEntry]:
    """Steps of other engines, by path. What has the name of one of ours and cannot be read stays what it is for the scan, and ours in a
    folder below is another run."""
    known = {one.path for one in found.steps}
    those = foreign_steps(found, list_steps(root, prefix=prefix))
    those = [one for one in those if one.readable or one.path not in known]
    return {
        one.path: one for one in those if one.format != UNIFIED or os.path.dirname(one.path) == root
    }


def _with(found: Scan, entries: dict[str, StepEntry]) -> Scan:
    """What was found, and the steps of other engines, each opened."""
    steps = [
        *(one for one in found.steps if one.path not in entries),
        *map(_opened, entries.values()),
    ]
    return Scan(
        tuple(sorted(steps, key=lambda one: -1 if one.step is None else one.step)), found.leftovers
    )


def _opened(entry: StepEntry) -> StepRecord:
    contents, sizes = read_step(entry, SourceOptions(names="own")), sizes_of(entry.path)
    return StepRecord(
        name=entry.name,
        path=entry.path,
        status="incomplete" if contents.problem else "complete",
        why=contents.problem,
        ours=False,
        step=contents.step,
        nbytes=sum(sizes.values()),
        files=len(sizes),
        parts=tuple(sorted(contents.parts)),
    )


def _two_tiers(root: str, local: str, arguments: Namespace) -> _Run:
    if not os.path.isdir(local):
        raise NotFoundError(f"{local}: there is no such folder")
    here = scan(LocalStorage(local), arguments.prefix)
    there = scan(LocalStorage(root), arguments.prefix)
    apart = strangers(read(local), root, committed=ids(there.complete), local=ids(here.steps))
    latest = local_rules(ManagerOptions(keep_latest_local=arguments.keep_latest_local))
    kept_there = _kept(there.complete, rules_of(arguments))
    kept_here = _kept([one for one in here.complete if one.save_id not in apart], latest)
    both = sorted(
        [*there.steps, *here.steps],
        key=lambda one: (-1 if one.step is None else one.step, one.path in kept_here, one.path),
    )
    every = Scan(tuple(both), (*there.leftovers, *here.leftovers))
    entries = _entries(root, there, arguments.prefix)
    return _Run(root, _with(every, entries), kept_there | kept_here, local, apart, entries)


def _kept(records: list[StepRecord], rules: Rules) -> dict[str, tuple[str, ...]]:
    by_step = kept([one.saved for one in records], rules)
    return {one.path: by_step[one.saved.step] for one in records if one.step in by_step}


def _as_json(one: _Run) -> dict[str, Any]:
    steps = [
        {
            **asdict(record),
            "full": record.full,
            "kept_by": _kept_by(one, record),
            **_tier(one, record),
            **_format(one, record),
        }
        for record in one.found.steps
    ]
    told = {
        "path": one.path,
        "steps": steps,
        "leftovers": [asdict(left) for left in one.found.leftovers],
    }
    return told if one.local is None else {**told, "local": one.local}


def _tier(one: _Run, record: StepRecord) -> dict[str, Any]:
    return (
        {}
        if one.local is None
        else {"tier": one.tier(record.path), "of_this_run": record.save_id not in one.apart}
    )


def _format(one: _Run, record: StepRecord) -> dict[str, str]:
    """Which engine's, and the engine's own file that names it as the one to resume from."""
    entry = one.entries.get(record.path)
    return (
        {"format": UNIFIED, "pointer": ""}
        if entry is None
        else {"format": entry.format, "pointer": entry.pointer}
    )


def _kept_by(one: _Run, record: StepRecord) -> list[str]:
    return list(one.kept.get(record.path, ()))


def _text(one: _Run) -> list[str]:
    lines = [one.path if one.local is None else f"{one.path} and {one.local}"]
    if one.found.steps:
        rows = [_HEAD, *(_row(one, record) for record in one.found.steps)]
        if one.entries:
            formats = ["format", *(_title(one, record) for record in one.found.steps)]
            rows = [(*row[:6], kind, *row[6:]) for row, kind in zip(rows, formats, strict=True)]
        if one.local is not None:
            tiers = ["tier", *(one.tier(record.path) for record in one.found.steps)]
            rows = [(row[0], tier, *row[1:]) for row, tier in zip(rows, tiers, strict=True)]
        lines += _columns(rows)
        lines.append(f"  {_total(one.found.steps)}")
    if one.found.leftovers:
        lines.append("  left by interrupted saves, no checkpoints:")
        lines += [f"    {plain(left.name)}  {left_text(left)}" for left in one.found.leftovers]
    return lines


def _title(one: _Run, record: StepRecord) -> str:
    entry = one.entries.get(record.path)
    if entry is None:
        return UNIFIED
    return f"{title_of(entry.format) or 'unknown'}: {plain(entry.name)}"


def _row(one: _Run, record: StepRecord) -> tuple[str, ...]:
    if record.step is None:
        status = f"{record.status}: {plain(record.why)}" if record.why else record.status
        return (plain(record.name), human(record.nbytes), str(record.files), "", "", "", status, "")
    took = "" if record.seconds is None else f"{record.seconds:.1f} s"
    kind = "full" if record.full else "model only" if record.parts else ""
    kind += f", without {', '.join(record.omitted_parts)}" if record.omitted_parts else ""
    status = record.status if not record.why else f"{record.status}: {plain(record.why)}"
    if record.path in one.entries and one.entries[record.path].pointer:
        status += f", {one.entries[record.path].pointer} names it"
    if record.save_id in one.apart:
        status += ", of another run"
    step = str(record.step) if record.status != "misnamed" else plain(record.name)
    return (
        step,
        human(record.nbytes),
        str(record.files),
        record.created or "",
        took,
        kind,
        status,
        ", ".join(_kept_by(one, record)),
    )


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _total(records: list[StepRecord] | tuple[StepRecord, ...]) -> str:
    bad = sum(record.status != "complete" for record in records)
    text = f"{count(len(records), 'checkpoint')}, {human(sum(record.nbytes for record in records))}"
    return f"{text}, {bad} of them bad" if bad else text


def left_text(left: Leftover) -> str:
    """`12 MiB in 3 files, last changed 2.5 h ago`."""
    more = "; it holds the only copy of a checkpoint: rename it back" if left.needed else ""
    return f"{human(left.nbytes)} in {count(left.files, 'file')}, last changed {left.age_seconds / 3600:.1f} h ago{more}"

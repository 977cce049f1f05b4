"""The verb `list`: the checkpoints under a root, good and bad, and what interrupted saves have left. Starts without torch."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from unified_ckpt.cli.rules import problem, rules_of
from unified_ckpt.cli.words import count, human, plain
from unified_ckpt.core.retention import Rules, kept
from unified_ckpt.errors import NotFoundError
from unified_ckpt.manager.steps import Leftover, Scan, StepRecord, scan
from unified_ckpt.runtime.storage import LocalStorage

_DEPTH = 2  # of runs below the root: runs/<name>/checkpoints
_HEAD = ("step", "size", "files", "created", "took", "kind", "status", "kept by")


@dataclass(frozen=True, slots=True)
class _Run:
    """A folder with checkpoints in it. `kept`: step -> why it stays."""

    path: str
    found: Scan
    kept: dict[int, tuple[str, ...]]


def run(arguments: Namespace) -> int:
    """Takes `root`, `prefix`, the rules and `json`."""
    if (wrong := problem(arguments)) is not None:
        print(f"unified-ckpt list: {wrong}", file=sys.stderr)
        return 2
    root = os.path.realpath(arguments.root)
    if not os.path.isdir(root):
        raise NotFoundError(f"{root}: there is no such folder")
    runs = [_run(path, arguments.prefix, rules_of(arguments)) for path in _folders(root, _DEPTH, arguments.prefix)]
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


def _folders(folder: str, depth: int, prefix: str) -> Iterator[str]:
    """The folder and those below it that may be runs."""
    yield folder
    if depth:
        with os.scandir(folder) as found:
            names = sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."))
        for name in names:
            if not name.startswith(prefix):
                yield from _folders(os.path.join(folder, name), depth - 1, prefix)


def _run(path: str, prefix: str, rules: Rules) -> _Run:
    found = scan(LocalStorage(path), prefix)
    return _Run(path, found, kept([one.saved for one in found.complete], rules))


def _as_json(one: _Run) -> dict[str, Any]:
    steps = [{**asdict(record), "full": record.full, "kept_by": _kept_by(one, record)} for record in one.found.steps]
    return {"path": one.path, "steps": steps, "leftovers": [asdict(left) for left in one.found.leftovers]}


def _kept_by(one: _Run, record: StepRecord) -> list[str]:
    return list(one.kept.get(record.step, ())) if record.status == "complete" and record.step is not None else []


def _text(one: _Run) -> list[str]:
    lines = [one.path]
    if one.found.steps:
        lines += _columns([_HEAD, *(_row(one, record) for record in one.found.steps)])
        lines.append(f"  {_total(one.found.steps)}")
    if one.found.leftovers:
        lines.append("  left by interrupted saves, no checkpoints:")
        lines += [f"    {plain(left.name)}  {left_text(left)}" for left in one.found.leftovers]
    return lines


def _row(one: _Run, record: StepRecord) -> tuple[str, ...]:
    if record.step is None:
        return (plain(record.name), human(record.nbytes), str(record.files), "", "", "", f"incomplete: {plain(record.why)}", "")
    took = "" if record.seconds is None else f"{record.seconds:.1f} s"
    kind = "full" if record.full else "model only"
    status = record.status if not record.why else f"{record.status}: {plain(record.why)}"
    step = str(record.step) if record.status != "misnamed" else plain(record.name)
    return (step, human(record.nbytes), str(record.files), record.created or "", took, kind, status, ", ".join(_kept_by(one, record)))


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _total(records: list[StepRecord] | tuple[StepRecord, ...]) -> str:
    bad = sum(record.status != "complete" for record in records)
    text = f"{count(len(records), 'checkpoint')}, {human(sum(record.nbytes for record in records))}"
    return f"{text}, {bad} of them bad" if bad else text


def left_text(left: Leftover) -> str:
    """`12 MiB in 3 files, last changed 2.5 h ago`."""
    more = "; it holds the only copy of a checkpoint: rename it back" if left.needed else ""
    return f"{human(left.nbytes)} in {count(left.files, 'file')}, last changed {left.age_seconds / 3600:.1f} h ago{more}"

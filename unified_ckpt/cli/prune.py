"""The verb `prune`: removes checkpoints that no rule keeps, and on demand what is no checkpoint. Asks nothing; starts without torch."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from unified_ckpt.cli.list import left_text
from unified_ckpt.cli.retention_args import problem, rules_of
from unified_ckpt.cli.text import count, human, plain
from unified_ckpt.core.retention import Rules
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.manager.steps.remove import clear, remove, remove_broken
from unified_ckpt.manager.steps.rotate import condemned, damaged
from unified_ckpt.manager.steps.scan import Scan, StepRecord, foreign_steps, scan
from unified_ckpt.runtime.storage.storage import LocalStorage, writable
from unified_ckpt.sources.detect.names import title_of
from unified_ckpt.sources.step_names import list_steps


@dataclass(frozen=True, slots=True)
class _Choice:
    """A folder, and whether it goes. `save_id`: of a good checkpoint, which goes only while nobody reads it; `seen`: of a folder with the
    name of a step that is none, which goes only as it is."""

    name: str
    nbytes: int
    goes: bool
    why: str
    save_id: str | None = None
    seen: StepRecord | None = None


def run(arguments: Namespace) -> int:
    """Takes `root`, `prefix`, the rules, `incomplete`, `leftovers`, `older_than_hours`, `dry_run` and `json`. 1 where something stayed."""
    if (wrong := problem(arguments)) is not None:
        print(f"unified-ckpt prune: {wrong}", file=sys.stderr)
        return 2
    rules = rules_of(arguments)
    if not (rules.full or rules.model_only or arguments.incomplete or arguments.leftovers):
        print(
            "unified-ckpt prune: nothing is asked for: needed a rule such as --keep-latest, or --incomplete or --leftovers",
            file=sys.stderr,
        )
        return 2
    root = os.path.realpath(writable(arguments.root))
    if not os.path.isdir(root):
        raise NotFoundError(f"{root}: there is no such folder")
    storage = LocalStorage(root)
    found = scan(storage, arguments.prefix)
    if not found.steps and not found.leftovers:
        raise NotFoundError(
            f"{root}: no checkpoints named {arguments.prefix}<step>; needed the folder of one run"
        )
    choices = list(_by_rules(storage, found, rules)) if rules.full or rules.model_only else []
    older = arguments.older_than_hours * 3600
    choices += (
        list(_incomplete(storage, found, arguments.prefix, older)) if arguments.incomplete else []
    )
    choices += list(_leftovers(found, older)) if arguments.leftovers else []
    done, failed = _carry_out(storage, choices, prefix=arguments.prefix, dry=arguments.dry_run)
    _show(arguments, root, choices, done, failed)
    return 1 if failed else 0


def _by_rules(storage: LocalStorage, found: Scan, rules: Rules) -> Iterator[_Choice]:
    """Good checkpoints that no rule keeps, and newer ones that do not count."""
    wrong = damaged(storage, found)
    for one in condemned(found, rules, protected=(), apart=wrong):
        yield _Choice(one.name, one.nbytes, True, "no rule keeps it", one.save_id)
    for one in found.complete:
        if one.save_id in wrong:
            yield _Choice(
                one.name, one.nbytes, False, f"damaged, and does not count: {wrong[one.save_id]}"
            )


def _incomplete(
    storage: LocalStorage, found: Scan, prefix: str, older_seconds: float
) -> Iterator[_Choice]:
    """Folders with the name of a step that are no whole checkpoint."""
    entries = foreign_steps(found, list_steps(storage.root, prefix=prefix))
    formats = {entry.path: title_of(entry.format) for entry in entries if entry.readable}
    for one in found.steps:
        if one.status == "incomplete" and formats.get(one.path):
            yield _Choice(
                one.name, one.nbytes, False, f"it is of another engine ({formats[one.path]})"
            )
        elif one.status == "incomplete":
            yield _Choice(one.name, one.nbytes, *_verdict(storage, one, older_seconds), seen=one)


def _verdict(storage: LocalStorage, one: StepRecord, older_seconds: float) -> tuple[bool, str]:
    if one.unread:
        return False, f"nobody knows whether it is a checkpoint: {one.why}"
    if not one.ours:
        return False, f"incomplete: {one.why}; nothing shows that this library wrote it"
    if one.save_id is None and one.why.startswith("unified_checkpoint.json: format version"):
        return False, one.why
    if (age_seconds := _age(storage, one)) < older_seconds:
        return False, f"incomplete: {one.why}; changed {age_seconds / 3600:.1f} h ago"
    return True, f"incomplete: {one.why}"


def _age(storage: LocalStorage, one: StepRecord) -> float:
    stamps = [
        os.stat(storage.path(name)).st_mtime
        for name in (one.name, *(f"{one.name}/{entry}" for entry in storage.entries(one.name)))
    ]
    return time.time() - max(stamps)


def _leftovers(found: Scan, older_seconds: float) -> Iterator[_Choice]:
    for left in found.leftovers:
        if left.needed or not left.ours:
            why = left_text(left) if left.needed else "nothing shows that this library wrote it"
            yield _Choice(left.name, left.nbytes, False, why)
        elif left.age_seconds < older_seconds:
            yield _Choice(
                left.name, left.nbytes, False, f"a save may be at work in it: {left_text(left)}"
            )
        else:
            yield _Choice(
                left.name, left.nbytes, True, f"left by an interrupted save: {left_text(left)}"
            )


def _carry_out(
    storage: LocalStorage, choices: list[_Choice], *, prefix: str, dry: bool
) -> tuple[list[_Choice], dict[str, str]]:
    """What went, or would go, and why the rest of what should go did not."""
    done: list[_Choice] = []
    failed: dict[str, str] = {}
    for choice in (choice for choice in choices if choice.goes):
        try:
            if dry:
                done.append(choice)
            elif choice.seen is not None:
                if remove_broken(storage, choice.seen, prefix):
                    done.append(choice)
                else:
                    failed[choice.name] = "it has changed meanwhile, or is being read"
            elif choice.save_id is None:
                clear(storage, choice.name)
                done.append(choice)
            elif remove(storage, choice.name, save_id=choice.save_id):
                done.append(choice)
            else:
                failed[choice.name] = "it is being read"
        except CheckpointError as error:
            failed[choice.name] = str(error)
    return done, failed


def _show(
    arguments: Namespace,
    root: str,
    choices: list[_Choice],
    done: list[_Choice],
    failed: dict[str, str],
) -> None:
    nbytes = sum(choice.nbytes for choice in done)
    stayed = {choice.name: choice.why for choice in choices if not choice.goes} | failed
    if arguments.json:
        removed = {choice.name: {"nbytes": choice.nbytes, "why": choice.why} for choice in done}
        print(
            json.dumps(
                {
                    "root": root,
                    "dry_run": arguments.dry_run,
                    "removed": removed,
                    "stayed": stayed,
                    "nbytes": nbytes,
                },
                indent=2,
            )
        )
        return
    word = "would remove" if arguments.dry_run else "removed"
    for choice in done:
        print(f"{word} {plain(choice.name)}  {human(choice.nbytes)}  {plain(choice.why)}")
    for name, why in stayed.items():
        print(f"stays {plain(name)}: {plain(why)}")
    print(f"{root}: {word} {count(len(done), 'folder')}, {human(nbytes)}")

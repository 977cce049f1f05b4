"""Which checkpoints of a local directory are of the run that a root belongs to. A local directory outlives jobs: the next may be another.

A small file in the local directory says which root it goes with, which saves were committed there when it was last written, and which
saves lay in the local directory already when this run first came, strangers. The root itself bears no mark.

The rule: a local checkpoint counts if
- the same save (its id is random, 64 bits) is committed in the root; or
- the file names this root, by path, the checkpoint is not one of the strangers, and the directory is known to be of this run: a save that
  the file names, or one that lies in the directory and is no stranger, is committed in the root; or neither file nor root has any.

What it does not know:
- a root that was emptied by hand is a new run, and so is one that was moved: local checkpoints do not count then, those in the root do;
- a root that was emptied before anything was ever committed in it is the same run still: its local checkpoints count;
- two runs that use one local directory at the same time: the one that came last owns it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass

from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.manager.steps.scan import Scan, StepRecord
from unified_ckpt.runtime.storage.regular_files import open_file

MARKER = ".unified_tier.json"


@dataclass(frozen=True, slots=True)
class Lineage:
    """What the file says. `saves`: ids committed in the root; `strangers`: ids in the local directory that are of other runs."""

    root: str
    saves: frozenset[str]
    strangers: frozenset[str]


def read(directory: str) -> Lineage | None:
    """What the directory says; None where it says nothing that can be read."""
    try:
        with open_file(path := os.path.join(directory, MARKER)) as file:
            found = parse_json(file.read(), file=path)
        return Lineage(
            str(found["root"]),
            frozenset(map(str, found["saves"])),
            frozenset(map(str, found["strangers"])),
        )
    except (CheckpointError, OSError, KeyError, TypeError):
        return None


def write(directory: str, lineage: Lineage) -> None:
    """In one step; StorageError where it cannot be."""
    body = json.dumps(
        {
            "root": lineage.root,
            "saves": sorted(lineage.saves),
            "strangers": sorted(lineage.strangers),
        }
    )
    path = os.path.join(directory, MARKER)
    try:
        with open(f"{path}.new", "w") as file:
            file.write(body + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.new")
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def strangers(
    said: Lineage | None, root: str, *, committed: Collection[str], local: Collection[str]
) -> frozenset[str]:
    """Of the saves in the `local` directory those that do not count, by the rule above; `committed`: those in the root."""
    rest = frozenset(local) - frozenset(committed)
    return (
        rest & said.strangers
        if said is not None and is_of(said, root, committed=committed, local=local)
        else rest
    )


def is_of(
    said: Lineage | None, root: str, *, committed: Collection[str], local: Collection[str]
) -> bool:
    """Whether a local directory is known to be of the run of this root, by the rule above."""
    if said is None or said.root != root:
        return False
    known = (said.saves | frozenset(local)) - said.strangers
    return bool(known & frozenset(committed)) or (not said.saves and not committed)


def attributable(
    said: Lineage | None, root: str, local: Scan, *, committed: Collection[str]
) -> Scan:
    """The local steps without those of which nobody knows the save, unless the directory is of this run: they may be another's."""
    if is_of(said, root, committed=committed, local=ids(local.steps)):
        return local
    return Scan(tuple(one for one in local.steps if one.save_id is not None), local.leftovers)


def ids(records: Collection[StepRecord]) -> frozenset[str]:
    return frozenset(one.save_id for one in records if one.save_id is not None)


def together(root: Scan, local: Scan, apart: Collection[str]) -> Scan:
    """Both tiers in the order in which they are to be trusted, the best last. `apart`: saves of the local one that do not count.

    Of one step in both the local one is better, if it is the same save or was created later.
    """
    in_root = {one.step: one for one in root.complete}

    def trust(one: StepRecord) -> tuple[int, int]:
        step = -1 if one.step is None else one.step
        if one.path in in_directory:
            other = in_root.get(one.step)
            same_or_newer = (
                other is None
                or other.save_id == one.save_id
                or (one.created or "") > (other.created or "")
            )
            return step, 1 if same_or_newer else -1
        return step, 0

    count = [one for one in local.steps if one.save_id is None or one.save_id not in apart]
    in_directory = {one.path for one in count}
    return Scan(
        tuple(sorted([*root.steps, *count], key=trust)), (*root.leftovers, *local.leftovers)
    )

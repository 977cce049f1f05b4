"""Power cuts at drawn moments: what was reported durable is whole, and nothing else looks whole.

Each operation runs once, on a real folder, while a journal records what it does to the disk. From
the journal alone, cuts are drawn: a moment, and what is left of bytes and names that were not
synced (`tests/support/power/disk.py`). A failure leaves its folder, and names the seed and the cut.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.engine.cluster.node_commits import faulty
from tests.support.harness import FaultPoint, SimulatedCrash
from tests.support.lanes import use_lanes
from tests.support.power.disk import Disk, Tree, write_tree
from tests.support.power.folder_operations import FOLDER_OPERATIONS
from tests.support.power.journal import Journal, Reported
from tests.support.power.node_operations import (
    NODE_OPERATIONS,
    check_nodes,
    save_first,
    try_save,
)
from tests.support.power.operation import Operation, Report
from tests.support.power.run_operations import RUN_OPERATIONS

NODE_CUTS = [
    pytest.param(0, 1),
    pytest.param(1, 10, marks=pytest.mark.slow),
    *(pytest.param(seed, 300, marks=pytest.mark.long) for seed in range(2, 6)),
]
OPERATIONS = FOLDER_OPERATIONS | NODE_OPERATIONS | RUN_OPERATIONS
CUTS = [
    pytest.param(0, 20),
    pytest.param(1, 150, marks=pytest.mark.slow),
    *(pytest.param(seed, 2000, marks=pytest.mark.long) for seed in range(2, 12)),
]


def record(operation: Operation, root: Path) -> Journal:
    """Run an operation in a new folder, which is removed afterwards. Ranks use several lanes."""
    root.mkdir()
    operation.prepare(root)
    with pytest.MonkeyPatch.context() as patch:
        use_lanes(patch)
        journal = Journal(root)
        journal.attach(patch)
        operation.run(root, journal.report)
    shutil.rmtree(root)
    return journal


def cuts(journal: Journal, draw: random.Random, count: int) -> Iterator[tuple[Tree, list[Any]]]:
    """Yield what is left by cuts at drawn moments, and what was reported until then.

    Many moments follow a report at once.
    """
    moments = range(journal.start, len(journal.entries) + 1)
    after_reports = [m for m in moments if isinstance(journal.entries[m - 1], Reported)]
    disk, position, drawn = Disk(journal), 0, set[int]()
    for moment in sorted(
        draw.choice(after_reports if draw.random() < 0.3 else moments) for _ in range(count)
    ):
        for entry in journal.entries[position:moment]:
            disk.apply(entry)
        position, tree = moment, disk.cut(draw)
        state = hash((tuple(tree.items()), len(disk.reported)))
        if state not in drawn:
            drawn.add(state)
            yield tree, disk.reported


@contextmanager
def left_by(number: int, tree: Tree, root: Path, reported: Sequence[object]) -> Iterator[None]:
    """Create what a cut left inside the block. If that fails, it stays and the error lists it."""
    write_tree(tree, root)
    try:
        yield
    except BaseException as error:
        lines = [f"  {path}: {_text(content)}" for path, content in tree.items()]
        error.add_note("\n".join([f"cut {number}, after {reported}, left", *lines]))
        raise
    shutil.rmtree(root)


def _text(content: bytes | str | None) -> str:
    return "folder" if content is None else f"{len(content)} bytes"


@pytest.mark.parametrize(("seed", "count"), CUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_power_cut_keeps_what_was_reported(
    name: str, seed: int, count: int, tmp_path: Path
) -> None:
    operation, root = OPERATIONS[name], tmp_path / "disk"
    journal = record(operation, root)
    drawn = cuts(journal, random.Random(seed), int(count * operation.share))
    for number, (tree, reported) in enumerate(drawn):
        with left_by(number, tree, root, reported):
            operation.check(root, reported)


@pytest.mark.parametrize(("seed", "moments"), NODE_CUTS)
def test_other_nodes_go_on_after_a_power_cut(seed: int, moments: int, tmp_path: Path) -> None:
    """One of two nodes stops at drawn moments of a save. All have the old save, or the new one."""
    draw, root, whole_save = random.Random(seed), tmp_path / "disk", FaultPoint()
    record(Operation(partial(save_until, fuse=whole_save), check_nodes, save_first), root)
    for number in range(moments):
        fuse = FaultPoint(draw.randrange(len(whole_save.operations)))
        journal = record(Operation(partial(save_until, fuse=fuse), check_nodes, save_first), root)
        disk = Disk(journal)
        for entry in journal.entries:
            disk.apply(entry)
        for _ in range(4):
            with left_by(number, disk.cut(draw, spared=["node-0"]), root, disk.reported):
                check_nodes(root, disk.reported)


def save_until(root: Path, report: Report, *, fuse: FaultPoint) -> None:
    """Save on two nodes; the second stops at the fault point."""
    for outcome in try_save(root, report, step=2, storages=faulty([1], fuse)):
        assert outcome is None or isinstance(outcome, SimulatedCrash | uc.CheckpointError)

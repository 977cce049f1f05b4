"""Power cuts at drawn moments: what was reported durable is whole, and nothing else looks whole.

Each operation runs once, on a real folder, while a journal records what it does to the disk. From
the journal alone, cuts are drawn: a moment, and what is left of bytes and names that were not
synced (`tests/support/power/disk.py`). A failure leaves its folder, and names the seed and the cut.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.power.disk import Disk, Tree, write_tree
from tests.support.power.folder_operations import FOLDER_OPERATIONS
from tests.support.power.journal import Journal
from tests.support.power.node_operations import NODE_OPERATIONS
from tests.support.power.operation import Operation
from tests.support.power.run_operations import RUN_OPERATIONS

OPERATIONS = FOLDER_OPERATIONS | NODE_OPERATIONS | RUN_OPERATIONS
CUTS = [
    pytest.param(0, 40),
    pytest.param(1, 150, marks=pytest.mark.slow),
    *(pytest.param(seed, 2000, marks=pytest.mark.long) for seed in range(2, 12)),
]


def record(operation: Operation, root: Path) -> Journal:
    """Run an operation in a new folder, which is removed afterwards."""
    root.mkdir()
    operation.prepare(root)
    with pytest.MonkeyPatch.context() as patch:
        journal = Journal(root)
        journal.attach(patch)
        operation.run(root, journal.report)
    shutil.rmtree(root)
    return journal


def cuts(journal: Journal, draw: random.Random, count: int) -> Iterator[tuple[Tree, list[object]]]:
    """Yield what is left by cuts at drawn moments, and what was reported until then."""
    moments = sorted(draw.randint(journal.start, len(journal.entries)) for _ in range(count))
    disk, position, drawn = Disk(journal), 0, set[int]()
    for moment in moments:
        for entry in journal.entries[position:moment]:
            disk.apply(entry)
        position, tree = moment, disk.cut(draw)
        state = hash((tuple(tree.items()), len(disk.reported)))
        if state not in drawn:
            drawn.add(state)
            yield tree, disk.reported


@pytest.mark.parametrize(("seed", "count"), CUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_power_cut_keeps_what_was_reported(
    name: str, seed: int, count: int, tmp_path: Path
) -> None:
    operation, root = OPERATIONS[name], tmp_path / "disk"
    journal = record(operation, root)
    drawn = cuts(journal, random.Random(seed), int(count * operation.share))
    for number, (tree, reported) in enumerate(drawn):
        write_tree(tree, root)
        try:
            operation.check(root, reported)
        except BaseException as error:
            left = "\n".join(f"  {path}: {_text(content)}" for path, content in tree.items())
            error.add_note(f"cut {number} of seed {seed}, after {reported}, left\n{left}")
            raise
        shutil.rmtree(root)


def _text(content: bytes | str | None) -> str:
    return "folder" if content is None else f"{len(content)} bytes"

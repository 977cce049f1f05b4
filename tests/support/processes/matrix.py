"""The launches of the matrix. One launch for many cases: starting torchrun costs seconds, a case
costs milliseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.launch import torchrun
from tests.support.processes.layouts import ROWS, TRAINED_SLOWLY, WORLDS, world_of

SECONDS = {
    1: 100,
    2: 150,
    4: 200,
    8: 280,
}  # below pytest's own limit, which shows nothing of the workers

# The layouts that load folders. On four ranks that takes 15 s of two cores.
LOADED = [
    pytest.param(row, marks=[pytest.mark.slow] if world_of(row) > 2 else [])
    for row in ROWS
    if world_of(row) in WORLDS
]

SAVED = [f"{kind}/{row}" for kind in ("formula", "trained") for row in ROWS]
SLOW = [f"trained/{row}" for row in TRAINED_SLOWLY]
FOLDERS = {  # the groups of folders that one launch loads
    "default": [f for f in SAVED if world_of(Path(f).name) in WORLDS and f not in SLOW],
    "slow": SLOW,
    "8 ranks": [f for f in SAVED if world_of(Path(f).name) not in WORLDS],
}


class Matrix:
    """The launches of the matrix, each made on first use, and the workers' reports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ended: dict[tuple[str, int, str], RuntimeError | None] = {}

    def _once(
        self, script: str, world: int, tag: str, *arguments: object, timeout_seconds: float
    ) -> None:
        launch = script, world, tag
        if launch not in self._ended:
            try:
                torchrun(world, script, self.root, *arguments, timeout_seconds=timeout_seconds)
                self._ended[launch] = None
            except RuntimeError as error:
                self._ended[launch] = error
        if (error := self._ended[launch]) is not None:
            raise error

    def saved(self, folder: str) -> list[str]:
        """Save a folder, and all of its group and world size. Return the problems that ranks
        report of it.
        """
        world = world_of(Path(folder).name)
        (group,) = (name for name, folders in FOLDERS.items() if folder in folders)
        folders = [other for other in FOLDERS[group] if world_of(Path(other).name) == world]
        tag = group.replace(" ", "-")
        self._once("worker_save.py", world, tag, tag, *folders, timeout_seconds=SECONDS[world])
        return [
            text
            for rank in range(world)
            for text in json.loads((self.root / f"save-{world}-{rank}-{tag}.json").read_text())
            if text.startswith(f"{folder}:")
        ]

    def loaded(self, world: int, *groups: str) -> list[dict[str, Any]]:
        """Load the folders of these groups in the layouts of `world`. Return one entry per case
        and rank.
        """
        folders = [folder for group in groups for folder in FOLDERS[group]]
        for folder in folders:
            self.saved(folder)
        tag = "-".join(groups).replace(" ", "-")
        self._once("worker_load.py", world, tag, tag, *folders, timeout_seconds=SECONDS[world])
        return [
            case
            for rank in range(world)
            for case in json.loads((self.root / f"load-{world}-{rank}-{tag}.json").read_text())
        ]

    def losses(self, row: str) -> dict[str, list[float]]:
        wrong = self.saved(f"trained/{row}")
        assert not wrong, "\n".join(wrong)
        return json.loads((self.root / f"losses-{row}.json").read_text())

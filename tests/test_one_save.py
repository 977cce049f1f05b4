"""A load reads one save, the one that is asked for, on every rank: whatever lies beside it, and whatever takes its place meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from machines import LOAD, NAME, SAVE, fine, folder_of, on_machine
from refusals import same_error

import unified_ckpt as uc
from unified_ckpt.engine import seal
from unified_ckpt.format import names
from unified_ckpt.runtime.comm import Comm
from unified_ckpt.testing import checkpointer_of, run_ranks, try_ranks

LAYERS = 6


def model(value: float) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.full((64, 64), float(value)) for i in range(LAYERS)}


def values(target: Mapping[str, torch.Tensor]) -> list[float]:
    return sorted({value for tensor in target.values() for value in tensor.unique().tolist()})


def test_a_save_under_construction_of_a_name_that_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is newer, and whole but for its name; and it is another checkpoint."""

    def save(name: str, value: int) -> str:
        monkeypatch.setattr(seal, "datetime", SimpleNamespace(now=lambda _: datetime(2026, 1, value, tzinfo=UTC)))

        def act(comm: Comm) -> str:
            with on_machine(comm, [0, 1]) as made:
                return made.save(folder_of(tmp_path, comm.rank).with_name(name), model=model(value), step=value, options=SAVE).id

        return run_ranks(2, act)[0]

    save(NAME, 1)
    other = f"ema-{NAME}"
    begun = names.staging_name(other, save(other, 2))
    for machine in (0, 1):
        os.rename(folder_of(tmp_path, machine).with_name(other), folder_of(tmp_path, machine).with_name(begun))

    def load(comm: Comm) -> tuple[int | None, list[float]]:
        target = model(0)
        with on_machine(comm, [0, 1]) as made:
            report = made.load(folder_of(tmp_path, comm.rank), model=target, options=LOAD)
        return report.step, values(target)

    assert fine(try_ranks(2, load)) == [(1, [1.0])] * 2


def test_ranks_that_see_two_saves_under_one_name(tmp_path: Path) -> None:
    """Two runs, the same step, the same names: another mount on one node."""
    for run in (0, 1):
        uc.save(tmp_path / f"run-{run}" / NAME, model=model(run + 1), step=1, options=SAVE)
    targets = [model(-1), model(-1)]

    def load(comm: Comm) -> None:
        with checkpointer_of(comm) as made:
            made.load(tmp_path / f"run-{comm.rank}" / NAME, model=targets[comm.rank], options=LOAD)

    same_error(try_ranks(2, load), uc.StorageError, r"several checkpoints: rank\(s\) 0 save \w+; rank\(s\) 1 save \w+; needed one")
    assert [values(target) for target in targets] == [[-1.0]] * 2


def test_a_save_that_takes_the_place_between_two_ranks(tmp_path: Path) -> None:
    path, targets = tmp_path / NAME, [model(-1), model(-1)]
    replace = SAVE.model_copy(update={"if_exists": "replace"})
    uc.save(path, model=model(1), step=1, options=replace)
    opened, replaced = threading.Event(), threading.Event()

    def load(comm: Comm) -> None:
        with checkpointer_of(comm) as made:
            if comm.rank == 1:
                replaced.wait(60)
            with uc.open(path) as source:
                opened.set()
                made.load(source, model=targets[comm.rank], options=LOAD)

    def save() -> None:
        opened.wait(60)
        uc.save(path, model=model(2), step=2, options=replace)
        replaced.set()

    beside = threading.Thread(target=save)
    beside.start()
    found = try_ranks(2, load)
    beside.join()
    same_error(found, uc.StorageError, "the ranks read several checkpoints")
    assert [values(target) for target in targets] == [[-1.0]] * 2

"""A load reads one save on every rank, whatever lies next to it or replaces it meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.refusals import same_error
from tests.support.simulated_nodes import LOAD, NAME, SAVE, fine, folder_of, on_node
from unified_ckpt.engine.load import load as load_module
from unified_ckpt.engine.nodes import discover
from unified_ckpt.engine.save import finalize
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage import open_files
from unified_ckpt.testing import make_checkpointer, run_ranks, try_ranks

LAYERS = 6


def model(value: float) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.full((64, 64), float(value)) for i in range(LAYERS)}


def values(target: Mapping[str, torch.Tensor]) -> list[float]:
    return sorted({value for tensor in target.values() for value in tensor.unique().tolist()})


def test_unfinished_save_with_a_similar_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is newer, and whole but for its name; and it is another checkpoint."""

    def save(name: str, value: int) -> str:
        monkeypatch.setattr(
            finalize,
            "datetime",
            SimpleNamespace(now=lambda _: datetime(2026, 1, value, tzinfo=UTC)),
        )

        def act(comm: Comm) -> str:
            with on_node(comm, [0, 1]) as made:
                return made.save(
                    folder_of(tmp_path, comm.rank).with_name(name),
                    model=model(value),
                    step=value,
                    options=SAVE,
                ).id

        return run_ranks(2, act)[0]

    save(NAME, 1)
    other = f"ema-{NAME}"
    begun = names.staging_name(other, save(other, 2))
    for node in (0, 1):
        os.rename(
            folder_of(tmp_path, node).with_name(other),
            folder_of(tmp_path, node).with_name(begun),
        )

    def load(comm: Comm) -> tuple[int | None, list[float]]:
        target = model(0)
        with on_node(comm, [0, 1]) as made:
            report = made.load(folder_of(tmp_path, comm.rank), model=target, options=LOAD)
        return report.step, values(target)

    assert fine(try_ranks(2, load)) == [(1, [1.0])] * 2


def test_ranks_that_open_different_saves_under_one_name(tmp_path: Path) -> None:
    """Two runs, the same step, the same names: another mount on one node."""
    for run in (0, 1):
        uc.save(tmp_path / f"run-{run}" / NAME, model=model(run + 1), step=1, options=SAVE)
    targets = [model(-1), model(-1)]

    def load(comm: Comm) -> None:
        with make_checkpointer(comm) as made:
            made.load(tmp_path / f"run-{comm.rank}" / NAME, model=targets[comm.rank], options=LOAD)

    same_error(
        try_ranks(2, load),
        uc.StorageError,
        r"different checkpoints: rank\(s\) 0 save \w+; rank\(s\) 1 save \w+; expected one",
    )
    assert [values(target) for target in targets] == [[-1.0]] * 2


def swap(path: Path) -> None:
    """Another checkpoint, which lies beside it, takes its name."""
    path.rename(path.with_name("former"))
    path.with_name("next").rename(path)


def test_checkpoint_replaced_between_two_ranks(tmp_path: Path) -> None:
    uc.save(tmp_path / NAME, model=model(1), step=1, options=SAVE)
    uc.save(tmp_path / "next", model=model(2), step=2, options=SAVE)
    targets = [model(-1), model(-1)]
    opened, swapped = threading.Event(), threading.Event()

    def load(comm: Comm) -> None:
        if comm.rank == 1:
            opened.wait(60)
            swap(tmp_path / NAME)
            swapped.set()
        with uc.open(tmp_path / NAME) as source, make_checkpointer(comm) as made:
            opened.set()
            swapped.wait(60)
            made.load(source, model=targets[comm.rank], options=LOAD)

    same_error(try_ranks(2, load), uc.StorageError, "the ranks opened different checkpoints")
    assert [values(target) for target in targets] == [[-1.0]] * 2


@pytest.mark.parametrize("moment", ["match_targets", "read_tiles"])
def test_load_continues_with_the_folder_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """With few files open at a time: one that is opened again is the same one again."""
    monkeypatch.setattr(open_files, "MAX_IDLE", 1)
    for step, name in ((1, NAME), (2, "next")):
        options = SAVE.model_copy(update={"max_file_bytes": 20_000})
        uc.save(
            tmp_path / name,
            model=model(step),
            step=step,
            extra={"step": step},
            rank_extra=step,
            options=options,
        )
    real, target = getattr(load_module, moment), model(0)

    def late(*args: Any, **what: Any) -> Any:
        if (tmp_path / "next").exists():
            swap(tmp_path / NAME)
        return real(*args, **what)

    monkeypatch.setattr(load_module, moment, late)
    report = uc.load(
        tmp_path / NAME, model=target, options=LOAD.model_copy(update={"verify": "full"})
    )
    assert not (tmp_path / "next").exists()
    assert (report.step, report.extra, report.rank_extra) == (1, {"step": 1}, 1)
    assert report.verified_bytes == LAYERS * 64 * 64 * 4
    assert values(target) == [1.0]


def test_checkpoint_replaced_while_open(tmp_path: Path) -> None:
    """Its files are removed: that is said, and not that the new folder lacks some."""
    uc.save(tmp_path / NAME, model=model(1), step=1, options=SAVE)
    target = model(-1)
    with uc.open(tmp_path / NAME) as source:
        uc.save(
            tmp_path / NAME,
            model=model(2),
            step=2,
            options=SAVE.model_copy(update={"if_exists": "replace"}),
        )
        with pytest.raises(
            uc.NotFoundError,
            match=r"checkpoint-1: was removed or replaced while it was read; load again",
        ):
            uc.load(source, model=target, options=LOAD)
    assert values(target) == [-1.0]


ROWS = uc.Layout(mesh={"dp": 2}, rules={"*": {"dp": 0}})


def load_on_nodes(
    root: Path,
) -> tuple[list[uc.LoadReport | BaseException], list[dict[str, torch.Tensor]]]:
    """What both of two nodes want whole, of which each has a half."""
    targets = [model(-1), model(-1)]

    def load(comm: Comm) -> uc.LoadReport:
        with on_node(comm, [0, 1]) as made:
            return made.load(folder_of(root, comm.rank), model=targets[comm.rank], options=LOAD)

    return try_ranks(2, load), targets


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    for step, name in ((1, NAME), (2, "next")):

        def save(comm: Comm, step: int = step, name: str = name) -> None:
            own = {fqn: tensor[:32] for fqn, tensor in model(step).items()}
            with on_node(comm, [0, 1]) as made:
                made.save(
                    folder_of(tmp_path, comm.rank).with_name(name),
                    model=own,
                    layout=ROWS,
                    step=step,
                    options=SAVE,
                )

        run_ranks(2, save)
    return tmp_path


def test_nodes_continue_with_the_folders_they_opened(
    halves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, real = threading.Lock(), load_module.read_tiles

    def late(*args: Any, **what: Any) -> None:
        with lock:
            for node in (0, 1):
                if folder_of(halves, node).with_name("next").exists():
                    swap(folder_of(halves, node))
        real(*args, **what)

    monkeypatch.setattr(load_module, "read_tiles", late)
    found, targets = load_on_nodes(halves)
    assert [report.step for report in fine(found)] == [1, 1]
    assert [values(target) for target in targets] == [[1.0]] * 2


def test_folder_swapped_after_its_node_described_it(
    halves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = discover._select_save

    def late(*args: Any) -> bytes:
        swap(folder_of(halves, 1))
        return real(*args)

    monkeypatch.setattr(discover, "_select_save", late)
    found, targets = load_on_nodes(halves)
    same_error(
        found,
        uc.StorageError,
        r"rank 1: .*checkpoint-1: was replaced by another save while the ranks opened it, "
        r"expected save \w+",
    )
    assert [values(target) for target in targets] == [[-1.0]] * 2

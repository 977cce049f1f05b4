"""`manager_options`: Lightning's callbacks decide when to save; a signal stops and saves."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import unified_ckpt as uc
from tests.support.integrations.lightnings import OPTIONS, WARNINGS, Net, check_same, fit, trainer
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback
from unified_ckpt.integrations.lightning.run import LightningRun
from unified_ckpt.manager.events.file import read_events
from unified_ckpt.report.run_data import read_report

pytestmark = pytest.mark.filterwarnings(*WARNINGS)
EVERY = {"every_n_train_steps": 2, "save_top_k": -1}
RUN = uc.ManagerOptions(notice_seconds=0.001)


class At(pl.Callback):
    """Calls a function at a step."""

    def __init__(self, step: int, function: Callable[[], object]) -> None:
        self._step, self._function = step, function

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            self._function()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interval_steps": 3}, "ModelCheckpoint, which decides when to save"),
        ({"keep_latest": 3}, "ModelCheckpoint, which decides what to keep"),
        ({"load_full_state_path": "x"}, "ckpt_path"),
    ],
)
def test_contradiction_names_both(options: dict[str, Any], words: str) -> None:
    with pytest.raises(uc.CheckpointError, match=words) as caught:
        UnifiedCheckpointCallback(manager_options=uc.ManagerOptions(**options))
    assert f"ManagerOptions({[*options][-1]}=" in str(caught.value)


def test_two_words_for_background_saves_must_agree() -> None:
    with pytest.raises(uc.CheckpointError, match="async_save=True"):
        UnifiedCheckpointCallback(
            manager_options=uc.ManagerOptions(asynchronous=False), async_save=True
        )


def test_signal_stops_and_the_resume_is_bitwise(tmp_path: Path) -> None:
    straight = fit(tmp_path / "straight", checkpoints=EVERY)
    torch.manual_seed(0)
    ours = UnifiedCheckpointCallback(manager_options=RUN, save_options=OPTIONS)
    fitter = trainer(
        tmp_path / "run",
        native=True,
        checkpoints=EVERY,
        callbacks=[At(5, partial(os.kill, os.getpid(), signal.SIGTERM)), ours],
    )
    with pytest.raises(SystemExit):
        fitter.fit(Net())
    assert ours.checkpoints.should_stop
    assert fitter.global_step == 5
    check_same(fit(tmp_path / "run", ckpt_path="last", checkpoints=EVERY), straight)
    events = [(event.event, event.step) for event in read_events(str(tmp_path / "run"))]
    assert events == [("save", 2), ("save", 4), ("save", 5), ("stop", None)], (
        "events are those of the run with manager options"
    )
    report = read_report(str(tmp_path / "run"))
    assert sorted(row.step for row in report.rows if row.status == "kept") == [2, 4, 5, 6, 8]


def crash() -> None:
    raise ZeroDivisionError


LAST = {"every_n_train_steps": 4, "save_top_k": 1, "save_last": "link"}


def crashed(root: Path, step: int) -> UnifiedCheckpointCallback:
    """A run that crashes after a step. ModelCheckpoint saves step 4, the local directory 2, 5 and
    6: a validation follows step 4.
    """
    torch.manual_seed(0)
    fitter = trainer(
        root / "run",
        native=True,
        checkpoints=LAST,
        max_epochs=3,
        callbacks=[callback := tiered(root), At(step, crash)],
    )
    with pytest.raises(ZeroDivisionError):
        fitter.fit(Net())
    return callback


def tiered(root: Path) -> UnifiedCheckpointCallback:
    local = {
        "local_directory": str(root / "local"),
        "local_interval_steps": 2,
        "keep_latest_local": 2,
    }
    return UnifiedCheckpointCallback(
        manager_options=RUN.model_copy(update=local), save_options=OPTIONS
    )


def resume(root: Path) -> Net:
    return fit(
        root / "run",
        native=True,
        ckpt_path="last",
        checkpoints=LAST,
        max_epochs=3,
        callbacks=[tiered(root)],
    )


def local_names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "local").glob("checkpoint-*"))


@pytest.mark.parametrize("damage", ["none", "lost file", "wrong header"])
def test_resume_is_from_the_newer_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    straight = fit(tmp_path / "straight", checkpoints=LAST, max_epochs=3)
    crashed(tmp_path, 7)
    assert local_names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    assert os.readlink(tmp_path / "run" / "last.ckpt") == "step=4.ckpt"
    file = tmp_path / "local" / "checkpoint-6" / "model.safetensors"
    if damage == "lost file":
        file.unlink()
    elif damage == "wrong header":
        file.write_bytes(b"\0" * file.stat().st_size)
    resumed = resume(tmp_path)
    assert len(resumed.losses) == 12 - (6 if damage == "none" else 5)
    check_same(resumed, straight)
    assert "starts fresh" not in caplog.text


def test_newer_is_by_time_not_by_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crashed(tmp_path, 7)
    time.sleep(1.0 - time.time() % 1.0)  # manifests have whole seconds
    caplog.clear()
    shutil.rmtree(tmp_path / "run")
    again = trainer(
        tmp_path / "run",
        native=True,
        checkpoints=LAST,
        max_epochs=1,
        callbacks=[tiered(tmp_path)],
    )
    torch.manual_seed(0)
    again.fit(Net(), ckpt_path="last")
    assert "starts fresh beside" in caplog.text
    assert "checkpoint-6" in caplog.text
    assert "checkpoint-6" in local_names(tmp_path), "of the first run"
    last, step_4, local = (
        str(tmp_path / name) for name in ("run/last.ckpt", "run/step=4.ckpt", "local/checkpoint-99")
    )
    run = LightningRun(again, tiered(tmp_path)._options, records_events=True)
    with run.checkpoints:
        assert run.newest(last) == last
        uc.save(local, model=torch.nn.Linear(1, 1), step=99)
        assert run.newest(last) == local
        assert run.newest(step_4) == step_4, "a path that is not the last is meant as it is"


@pytest.mark.integration
def test_hooks_get_the_commits_of_every_run(tmp_path: Path) -> None:
    ours, reports = UnifiedCheckpointCallback(save_options=OPTIONS), list[uc.SaveReport]()
    ours.on_commit(reports.append)
    for register in (ours.on_commit, ours.on_failure):
        with pytest.raises(TypeError, match="hook: got int, expected a function"):
            register(1)  # type: ignore[arg-type, operator]
    for name in ("first", "second"):
        fitter = trainer(tmp_path / name, native=True, checkpoints=EVERY, callbacks=[ours])
        fitter.fit(Net())
    steps = list(range(2, fitter.global_step + 1, 2))
    assert [report.step for report in reports] == [*steps, *steps]
    assert all(report.blocked_seconds > 0 for report in reports)

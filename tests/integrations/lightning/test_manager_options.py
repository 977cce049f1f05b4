"""`manager_options`: Lightning's callbacks decide when to save; a signal stops and saves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import unified_ckpt as uc
from tests.support.lightnings import OPTIONS, Net, check_same, fit, trainer
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback

pytestmark = pytest.mark.filterwarnings(
    r"ignore::UserWarning:(pytorch_)?lightning\b",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore::DeprecationWarning:(pytorch_)?lightning",
)
EVERY = {"every_n_train_steps": 2, "save_top_k": -1}
RUN = uc.ManagerOptions(notice_seconds=0.001)


class SignalAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interval_steps": 3}, "ModelCheckpoint, which decides when to save"),
        ({"keep_latest": 3}, "ModelCheckpoint, which decides what to keep"),
        ({"load_full_state_path": "x"}, "ckpt_path"),
        ({"local_interval_steps": 1, "local_directory": "x"}, "folders of its callbacks"),
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
        tmp_path / "run", native=True, checkpoints=EVERY, callbacks=[SignalAt(5), ours]
    )
    with pytest.raises(SystemExit):
        fitter.fit(Net())
    assert ours.checkpoints.should_stop
    assert fitter.global_step == 5
    check_same(fit(tmp_path / "run", ckpt_path="last", checkpoints=EVERY), straight)


@pytest.mark.integration
def test_hooks_get_the_commits_of_every_run(tmp_path: Path) -> None:
    ours, reports = UnifiedCheckpointCallback(save_options=OPTIONS), list[uc.SaveReport]()
    ours.on_commit(reports.append)
    for name in ("first", "second"):
        fitter = trainer(tmp_path / name, native=True, checkpoints=EVERY, callbacks=[ours])
        fitter.fit(Net())
    steps = list(range(2, fitter.global_step + 1, 2))
    assert [report.step for report in reports] == [*steps, *steps]
    assert all(report.blocked_seconds > 0 for report in reports)

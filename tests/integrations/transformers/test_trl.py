"""TRL's trainers with the callback: their overrides are still called, and a resume equals the
uninterrupted run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from datasets import disable_progress_bars

import unified_ckpt as uc
from tests.support.integrations.trainers import StopAt, check_same
from tests.support.integrations.trls import KINDS, make
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
    ),
]


def ours() -> UnifiedCheckpointCallback:
    return UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False))


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    disable_progress_bars()
    straight = make(kind, tmp_path / "native", [])
    straight.train()
    make(kind, tmp_path / "run", [ours(), StopAt(2)]).train()
    assert (tmp_path / "run" / "README.md").is_file(), "what TRL does at a save"
    folder = tmp_path / "run" / "checkpoint-2"
    assert uc.verify(folder, deep=True).ok
    native_files = {*os.listdir(tmp_path / "native" / "checkpoint-2")} - {
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
    }
    assert native_files <= {*os.listdir(folder)}
    resumed = make(kind, tmp_path / "run", [ours()])
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)


def test_resume_between_generations_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GRPO trains on the same completions for several steps and does not save them."""
    for step, warns in ((2, False), (1, True)):
        arguments = {"steps_per_generation": 2, "save_steps": step}
        make("GRPO", tmp_path / str(step), [ours(), StopAt(step)], **arguments).train()
        resumed = make("GRPO", tmp_path / str(step), [ours(), StopAt(3)], **arguments)
        resumed.train(resume_from_checkpoint=True)
        assert ("completions are generated again" in caplog.text) == warns, step

"""The example of the guide, as a reader would run it: one process, then two that go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.launch import HERE, environment, torchrun

pytestmark = pytest.mark.slow
EXAMPLE = HERE.parents[2] / "docs" / "examples" / "hf_trainer.py"


@pytest.mark.parametrize("kind", [[], ["--lora"]], ids=["full", "lora"])
def test_one_process_then_two(tmp_path: Path, kind: list[str]) -> None:
    command = [sys.executable, str(EXAMPLE), "--output", str(tmp_path / "run"), *kind]
    ended = subprocess.run(
        [*command, "--steps", "10"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    torchrun(
        2, str(EXAMPLE), "--output", tmp_path / "run", "--steps", 30, *kind, timeout_seconds=180
    )
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == [
        "checkpoint-20",
        "checkpoint-30",
    ]
    assert uc.verify(tmp_path / "run" / "checkpoint-30", deep=True).ok
    with uc.open(tmp_path / "run" / "checkpoint-30") as source:
        assert source.extra["data"]["samples"] == 10 * 4 + 20 * 8
        assert ("model" in source.parts) == (not kind)
    log = json.loads((tmp_path / "run" / "checkpoint-30" / "trainer_state.json").read_text())[
        "log_history"
    ]
    assert [entry["step"] for entry in log] == [10, 20, 30]
    assert log[-1]["loss"] < log[0]["loss"]

"""The guide's example, run as a reader would: on one process, then continued on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.launch import run_example

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", [[], ["--lora"]], ids=["full", "lora"])
def test_one_process_then_two(tmp_path: Path, kind: list[str]) -> None:
    for world, steps in ((1, 10), (2, 30)):
        run_example("hf_trainer.py", world, "--output", tmp_path / "run", "--steps", steps, *kind)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
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

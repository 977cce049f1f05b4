"""PaddleFormers' pickled trainer state is read without its class, or is rejected."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import unified_ckpt as uc
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.foreign.paddle.trainer_state import read_trainer_state

STEP = Path(__file__).parents[2] / "fixtures" / "flex" / "trainer" / "single_unified"
MODULE = "paddleformers.trainer.trainer_callback"


@pytest.fixture
def trainer_state(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class that pickles name like PaddleFormers' own."""
    kind = type("TrainerState", (), {"__module__": MODULE})
    module = ModuleType(MODULE)
    module.TrainerState = kind  # type: ignore[attr-defined]
    for parent in ("paddleformers", "paddleformers.trainer"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return kind


def write(folder: Path, kind: type, fields: Any) -> None:
    state = kind()
    state.__dict__.update(fields)
    (folder / "trainer_state.bin").write_bytes(pickle.dumps(state, protocol=4))


def read(folder: Path) -> tuple[int | None, dict[str, Any], dict[str, Any]]:
    return read_trainer_state(str(folder), os.listdir(folder), {})


def test_fields_of_paddleformers_own_file() -> None:
    step, extra, options = read(STEP / "checkpoint-2")
    assert step == 2
    assert extra["scheduler"] == {"last_epoch": 2, "last_lr": 0.0}
    assert options == {"lr": 0.0}
    fields = extra["trainer_state"]
    assert (fields["global_step"], fields["consumed_samples"], fields["max_steps"]) == (2, 2, 2)
    assert fields["epoch"] == 1 / 32
    assert fields["log_history"] == []


def test_unknown_fields_and_numbers_of_numpy(tmp_path: Path, trainer_state: type) -> None:
    logs = [{"loss": np.float64(2.5), "step": np.int64(7)}]
    write(tmp_path, trainer_state, {"global_step": 7, "later": (1, "a"), "log_history": logs})
    step, extra, _ = read(tmp_path)
    expected = [{"loss": 2.5, "step": 7}]
    assert step == 7
    assert extra["trainer_state"] == {"global_step": 7, "later": (1, "a"), "log_history": expected}
    assert type(extra["trainer_state"]["log_history"][0]["loss"]) is float


def test_state_of_an_older_version_beside_it(tmp_path: Path, trainer_state: type) -> None:
    write(tmp_path, trainer_state, {"global_step": 7, "epoch": 2.0})
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 1.0}))
    assert read(tmp_path)[1]["trainer_state"]["epoch"] == 2.0
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 6}))
    with pytest.raises(FormatError, match=r"json has step 6, but trainer_state.bin 7; remove"):
        read(tmp_path)


HOSTILE = {
    "a command": b"cos\nsystem\n(S'touch mark'\ntR.",
    "a command among the fields": b"\x80\x04\x8c\x26paddleformers.trainer.trainer_callback"
    b"\x8c\x0cTrainerState\x93)\x81}\x8c\x01acos\nsystem\n(S'touch mark'\ntRsb.",
    "a class among the fields": b"\x80\x04\x8c\x26paddleformers.trainer.trainer_callback"
    b"\x8c\x0cTrainerState\x93)\x81}\x8c\x01a\x8c\x26paddleformers.trainer.trainer_callback"
    b"\x8c\x0cTrainerState\x93sb.",
    "a list of fields": b"\x80\x04\x8c\x26paddleformers.trainer.trainer_callback"
    b"\x8c\x0cTrainerState\x93)\x81]b.",
    "no fields": b"\x80\x04\x8c\x26paddleformers.trainer.trainer_callback"
    b"\x8c\x0cTrainerState\x93)\x81.",
    "another class": b"\x80\x04\x8c\x12paddleformers.evil\x8c\x0cTrainerState\x93)\x81}b.",
    "a number": pickle.dumps(3),
    "nothing": b"",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_content_names_the_file(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where their commands would create a file
    (tmp_path / "trainer_state.bin").write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointError, match=r"trainer_state.bin: "):
        read(tmp_path)
    assert os.listdir(tmp_path) == ["trainer_state.bin"]


@pytest.mark.parametrize("step", [-5, 2**80])
def test_step_that_no_manifest_can_store(tmp_path: Path, trainer_state: type, step: int) -> None:
    path = shutil.copytree(STEP / "checkpoint-2", tmp_path / "c", copy_function=shutil.copyfile)
    write(path, trainer_state, {"global_step": step})
    with pytest.raises(FormatError, match=f"(got|global_step) {step}"):
        uc.open(path)

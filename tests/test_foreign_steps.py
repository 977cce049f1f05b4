"""Steps that other engines have written into a run's folder: found in each engine's own naming, restored, listed, and never removed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from managing import put

from unified_ckpt.sources.steps import list_steps

# format -> the entry of step 8, and the files in it by which the format is known; none: it is a file
MARKS: dict[str, tuple[str, list[str]]] = {
    "trainer": ("checkpoint-{}", ["trainer_state.json", "optimizer.pt"]),
    "paddle": ("checkpoint-{}", ["model_state.pdparams"]),
    "accelerate": ("checkpoints/checkpoint_{}", ["optimizer.bin"]),
    "lightning": ("lightning_logs/version_1/checkpoints/epoch=1-step={}.ckpt", []),
    "lightning-sharded": ("epoch=1-step={}.ckpt", [".metadata", "meta.pt"]),
    "deepspeed": ("global_step{}", ["mp_rank_00_model_states.pt"]),
    "megatron": ("iter_{:0>7}", ["metadata.json", ".metadata"]),
    "orbax": ("checkpoints/{}", ["_CHECKPOINT_METADATA"]),
    "nanotron": ("{}", ["checkpoint_metadata.json"]),
    "dcp": ("step-{}", [".metadata"]),
}


def mark(root: Path, kind: str, step: int) -> Path:
    """An entry of which only the names are right."""
    name, files = MARKS[kind]
    path = root / name.format(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not files:
        path.touch()
    for file in files:
        path.mkdir(exist_ok=True)
        (path / file).touch()
    return path


@pytest.mark.parametrize("kind", MARKS)
def test_steps_are_listed_in_each_engines_naming(tmp_path: Path, kind: str) -> None:
    paths = {step: mark(tmp_path, kind, step) for step in (8, 10, 9)}
    found = list_steps(str(tmp_path))
    assert [(one.number, one.path, one.format) for one in found] == [(step, str(paths[step]), kind) for step in (8, 9, 10)]
    assert [str(tmp_path / one.name) for one in found] == [one.path for one in found]


@pytest.mark.parametrize(
    ("kind", "pointer", "text"),
    [
        ("deepspeed", "latest", "global_step8"),
        ("megatron", "latest_checkpointed_iteration.txt", "8\n"),
        ("nanotron", "latest.txt", "8"),
    ],
)
def test_steps_list_ends_with_what_a_pointer_names(tmp_path: Path, kind: str, pointer: str, text: str) -> None:
    for step in (7, 8, 9):
        mark(tmp_path, kind, step)
    (tmp_path / pointer).write_text(text)
    assert [(one.number, one.pointer) for one in list_steps(str(tmp_path))] == [(7, ""), (9, ""), (8, pointer)]
    shutil.rmtree(mark(tmp_path, kind, 8))
    assert [(one.number, one.format) for one in list_steps(str(tmp_path))] == [(7, kind), (9, kind), (8, "")]


def test_steps_list_takes_a_tag_that_latest_names(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "mp_rank_00_model_states.pt").touch()
    assert list_steps(str(tmp_path)) == []
    (tmp_path / "latest").write_text("best")
    assert [(one.name, one.number, one.format) for one in list_steps(str(tmp_path))] == [("best", None, "deepspeed")]


def test_steps_list_has_no_logs_configuration_or_weights(tmp_path: Path) -> None:
    for name in ("logs", "2024", "runs/8", "step-3", "checkpoint-9", ".unified-0123-checkpoint-7", "8.orbax-checkpoint-tmp-1", "version_0"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "latest.log", "2024/events.out", "step-3/sample.png", "latest"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "checkpoint-is-incomplete.txt").touch()
    assert list_steps(str(tmp_path)) == []
    assert list_steps(str(tmp_path / "none")) == []


def test_steps_list_has_ours_under_any_naming_and_what_is_broken(tmp_path: Path) -> None:
    put(tmp_path, 7)
    (tmp_path / "checkpoint-7").rename(tmp_path / "step-7")
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "rng_state.pth").touch()
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "__0_0.distcp").touch()
    assert [(one.name, one.format) for one in list_steps(str(tmp_path))] == [("step-7", "unified"), ("checkpoint-8", ""), ("9", "")]


def test_steps_are_listed_without_torch(tmp_path: Path) -> None:
    mark(tmp_path, "trainer", 8)
    code = f"import sys, json; from unified_ckpt.sources.steps import list_steps; found = list_steps({str(tmp_path)!r})"
    script = f"{code}; print(json.dumps([len(found), 'torch' in sys.modules]))"
    assert json.loads(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout) == [1, False]

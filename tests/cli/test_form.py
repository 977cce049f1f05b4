"""The command line on compressed checkpoints: forms, sizes, and comparisons of decoded values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.cli.command_line import run_verb
from tests.support.engine.compressed import QUICK, save_compressed, trained_state

SHAPES = {"w": (128, 256), "v": (64, 64)}
COUNT = 128 * 256 + 64 * 64
SIZES = {"lossless": 12.0, "O1": 6.09375, "O2": 5.34375}
FIRST = {"O1": "signed-sqrt-8", "O2": "signed-sqrt-6"}


@pytest.mark.parametrize("form", SIZES)
def test_inspect_and_list_show_form_and_size(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint-3"
    save_compressed(tmp_path / "c", form, trained_state(SHAPES) | {"step": 3})
    (tmp_path / "c").rename(folder)
    result = json.loads(run_verb(capsys, "inspect", folder, "--json"))
    assert result["compression"] == form
    assert 0 < result["nbytes_per_parameter"] - SIZES[form] < 0.15  # headers and exceptions
    master = result["parts"]["master_weights"]["tensors"]["w"]
    assert (master["dtype"], master["encoding"], master["nbytes"]) == ("F32", "masters-16", 65536)
    assert result["parts"]["model"]["tensors"]["w"]["encoding"] is None
    text = run_verb(capsys, "inspect", folder)
    assert f"  {form}, {result['nbytes_per_parameter']:.4g} B/param" in text
    assert "F32 [128, 256] as masters-16" in text
    assert (f"F32 [128, 256] as {FIRST.get(form)}" in text) == (form != "lossless")
    assert ".scale" not in text
    (run,) = json.loads(run_verb(capsys, "list", tmp_path, "--json"))["runs"]
    (step,) = run["steps"]
    assert step["compression"] == form
    assert step["nbytes_per_parameter"] == result["nbytes_per_parameter"]
    shown = run_verb(capsys, "list", tmp_path).splitlines()[2]
    assert f"  {form}  {step['nbytes_per_parameter']:.4g}  " in re.sub("   +", "  ", shown)


def test_parameters_are_those_of_the_model_or_of_masters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = trained_state(SHAPES)
    for number, parts in enumerate(
        [("model",), ("master_weights", "optimizer"), ("optimizer",), ("model", "optimizer")]
    ):
        chosen = {part: state[part] for part in parts}
        uc.save(tmp_path / f"{number}", **chosen, options=QUICK)  # type: ignore[arg-type]
        result = json.loads(run_verb(capsys, "inspect", tmp_path / f"{number}", "--json"))
        files = (tmp_path / f"{number}").glob("*.safetensors")
        nbytes = sum(file.stat().st_size for file in files if file.stem != "digests")
        assert result["compression"] == "none"
        expected = None if parts == ("optimizer",) else nbytes / COUNT
        assert result["nbytes_per_parameter"] == expected


def test_diff_compares_decoded_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = trained_state(SHAPES)
    save_compressed(tmp_path / "lossless", "lossless", state)
    save_compressed(tmp_path / "O1", "O1", state)
    plain = tmp_path / "lossless-plain"
    run_verb(capsys, "diff", plain, tmp_path / "lossless")
    text = run_verb(capsys, "diff", plain, tmp_path / "O1", code=1)
    different = {line.split()[0] for line in text.splitlines()[:-1]}
    assert different == {f"optimizer:{n}/{m}" for n in SHAPES for m in ("exp_avg", "exp_avg_sq")}
    assert "differ, by " in text
    uc.convert(tmp_path / "O1", tmp_path / "decoded", fsync=False)
    run_verb(capsys, "diff", tmp_path / "O1", tmp_path / "decoded")

"""Moments are quantized as PaddleNLP does: its own files, and its arithmetic in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import unified_ckpt as uc
from tests.support.foreign.paddles import FIXTURES, copied
from unified_ckpt.foreign.paddle.export import quantize as paddle_quantize

INDEX = "optimizer.safetensors.index.json"
Array = NDArray[Any]


def state(folder: Path) -> dict[str, Array]:
    """All tensors of the optimizer's files."""
    return {n: a for file in folder.glob("optimizer-*") for n, a in load_file(file).items()}


def exported(tmp_path: Path, stage: str, source: Path = FIXTURES / "single_bf16") -> Path:
    uc.convert(source, tmp_path / "theirs", to="paddle", compression=stage, fsync=False)
    return tmp_path / "theirs"


@pytest.mark.parametrize(("stage", "origin"), [("O1", "tp2_O1_rm"), ("O2", "single_O2")])
def test_quantized_state_equals_paddles_files(tmp_path: Path, stage: str, origin: str) -> None:
    """PaddleNLP wrote both folders after the same steps."""
    theirs, ours = (state(folder) for folder in (FIXTURES / origin, exported(tmp_path, stage)))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape), name
        assert ours[name].tobytes() == array.tobytes(), name
    index, expected = (
        json.loads((folder / INDEX).read_text())
        for folder in (tmp_path / "theirs", FIXTURES / origin)
    )
    assert index["metadata"] == expected["metadata"]
    assert index["weight_map"].keys() == expected["weight_map"].keys()
    assert (index["ckpt_quant_stage"], index["quant_ckpt_resume_times"]) == (stage, 0)


def expected_o1(m: Array, v: Array) -> dict[str, Array]:
    """The reference's formulas, on whole tensors."""
    scales = np.abs(m).max(0)
    scales = np.where(scales == 0, np.float32(1e-8), scales)
    ratio = np.float32(1) / (np.sqrt(v) + np.float32(1e-8))
    low, high = ratio.min(0), ratio.max(0)
    with np.errstate(all="ignore"):
        codes = np.round((ratio - low) / (high - low) * np.float32(255))
    return {
        "moment1_0": np.round(m / scales * np.float32(127)).astype(np.int8),
        "moment1_0@scales": scales,
        "moment2_0": np.nan_to_num(codes).astype(np.uint8),
        "moment2_0@min_scales": low,
        "moment2_0@max_scales": high,
    }


def expected_o2(m: Array, v: Array) -> dict[str, Array]:
    if m.ndim == 1:
        return {"moment1_0": m, "moment2_0": v}
    ratio = np.float32(1) / (np.sqrt(v) + np.float32(1e-8))
    groups = [a.reshape(-1, 32, a.shape[1]) for a in (m, ratio)]
    scales, low, high = np.abs(groups[0]).max(1), groups[1].min(1), groups[1].max(1)
    with np.errstate(all="ignore"):
        first = np.nan_to_num(np.round(groups[0] / scales[:, None] * np.float32(7)))
        second = (groups[1] - low[:, None]) / (high - low)[:, None] * np.float32(15)
    packed = first.astype(int) * 16 + np.nan_to_num(np.round(second)).astype(int)
    return {
        "moment1_0@scales": scales,
        "moment2_0": packed.astype(np.int8).reshape(m.shape),
        "moment2_0@min_scales": low,
        "moment2_0@max_scales": high,
    }


@pytest.mark.parametrize("max_file_bytes", [20_000, 1 << 30])
@pytest.mark.parametrize("stage", ["O1", "O2"])
def test_quantized_state_is_the_references_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, max_file_bytes: int
) -> None:
    """Wide ranges, zeros and constant columns, in chunks and several files."""
    monkeypatch.setattr(paddle_quantize, "_CHUNK_ELEMENTS", 1024)
    plain = exported(tmp_path, "none")
    rng = np.random.default_rng(0)
    file = next(plain.glob("optimizer-*"))
    tensors = load_file(file)
    for name, array in tensors.items():
        if "moment" in name:
            values = rng.normal(size=array.shape) * 10.0 ** rng.uniform(-9, 0, array.shape)
            values[..., :3] = [0.0, 1e-3, 1e-3] if array.ndim > 1 else 0.0
            tensors[name] = (values**2 if "moment2" in name else values).astype(np.float32)
    save_file(tensors, file, metadata={"format": "np"})
    options = {"to": "paddle", "compression": stage, "max_file_bytes": max_file_bytes}
    uc.convert(plain, tmp_path / "q", **options, fsync=False)
    expected = {name: array for name, array in tensors.items() if "moment" not in name}
    for owner in {name.partition("/")[0] for name in tensors}:
        moments = (tensors[f"{owner}/{state}"] for state in ("moment1_0", "moment2_0"))
        pieces = {"O1": expected_o1, "O2": expected_o2}[stage](*moments)
        expected |= {f"{owner}/{name}": array for name, array in pieces.items()}
    ours = state(tmp_path / "q")
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        assert ours[name].shape == array.shape, name
        assert ours[name].tobytes() == array.tobytes(), name
    assert (len(list((tmp_path / "q").glob("optimizer-*"))) > 1) == (max_file_bytes < 1 << 30)
    with uc.open(plain) as before, uc.open(tmp_path / "q") as after:
        for name in before["optimizer"]:
            if name.endswith("/exp_avg"):
                values, original = (s["optimizer"][name][...] for s in (after, before))
                assert (values - original).abs().max() <= original.abs().max() / 13, name


@pytest.mark.parametrize("compression", ["lossless", "O3"])
def test_other_compressions_are_refused(tmp_path: Path, compression: str) -> None:
    with pytest.raises((uc.FormatError, ValueError)):
        exported(tmp_path, compression)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_moments_that_cannot_be_quantized_are_refused(tmp_path: Path, value: float) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    file = next(folder.glob("optimizer-*"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight/moment2_0"))
    tensors[name][3, 4] = value
    save_file(tensors, file, metadata={"format": "np"})
    with pytest.raises(uc.FormatError, match=rf"{name}: got infinite, NaN or negative"):
        exported(tmp_path, "O1", folder)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("stage", "shape"), [("O1", (2, 32, 4)), ("O2", (33, 4)), ("O2", (2, 32, 4))]
)
def test_shapes_that_paddle_cannot_quantize_are_refused(stage: Any, shape: tuple[int, ...]) -> None:
    first, second = (
        paddle_quantize.Moment(name, shape, name == "m2", lambda *_: np.ones(0, np.float32))
        for name in ("m1", "m2")
    )
    with pytest.raises(uc.FormatError, match=rf"got shape \[{shape[0]}.*for {stage}"):
        paddle_quantize.quantize(stage, first, second)

"""nanotron folders in the documented format: merged over ranks, refused if damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.support.foreign.nanotrons import QKV, write


def test_conversion_compares_both_weights(tmp_path: Path) -> None:
    expected = write(tmp_path, dp=2, zero=True)
    report = uc.convert(tmp_path, tmp_path / "ours")
    assert (report.compared, report.tensors) == (
        5,
        {"model": 5, "master_weights": 5, "optimizer": 15},
    )
    with uc.open(tmp_path / "ours") as source:
        assert all(
            torch.equal(view[...], expected[f"{part}:{name}"])
            for part in source.parts
            for name, view in source[part].items()
        )
    path = next(tmp_path.glob("20/optimizer/*pp-0*dp-1*tp-1*"))
    state = torch.load(path)
    state["gradient_accumulator"][QKV][2] += 1
    torch.save(state, path)
    with pytest.raises(uc.IntegrityError, match=r"qkv_proj"):
        uc.convert(tmp_path, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def remove(pattern: str) -> Callable[[Path], object]:
    return lambda root: os.remove(max(root.glob(pattern)))


def shorten(root: Path) -> None:
    path = next(root.glob("20/optimizer/*pp-0*dp-0*tp-1*"))
    content = torch.load(path)
    content["state"][0]["exp_avg"] = content["state"][0]["exp_avg"][:-1].clone()
    torch.save(content, path)


def relabel(root: Path, pairs: str) -> None:
    path = next(root.glob("20/model/**/qkv_proj/*tp-rank-1*"))
    save_file(
        load_file(path),
        path,
        metadata={"local_global_slices_pairs": pairs, "unsharded_shape": "(8, 6)"},
    )


def swap(pattern: str) -> Callable[[Path], object]:
    """Swap the files of two tensor-parallel ranks."""

    def act(root: Path) -> None:
        first, second = sorted(root.glob(pattern))
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

    return act


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part of a tensor": (
        remove("20/model/**/qkv_proj/*tp-rank-1*"),
        r"qkv_proj.weight: no shard has box(.|\n)*tp-rank-0-of-2",
    ),
    "a tensor": (
        remove("20/model/**/input_layernorm/*"),
        r"model files are missing for parameters(.|\n)*input_layernorm",
    ),
    "a rank's state": (
        remove("20/optimizer/*pp-1*dp-1*tp-0*"),
        r"files of \(pp, dp, tp, exp\) are missing(.|\n)*\(1, 1, 0, 0\)",
    ),
    "the metadata": (
        remove("20/checkpoint_metadata.json"),
        r"checkpoint_metadata.json: is missing",
    ),
    "the step": (
        lambda root: shutil.rmtree(root / "20"),
        r"latest.txt: names step 20, but .*/20 does not exist",
    ),
    "latest": (
        lambda root: (root / "latest.txt").write_text("x\n"),
        r"latest.txt: got 'x', expected a step number",
    ),
    "short state": (shorten, r"got \d+ elements in its files, expected"),
    "slices": (
        lambda root: relabel(root, "0,9,None|None,None,None#0,9,None|None,None,None"),
        r"has box|got slices|overlap|nothing holds",
    ),
    "no slices": (lambda root: relabel(root, "x"), r"expected valid slices in its header"),
    "swapped state": (
        swap("20/optimizer/*pp-0*dp-0*"),
        r"tp-0-of-2_exp-0-of-1.pt: was written as optimizer_\S*tp-1-of-2",
    ),
    "swapped parts": (
        swap("20/model/**/qkv_proj/*"),
        r"tp-rank-1\S*: got elements out of order with \S*tp-rank-0\S*: files were swapped",
    ),
    "strides": (
        lambda root: relabel(root, "0,4,2|None,None,None#0,4,2|None,None,None"),
        r"expected valid slices in its header",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_missing_and_damaged_files_are_named(tmp_path: Path, case: str) -> None:
    write(tmp_path, dp=2, zero=True)
    damage, match = DAMAGE[case]
    damage(tmp_path)
    with pytest.raises(uc.CheckpointError, match=match):
        uc.open(tmp_path)

"""nanotron folders, written by the documented format: merged over ranks, refused if damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.support.nanotrons import LAYERS, QKV, write
from unified_ckpt.cli.main import main


@pytest.mark.parametrize(("dp", "zero"), [(1, False), (2, True), (3, True), (12, True)])
def test_every_tensor_matches_all_ranks(tmp_path: Path, dp: int, zero: bool) -> None:
    """Ranks are ordered by number: by name, 10 would come before 2."""
    expected = write(tmp_path, dp=dp, zero=zero)
    with uc.open(tmp_path) as source:
        assert (source.format, source.step) == ("nanotron", 20)
        tensors = {
            f"{part}:{name}": view[...]
            for part in source.parts
            for name, view in source[part].items()
        }
        assert tensors.keys() == expected.keys()
        assert [
            name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)
        ] == []
        (group,) = source.source.metadata().groups
        assert sorted(group["names"]) == sorted(LAYERS)
        assert group["options"] == {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01}
        assert source.extra["lr_scheduler"] == {"last_epoch": 20}
    with uc.open(tmp_path / "20") as source:
        assert torch.equal(source["model"][QKV][3:7, 1:3], expected[f"model:{QKV}"][3:7, 1:3])


def test_load_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = write(tmp_path, dp=2, zero=True)
    model = {
        name: torch.zeros(shape, dtype=torch.bfloat16) for name, (shape, _, _) in LAYERS.items()
    }
    masters = {name: torch.zeros(shape) for name, (shape, _, _) in LAYERS.items()}
    report = uc.load(tmp_path, model=model, master_weights=masters)
    assert report.step == 20
    assert all(torch.equal(masters[name], expected[f"master_weights:{name}"]) for name in LAYERS)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "nanotron" in capsys.readouterr().out


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
        r"20: does not exist, but latest.txt names it",
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
    "no slices": (lambda root: relabel(root, "x"), r"no valid slices in its header"),
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
        r"no valid slices in its header",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_missing_and_damaged_files_are_named(tmp_path: Path, what: str) -> None:
    write(tmp_path, dp=2, zero=True)
    damage, match = DAMAGE[what]
    damage(tmp_path)
    with pytest.raises(uc.CheckpointError, match=match):
        uc.open(tmp_path)


class Runs:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("pattern", ["optimizer/*pp-1*tp-1*", "lr_scheduler/*"])
def test_hostile_pickles_are_refused_and_not_executed(tmp_path: Path, pattern: str) -> None:
    write(tmp_path)
    torch.save(
        {"state": {0: Runs(tmp_path / "mark")}, "names": {}}, next((tmp_path / "20").glob(pattern))
    )
    with pytest.raises(uc.FormatError, match=r"posix\.system"):
        uc.open(tmp_path)
    assert not (tmp_path / "mark").exists()

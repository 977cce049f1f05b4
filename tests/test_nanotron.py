"""nanotron's folders, written here from what is known of the format: merged over all ranks, and refused where parts are missing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from unified_ckpt.cli.main import main

TP, PP = 2, 2
QKV = "model.decoder.0.pp_block.attn.qkv_proj.weight"
# name -> shape, the pipeline stage, and how ranks cut it: None not at all, a dim, or "qkv": q, k and v each over dim 0
LAYERS: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": ((10, 6), 0, 0),
    QKV: ((8, 6), 0, "qkv"),
    "model.decoder.0.pp_block.attn.o_proj.weight": ((6, 4), 0, 1),
    "model.decoder.1.pp_block.input_layernorm.weight": ((7,), 1, None),
    "model.lm_head.pp_block.bias": ((10,), 1, 0),
}


def cuts(shape: tuple[int, ...], how: Any, rank: int) -> list[tuple[list[slice], list[slice]]]:
    """(local, global) slices of a rank."""
    if how == "qkv":  # q has 4 rows, k and v have 2
        half, found, local = [2, 1, 1], [], 0
        for first, count in zip((0, 4, 6), half, strict=True):
            at = first + rank * count
            found.append(
                ([slice(local, local + count), slice(None)], [slice(at, at + count), slice(None)])
            )
            local += count
        return found
    whole = [slice(0, size) for size in shape]
    part, size = list(whole), shape[how] // TP
    part[how] = slice(rank * size, (rank + 1) * size)
    return [([slice(0, s.stop - s.start) for s in part], part)]


def local_of(tensor: torch.Tensor, how: Any, rank: int) -> torch.Tensor:
    if how is None:
        return tensor
    pieces = [tensor[tuple(of)] for _, of in cuts(tuple(tensor.shape), how, rank)]
    return torch.cat(pieces, 0).contiguous()


def text(slices: list[slice]) -> str:
    return "|".join(f"{one.start},{one.stop},{one.step}" for one in slices)


def write(root: Path, *, dp: int = 1, zero: bool = False) -> dict[str, torch.Tensor]:
    """A step's folder, and all that is in it by part:name."""
    torch.manual_seed(0)
    step, told = root / "20", {}
    for name, (shape, _, _) in LAYERS.items():
        told[f"master_weights:{name}"] = torch.randn(shape)
        told[f"model:{name}"] = told[f"master_weights:{name}"].to(torch.bfloat16)
        for key in ("exp_avg", "exp_avg_sq"):
            told[f"optimizer:{name}/{key}"] = torch.randn(shape)
        told[f"optimizer:{name}/step"] = torch.tensor(20.0)
    for name, (shape, stage, how) in LAYERS.items():
        *path, last = name.split(".")
        folder = step.joinpath("model", *path)
        folder.mkdir(parents=True, exist_ok=True)
        if how is None:
            save_file({"data": told[f"model:{name}"]}, folder / f"model_{last}.safetensors")
            continue
        for rank in range(TP):
            pairs = ";".join(f"{text(local)}#{text(of)}" for local, of in cuts(shape, how, rank))
            metadata = {
                "version": "1.4",
                "local_global_slices_pairs": pairs,
                "unsharded_shape": str(shape),
            }
            file = (
                folder / f"model_{last}_pp-rank-{stage}-of-{PP}_tp-rank-{rank}-of-{TP}.safetensors"
            )
            save_file({"data": local_of(told[f"model:{name}"], how, rank)}, file, metadata=metadata)
    (step / "optimizer").mkdir()
    for stage in range(PP):
        for rank in range(TP):
            for replica in range(dp if zero else 1):
                file = f"optimizer_pp-{stage}-of-{PP}{f'_dp-{replica}-of-{dp}' if zero else ''}_tp-{rank}-of-{TP}_exp-0-of-1.pt"
                torch.save(
                    of_rank(told, stage, rank, replica, dp if zero else 0),
                    step / "optimizer" / file,
                )
    (step / "optimizer" / "optimizer_config.json").write_text(
        json.dumps({"type": "x", "configs": {}})
    )
    (step / "lr_scheduler").mkdir()
    torch.save({"last_epoch": 20}, step / "lr_scheduler" / "lr_scheduler.pt")
    meta = {
        "version": "1.4",
        "tp": TP,
        "dp": dp,
        "metas": {"last_train_step": 20, "consumed_train_samples": 160},
    }
    (step / "checkpoint_metadata.json").write_text(json.dumps(meta))
    (root / "latest.txt").write_text("20")
    return told


def of_rank(
    told: dict[str, torch.Tensor], stage: int, rank: int, replica: int, dp: int
) -> dict[str, Any]:
    """`dp`: ranks that share the state, 0 for none."""

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return (
            torch.from_numpy(np.array_split(tensor.flatten().numpy(), dp)[replica].copy())
            if dp
            else tensor.clone()
        )

    state, names, masters = {}, {}, {}
    for index, name in enumerate(name for name, (_, of, _) in LAYERS.items() if of == stage):
        how = LAYERS[name][2]
        if dp and not share(local_of(told[f"master_weights:{name}"], how, rank)).numel():
            continue  # too few elements for all
        state[index] = {
            key: share(local_of(told[f"optimizer:{name}/{key}"], how, rank))
            for key in ("exp_avg", "exp_avg_sq")
        }
        state[index]["step"] = told[f"optimizer:{name}/step"].clone()
        names[index] = name
        masters[name] = share(local_of(told[f"master_weights:{name}"], how, rank))
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01, "params": list(names)}]
    return {"state": state, "param_groups": groups, "names": names, "gradient_accumulator": masters}


@pytest.mark.parametrize(("dp", "zero"), [(1, False), (2, True), (3, True), (12, True)])
def test_every_tensor_is_what_all_ranks_had(tmp_path: Path, dp: int, zero: bool) -> None:
    """Ranks in the order of their numbers: by name, 10 comes before 2."""
    told = write(tmp_path, dp=dp, zero=zero)
    with uc.open(tmp_path) as source:
        assert (source.format, source.step) == ("nanotron", 20)
        found = {
            f"{part}:{name}": view[...]
            for part in source.parts
            for name, view in source[part].items()
        }
        assert found.keys() == told.keys()
        assert [name for name, tensor in told.items() if not torch.equal(found[name], tensor)] == []
        (group,) = source.source.said().groups
        assert sorted(group["names"]) == sorted(LAYERS)
        assert group["options"] == {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01}
        assert source.extra["lr_scheduler"] == {"last_epoch": 20}
    with uc.open(tmp_path / "20") as source:
        assert torch.equal(source["model"][QKV][3:7, 1:3], told[f"model:{QKV}"][3:7, 1:3])


def test_it_fills_a_job_and_is_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = write(tmp_path, dp=2, zero=True)
    model = {
        name: torch.zeros(shape, dtype=torch.bfloat16) for name, (shape, _, _) in LAYERS.items()
    }
    masters = {name: torch.zeros(shape) for name, (shape, _, _) in LAYERS.items()}
    report = uc.load(tmp_path, model=model, master_weights=masters)
    assert report.step == 20
    assert all(torch.equal(masters[name], told[f"master_weights:{name}"]) for name in LAYERS)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "nanotron" in capsys.readouterr().out


def test_converted_with_its_two_copies_of_the_weights_compared(tmp_path: Path) -> None:
    told = write(tmp_path, dp=2, zero=True)
    report = uc.convert(tmp_path, tmp_path / "ours")
    assert (report.compared, report.tensors) == (
        5,
        {"model": 5, "master_weights": 5, "optimizer": 15},
    )
    with uc.open(tmp_path / "ours") as source:
        assert all(
            torch.equal(view[...], told[f"{part}:{name}"])
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
    told = torch.load(path)
    told["state"][0]["exp_avg"] = told["state"][0]["exp_avg"][:-1].clone()
    torch.save(told, path)


def relabel(root: Path, pairs: str) -> None:
    path = next(root.glob("20/model/**/qkv_proj/*tp-rank-1*"))
    save_file(
        load_file(path),
        path,
        metadata={"local_global_slices_pairs": pairs, "unsharded_shape": "(8, 6)"},
    )


def swap(pattern: str) -> Callable[[Path], object]:
    """The files of two tensor-parallel ranks change places."""

    def act(root: Path) -> None:
        one, other = sorted(root.glob(pattern))
        held = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(held)

    return act


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part of a tensor": (
        remove("20/model/**/qkv_proj/*tp-rank-1*"),
        r"qkv_proj.weight: nothing holds box(.|\n)*tp-rank-0-of-2",
    ),
    "a tensor": (
        remove("20/model/**/input_layernorm/*"),
        r"that the model has no file of(.|\n)*input_layernorm",
    ),
    "a rank's state": (
        remove("20/optimizer/*pp-1*dp-1*tp-0*"),
        r"files are missing, of ranks(.|\n)*\(1, 1, 0, 0\)",
    ),
    "the metadata": (
        remove("20/checkpoint_metadata.json"),
        r"checkpoint_metadata.json: is missing",
    ),
    "the step": (
        lambda root: shutil.rmtree(root / "20"),
        r"20: is not there, and latest.txt names it",
    ),
    "latest": (
        lambda root: (root / "latest.txt").write_text("x\n"),
        r"latest.txt: holds 'x'; needed the number",
    ),
    "short state": (shorten, r"its files have \d+ elements; needed"),
    "slices": (
        lambda root: relabel(root, "0,9,None|None,None,None#0,9,None|None,None,None"),
        r"has box|do not fit|overlap|nothing holds",
    ),
    "no slices": (lambda root: relabel(root, "x"), r"does not say which part"),
    "swapped state": (
        swap("20/optimizer/*pp-0*dp-0*"),
        r"tp-0-of-2_exp-0-of-1.pt: was written as optimizer_\S*tp-1-of-2",
    ),
    "swapped parts": (
        swap("20/model/**/qkv_proj/*"),
        r"tp-rank-1\S*: has elements before those of \S*tp-rank-0\S*: files were swapped",
    ),
    "strides": (
        lambda root: relabel(root, "0,4,2|None,None,None#0,4,2|None,None,None"),
        r"does not say which part",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_missing_or_damaged_is_named(tmp_path: Path, what: str) -> None:
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
def test_hostile_pickles_are_refused_by_name_and_not_run(tmp_path: Path, pattern: str) -> None:
    write(tmp_path)
    torch.save(
        {"state": {0: Runs(tmp_path / "mark")}, "names": {}}, next((tmp_path / "20").glob(pattern))
    )
    with pytest.raises(uc.FormatError, match=r"posix\.system"):
        uc.open(tmp_path)
    assert not (tmp_path / "mark").exists()

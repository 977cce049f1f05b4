"""Today's Unified Checkpoints of PaddleFormers are read by the layout of each file, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.foreign.paddle_files import changed
from tests.support.foreign.paddleformers import (
    EMBEDDING,
    copied,
    expected_tensors,
    llama,
    shard_optimizer,
)
from tests.support.foreign.paddles import FIXTURES as PADDLENLP
from tests.support.harness import run_ranks
from tests.support.manager.managers import manager_of
from unified_ckpt.runtime.comm.comm import Comm

RUNS = ("single_unified", "single_unified_nohf", "single_tied_unified")
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize("run", RUNS)
def test_each_file_has_its_own_layout(tmp_path: Path, run: str) -> None:
    """Square weights too, which no shape would show."""
    expected = expected_tensors(run, tied="tied" in run)
    with uc.open(copied(run, tmp_path / "c")) as source:
        for (part, name), tensor in expected.items():
            assert same(source[part][name][...], tensor), (part, name)
        box = (slice(3, 9), slice(2, 15))
        assert same(source["model"][GATE][box], expected["model", GATE][box])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("run", [*RUNS[1:], "single_flex", "sharding2_flex"])
def test_run_resumes_and_saves_unified_steps(tmp_path: Path, run: str, ranks: int) -> None:
    tied = "tied" in run
    folder = copied(run, tmp_path / "checkpoint-2")
    expected = expected_tensors(run, tied=tied)
    before = sorted(path.name for path in folder.iterdir())

    def resume(comm: Comm) -> None:
        model = llama(tied=tied)
        optimizer = torch.optim.AdamW(model.parameters())
        with manager_of(comm, tmp_path) as manager:
            report = manager.restore(model=model, optimizer=optimizer)
            assert report is not None
            assert report.step == 2
            for name, parameter in model.named_parameters():
                moments = optimizer.state[parameter]["exp_avg"]
                assert same(moments, expected["optimizer", f"{name}/exp_avg"])
                assert same(parameter.detach(), expected["master_weights", name])
            manager.save(3, force=True, model=model, optimizer=optimizer)

    run_ranks(ranks, resume)
    assert sorted(path.name for path in folder.iterdir()) == before
    with uc.open(tmp_path / "checkpoint-3") as source:
        for (part, name), tensor in expected.items():
            if part == "optimizer":
                assert same(source[part][name][...], tensor)


def test_step_without_optimizer_is_skipped(tmp_path: Path) -> None:
    """An interrupted save leaves the model and the trainer's state, which come first."""
    copied("single_flex", tmp_path / "checkpoint-1")
    newer = copied("single_flex", tmp_path / "checkpoint-2")
    for name in ("optimizer_state", "master_weight"):
        shutil.rmtree(newer / name)
    (newer / "saved_signal_0").unlink()
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(model=model, optimizer=optimizer) is not None
    assert len(optimizer.state) == len(list(model.parameters()))


# ---- a sharded optimizer


@pytest.mark.parametrize("run", ["single_unified", "single_tied_unified"])
def test_sharded_optimizer_is_refused_but_the_model_loads(tmp_path: Path, run: str) -> None:
    folder, tied = copied(run, tmp_path / "checkpoint-2"), "tied" in run
    copied(run, tmp_path / "checkpoint-1")
    shard_optimizer(folder)
    expected = expected_tensors(run, tied=tied)
    model = llama(tied=tied)
    report = uc.load(folder, model=model, options=uc.LoadOptions(parts=("model",), cast=True))
    assert report.step == 2
    for name, parameter in model.named_parameters():
        assert same(parameter.detach().bfloat16(), expected["model", name])
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(uc.FormatError, match=r"optimizer: is sharded by PaddleFormers.*flex"):
        uc.load(folder, model=model, optimizer=optimizer)
    with pytest.raises(uc.FormatError, match=r"is sharded by PaddleFormers"):
        uc.convert(folder, tmp_path / "whole")
    with manager_of(None, tmp_path) as manager:  # loads the older step
        assert manager.restore(model=model, optimizer=optimizer) is not None
    assert len(optimizer.state) == len(list(model.parameters()))
    converted = uc.convert(folder, tmp_path / "model", parts=("model",))
    assert "master_weights" in converted.left_out
    with uc.open(tmp_path / "model") as source:
        assert source.parts == ("model",)
        assert same(source["model"][EMBEDDING][...], expected["model", EMBEDDING])


# ---- what is rejected


def rewrite(folder: Path, stem: str, change: Callable[[dict[str, Any]], object], kind: str) -> None:
    """Rewrite a part's only file and its index."""
    path = folder / f"{stem}-00001-of-00001.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": kind})
    index_path = folder / f"{stem}.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"] = dict.fromkeys(tensors, path.name)
    index_path.write_text(json.dumps(index))


def test_fused_layers_are_not_transposed(tmp_path: Path) -> None:
    """They are on no list of PaddleFormers, so a file of format "pt" has them as [in, out]."""
    folder, expected = copied("single_unified", tmp_path / "c"), expected_tensors("single_unified")

    def fuse(tensors: dict[str, torch.Tensor], *, weights: bool) -> None:
        for layer in (0, 1):
            prefix = f"model.layers.{layer}.mlp"
            for suffix in ("",) if weights else ("/moment1_0", "/moment2_0"):
                halves = [tensors.pop(f"{prefix}.{n}_proj.weight{suffix}") for n in ("gate", "up")]
                if weights and halves[0].dtype == torch.bfloat16:
                    halves = [half.T for half in halves]
                tensors[f"{prefix}.up_gate_proj.weight{suffix}"] = torch.cat(halves, 1)
            for suffix in () if weights else ("/beta1_pow_acc_0", "/beta2_pow_acc_0"):
                tensors[f"{prefix}.up_gate_proj.weight{suffix}"] = tensors.pop(
                    f"{prefix}.gate_proj.weight{suffix}"
                )
                del tensors[f"{prefix}.up_proj.weight{suffix}"]

    rewrite(folder, "model", lambda tensors: fuse(tensors, weights=True), "pt")
    rewrite(folder, "master_weights", lambda tensors: fuse(tensors, weights=True), "np")
    rewrite(folder, "optimizer", lambda tensors: fuse(tensors, weights=False), "np")
    with uc.open(folder) as source:
        for (part, name), tensor in expected.items():
            assert same(source[part][name][...], tensor), (part, name)


def test_adapters_are_not_transposed(tmp_path: Path) -> None:
    """PaddleFormers leaves LoRA as it is in a file of format "pt"."""
    folder = Path(shutil.copytree(PADDLENLP / "lora_tp2", tmp_path / "c"))
    for path in folder.glob("optimizer*"):
        path.unlink()
    with uc.open(PADDLENLP / "lora_tp2") as source:
        expected = {name: view[...] for name, view in source["model"].items()}
    for path in folder.glob("peft_model-*.safetensors"):
        save_file(load_file(path), path, {"format": "pt"})
    changed(folder, "config.json", paddleformers_version="1.2.0")
    with uc.open(folder) as source:
        assert all(same(source["model"][name][...], tensor) for name, tensor in expected.items())


def test_early_llama_is_not_transposed(tmp_path: Path) -> None:
    """Before 1.0 its class had no list, and files of format "pt" had Paddle's layout."""
    fixture = PADDLENLP / "single_bf16"
    folder = Path(shutil.copytree(fixture, tmp_path / "c"))
    (path,) = folder.glob("model-*.safetensors")
    tensors = {name: tensor.view(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    changed(folder, "config.json", paddleformers_version="0.4.1")
    with uc.open(fixture) as expected, uc.open(folder) as source:
        assert set(source["model"]) == set(expected["model"])
        for name, view in expected["model"].items():
            assert same(source["model"][name][...], view[...]), name


REJECTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another model": (
        lambda folder: changed(folder, "config.json", model_type="ernie_next"),
        r"got format 'pt' of a model of type 'ernie_next', so its layout is unknown",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"got format 'pt' of a model of type None",
    ),
    "an optimizer in torch's layout": (
        lambda folder: rewrite(folder, "optimizer", lambda _: None, "pt"),
        r"optimizer-00001-of-00001.safetensors: got optimizer state of format 'pt'",
    ),
    "weights of the other layout": (
        lambda folder: rewrite(folder, "model", lambda _: None, "np"),
        r"got master_weights of shape \(\d+, \d+\) .*, expected the parameter's shape",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_unknown_layouts_are_rejected(tmp_path: Path, case: str) -> None:
    damage, text = REJECTED[case]
    folder = copied("single_unified", tmp_path / "c")
    damage(folder)
    with pytest.raises(uc.CheckpointError, match=text), uc.open(folder) as source:
        assert source

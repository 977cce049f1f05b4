"""The public calls in one process: what goes into a folder, what comes out, and who may be in the
way.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import CosineAnnealingLR

import unified_ckpt as uc
from unified_ckpt.engine.save import save as save_module
from unified_ckpt.manager.option_aliases import from_paddle
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.testing import make_checkpointer, run_ranks


class Net(nn.Module):
    """An embedding, a block, a head (tied on demand), a persistent buffer and a transient one."""

    def __init__(self, *, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(30, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(seed))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.block(self.embed(tokens)))
        return found


def same_state(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def manifest(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "unified_checkpoint.json").read_text())
    return found


def stored(folder: Path, part: str = "model") -> dict[str, torch.Tensor]:
    """Every tensor of a part, by the safetensors library."""
    weight_map = json.loads((folder / f"{part}.safetensors.index.json").read_text())["weight_map"]
    return {
        name: t
        for file in sorted(set(weight_map.values()))
        for name, t in load_file(folder / file).items()
    }


# one folder


def test_module_round_trip(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    report = uc.save(tmp_path / "c", model=model, step=7)
    assert (report.path, report.step) == (str(tmp_path / "c"), 7)
    assert report.nbytes == sum(t.nbytes for t in model.state_dict().values())
    assert report.id == manifest(tmp_path / "c")["save_id"]
    memory = {name: t.data_ptr() for name, t in other.state_dict().items()}
    back = uc.load(tmp_path / "c", model=other)
    assert same_state(model, other)
    assert {name: t.data_ptr() for name, t in other.state_dict().items()} == memory, (
        "filled in place"
    )
    assert (back.step, back.extra, back.rank_extra, back.missing, back.unexpected, back.wrong) == (
        7,
        None,
        None,
        (),
        (),
        (),
    )
    assert back.bytes_read == back.verified_bytes == report.nbytes
    assert back.sources == {"model": ("model",)}


def test_folder_follows_the_format(tmp_path: Path) -> None:
    model = Net()
    uc.save(
        tmp_path / "c",
        model=model,
        optimizer={"embed.weight/exp_avg": torch.ones(30, 8)},
        extra={"a": 1},
        rank_extra=[2],
    )
    names = {
        "model.safetensors",
        "model.safetensors.index.json",
        "optimizer.safetensors",
        "optimizer.safetensors.index.json",
    }
    assert {path.name for path in (tmp_path / "c").iterdir()} == names | {
        "digests.safetensors",
        "rank_extra.safetensors",
        "unified_checkpoint.json",
    }
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in model.state_dict().values())}
    assert set(index["weight_map"]) == set(model.state_dict())
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]


def test_files_equal_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        f"t.{name}": torch.zeros(3, 4).to(dtype)
        if name != "F4"
        else torch.zeros(3, 4, dtype=torch.uint8).view(dtype)
        for name, dtype in TORCH_DTYPES.items()
    }
    tensors |= {
        "große": torch.randn(300, 200),
        "0-d": torch.tensor(2.0),
        "empty": torch.zeros(0, 5),
        'quo"ted\n': torch.ones(2),
    }
    uc.save(tmp_path / "c", model=tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (
        tmp_path / "theirs.safetensors"
    ).read_bytes()
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)


def test_max_file_bytes(tmp_path: Path) -> None:
    model = {f"w{n:02}": torch.full((100, 50), float(n)) for n in range(10)}  # 20,000 bytes each
    uc.save(tmp_path / "c", model=model, options=uc.SaveOptions(max_file_bytes=60_000))
    files = sorted((tmp_path / "c").glob("model-*"))
    assert [path.name for path in files] == [
        f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)
    ]
    assert all(path.stat().st_size < 62_000 for path in files)
    found = stored(tmp_path / "c")
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_empty_model(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model={}, step=0)
    report = uc.load(tmp_path / "c", model={})
    assert (report.step, report.bytes_read, report.sources) == (0, 0, {})


def test_step_is_not_taken_from_the_name(tmp_path: Path) -> None:
    uc.save(tmp_path / "checkpoint-500", model=Net())
    assert uc.load(tmp_path / "checkpoint-500", model=Net()).step is None


def test_saved_values_are_those_of_the_call(tmp_path: Path) -> None:
    model = {"w": torch.arange(60_000.0)}
    uc.save(tmp_path / "c", model=model)
    model["w"].zero_()
    assert torch.equal(stored(tmp_path / "c")["w"], torch.arange(60_000.0))


def test_any_memory_layout(tmp_path: Path) -> None:
    whole = torch.arange(80_000.0).reshape(400, 200)
    model = {
        "turned": whole.t(),
        "part": whole[::2, 3:77],
        "broadcast": torch.tensor(3.0).expand(200, 300),
        "grad": nn.Parameter(whole),
    }
    uc.save(tmp_path / "c", model=model)
    found = stored(tmp_path / "c")
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
    target = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype).t().contiguous().t()
        for name, tensor in model.items()
    }
    uc.load(tmp_path / "c", model=target)
    assert all(torch.equal(target[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("count", [3, 20_000])
def test_negated_views_are_refused(tmp_path: Path, count: int) -> None:
    """torch keeps the sign apart from the memory."""
    pairs = torch.view_as_complex(torch.randn(count, 2))
    uc.save(tmp_path / "c", model={"conj": pairs, "neg": pairs.imag.clone()})
    for name, tensor in {"conj": pairs.conj(), "neg": pairs.conj().imag}.items():
        with pytest.raises(uc.LayoutError, match=rf"{name}: is .*(conjugate|negative)"):
            uc.save(tmp_path / "d", model={name: tensor})
        with pytest.raises(uc.LayoutError, match=rf"{name}: is .*(conjugate|negative)"):
            uc.load(tmp_path / "c", model={name: tensor}, strict=False)
        with pytest.raises(
            uc.LayoutError, match=rf"{name}: is .*(conjugate|negative)"
        ):  # not the other's alias
            uc.save(
                tmp_path / "d",
                model={"plain": pairs if name == "conj" else pairs.imag, name: tensor},
            )
        uc.save(tmp_path / name, model={}, extra={name: tensor})
        assert torch.equal(uc.open(tmp_path / name).extra[name], tensor)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("form", [str, Path, lambda path: f"file://{path}", os.path.relpath])
def test_path_types(tmp_path: Path, form: Callable[[Path], str | Path]) -> None:
    path = form(tmp_path / "a" / "c")
    uc.save(path, model=Net())
    other = Net(seed=1)
    uc.load(path, model=other)
    assert same_state(other, Net())
    assert uc.verify(path, deep=True).ok
    with uc.open(path) as opened:
        assert opened.parts == ("model",)


def test_folder_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    uc.save(tmp_path / "link" / "c", model=Net())
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "c")
    other = Net(seed=1)
    uc.load(tmp_path / "latest", model=other)
    assert same_state(other, Net())


def test_one_log_line_per_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="unified_ckpt"):
        uc.save(tmp_path / "c", model=Net())
        uc.load(tmp_path / "c", model=Net())
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "saved " in caplog.text
    assert "loaded " in caplog.text


# tied weights


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = Net(tied=True)
    uc.save(tmp_path / "c", model=model)
    assert "head.weight" not in stored(tmp_path / "c")
    assert manifest(tmp_path / "c")["parts"]["model"]["aliases"] == {"head.weight": "embed.weight"}
    for other in (Net(tied=True, seed=1), Net(seed=1)):
        report = uc.load(tmp_path / "c", model=other)
        assert same_state(other, model)
        assert (report.missing, report.unexpected) == ((), ())
    with uc.open(tmp_path / "c") as opened:
        assert torch.equal(opened["model"]["head.weight"][...], model.embed.weight)
        assert "head.weight" not in list(opened["model"])


def test_equal_untied_weights_load_into_tied(tmp_path: Path) -> None:
    """As the first and the last pipeline stage leave them: two copies, of which none knows of the
    other.
    """
    model = Net()
    model.head.weight.data = model.embed.weight.data.clone()
    uc.save(tmp_path / "c", model=model)
    other = Net(tied=True, seed=1)
    report = uc.load(tmp_path / "c", model=other)
    assert same_state(other, model)
    assert report.notes == ("tied in the target, stored as equal tensors: model:embed.weight",)


@pytest.mark.parametrize("verify", ["read", "off"])
def test_different_untied_weights_do_not_load_into_tied(tmp_path: Path, verify: str) -> None:
    """One of the two was kept and the other lost without a word. Compared by digest, or by bytes
    where digests are off.
    """
    model, other = Net(), Net(tied=True, seed=1)
    model.head.weight.data = model.embed.weight.data.clone()
    model.head.weight.data[-1, -1] += 1
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    uc.save(tmp_path / "c", model=model, optimizer=optimizer)
    before = copy.deepcopy(other.state_dict())
    options = uc.LoadOptions(verify=verify)
    with pytest.raises(
        uc.MismatchError,
        match=r"ties embed.weight and head.weight, which differ in the .*'drop': True",
    ):
        uc.load(tmp_path / "c", model=other, options=options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    dropped = uc.SourceOptions(rename=[{"match": "head.weight", "drop": True}])
    uc.load(tmp_path / "c", model=other, options=uc.LoadOptions(verify=verify, source=dropped))
    assert torch.equal(other.head.weight, model.embed.weight)


# lists, parts, masters


def stage(*numbers: int, seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({f"layer{n}": nn.Linear(4, 4) for n in numbers})


def test_lists_of_modules_and_optimizers(tmp_path: Path) -> None:
    """Virtual pipeline stages save what one module loads, and the reverse."""
    stages = [stage(0, 2), stage(1, 3, seed=1)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1 + n) for n, one in enumerate(stages)]
    for one, optimizer in zip(stages, optimizers, strict=True):
        sum((p**2).sum() for p in one.parameters()).backward()
        optimizer.step()
    uc.save(tmp_path / "c", model=stages, optimizer=optimizers)
    whole = stage(0, 1, 2, 3, seed=5)
    fresh = torch.optim.AdamW([{"params": whole[f"layer{n}"].parameters()} for n in range(4)])
    uc.load(tmp_path / "c", model=whole, optimizer=fresh)
    for one, optimizer in zip(stages, optimizers, strict=True):
        for name, param in one.named_parameters():
            theirs = dict(whole.named_parameters())[name]
            assert torch.equal(theirs, param)
            assert torch.equal(fresh.state[theirs]["exp_avg"], optimizer.state[param]["exp_avg"])
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 1.1, 0.1, 1.1]
    uc.save(tmp_path / "d", model=whole, optimizer=fresh)
    again = [stage(3, 1, seed=8), stage(2, 0, seed=9)]
    uc.load(
        tmp_path / "d",
        model=again,
        optimizer=[torch.optim.AdamW(one.parameters()) for one in again],
    )
    assert all(
        torch.equal(dict(again[0].named_parameters())[n], dict(whole.named_parameters())[n])
        for n in ("layer1.bias", "layer3.weight")
    )


def test_two_modules_with_one_name(tmp_path: Path) -> None:
    with pytest.raises(
        uc.LayoutError,
        match=r"layer0\.weight: two modules of the model use this name for different tensors",
    ):
        uc.save(tmp_path / "c", model=[stage(0), stage(0, seed=1)])


def test_extra_parts(tmp_path: Path) -> None:
    model, ema = Net(), Net(seed=1)
    uc.save(tmp_path / "c", model=model, parts={"ema": ema, "stats": {"norm": torch.tensor([1.5])}})
    other, stats = Net(seed=2), {"norm": torch.zeros(1)}
    report = uc.load(tmp_path / "c", parts={"ema": other, "stats": stats})
    assert same_state(other, ema)
    assert stats["norm"].item() == 1.5
    assert report.sources == {"ema": ("ema",), "stats": ("stats",)}
    assert (tmp_path / "c" / "ema.safetensors.index.json").exists()
    with pytest.raises(uc.MismatchError, match=r"old:embed\.weight: is not in the checkpoint"):
        uc.load(tmp_path / "c", parts={"old": other})


def test_one_optimizer_of_two_models(tmp_path: Path) -> None:
    def made(seed: int, steps: int) -> tuple[Net, Net, torch.optim.Optimizer]:
        model, critic = Net(seed=seed), Net(seed=seed + 1)
        optimizer = torch.optim.AdamW(
            [{"params": model.parameters()}, {"params": critic.parameters(), "lr": 0.5}]
        )
        for p in [p for _ in range(steps) for p in (*model.parameters(), *critic.parameters())]:
            p.grad = torch.ones_like(p)
        for _ in range(steps):
            optimizer.step()
        return model, critic, optimizer

    model, critic, optimizer = made(0, steps=2)
    uc.save(tmp_path / "c", model=model, parts={"critic": critic}, optimizer=optimizer)
    again, other, fresh = made(5, steps=0)
    uc.load(tmp_path / "c", model=again, parts={"critic": other}, optimizer=fresh)
    assert same_state(again, model)
    assert same_state(other, critic)
    wanted, found = optimizer.state_dict(), fresh.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert all(
        torch.equal(found["state"][i][key], value)
        for i, one in wanted["state"].items()
        for key, value in one.items()
    )


@pytest.mark.parametrize("gone", ["optimizer", "ema", "model"])
def test_deleted_part(tmp_path: Path, gone: str) -> None:
    moments = {"embed.weight/exp_avg": torch.ones(30, 8)}
    uc.save(tmp_path / "c", model=Net(), optimizer=moments, parts={"ema": Net(seed=1)})
    for path in (tmp_path / "c").glob(f"{gone}*"):
        path.unlink()
    kept = {
        "model": {"model": Net(seed=3)},
        "optimizer": {"optimizer": {"embed.weight/exp_avg": torch.zeros(30, 8)}},
        "ema": {"parts": {"ema": Net(seed=3)}},
    }
    for part, target in kept.items():
        if part == gone:
            with pytest.raises(
                uc.MismatchError, match=rf"{part}:embed\.weight.* is not in the checkpoint"
            ):
                uc.load(tmp_path / "c", **target)
        else:
            uc.load(tmp_path / "c", **target)
    assert uc.verify(tmp_path / "c", deep=True).ok


def mixed() -> Net:
    """Training weights in fp32, but for a norm that is kept in bf16."""
    model = Net()
    model.block[1].bfloat16()
    return model


def test_masters_are_created_from_the_model(tmp_path: Path) -> None:
    model = mixed()
    uc.save(tmp_path / "c", model=model, options=uc.SaveOptions(model_dtype="bfloat16"))
    weights, masters = stored(tmp_path / "c"), stored(tmp_path / "c", "master_weights")
    for name, tensor in model.state_dict().items():
        kept = tensor.is_floating_point() and tensor.dtype != torch.bfloat16
        assert torch.equal(weights[name], tensor.to(torch.bfloat16) if kept else tensor)
        assert (name in masters) == kept
        assert not kept or torch.equal(masters[name], tensor)
    other = mixed()
    nn.init.zeros_(other.embed.weight)
    report = uc.load(tmp_path / "c", model=other)
    assert same_state(other, model), "an fp32 trainer gets its fp32 weights back"
    assert report.sources == {"model": ("master_weights", "model")}
    small = Net().bfloat16()
    report = uc.load(tmp_path / "c", model=small)
    assert torch.equal(small.embed.weight, model.embed.weight.bfloat16())
    assert report.sources == {"model": ("model",)}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, torch.float16])
def test_model_dtype_by_name_or_object(tmp_path: Path, dtype: object) -> None:
    uc.save(tmp_path / "c", model=Net(), options=uc.SaveOptions(model_dtype=dtype))
    wanted = torch.float16 if dtype == torch.float16 else torch.bfloat16
    assert stored(tmp_path / "c")["embed.weight"].dtype == wanted


def test_only_the_model_is_saved(tmp_path: Path) -> None:
    """PaddleNLP's `remove_master_weight`: what is left loads with a cast that was asked for."""
    model = Net()
    uc.save(
        tmp_path / "c",
        model=model,
        optimizer={},
        options=uc.SaveOptions(model_dtype="bfloat16", parts=("model",)),
    )
    assert set(manifest(tmp_path / "c")["parts"]) == {"model"}
    other = Net(seed=1)
    with pytest.raises(
        uc.MismatchError,
        match=r"model:embed\.weight: checkpoint has dtype BF16, target has F32; pass "
        r"LoadOptions\(cast=True\) to cast",
    ):
        uc.load(tmp_path / "c", model=other)
    assert same_state(other, Net(seed=1))
    report = uc.load(tmp_path / "c", model=other, options=uc.LoadOptions(cast=True))
    assert torch.equal(other.embed.weight, model.embed.weight.bfloat16().float())
    assert report.sources == {"model": ("model",)}


def test_only_masters_and_optimizer_are_saved(tmp_path: Path) -> None:
    """PaddleNLP's `skip_save_model_weight`: the model is read from its masters, whatever dtype it
    has.
    """
    model = {name: t for name, t in Net().state_dict().items() if t.is_floating_point()}
    moments = {"embed.weight/exp_avg": torch.ones(30, 8)}
    options = uc.SaveOptions(model_dtype="bfloat16", parts=("master_weights", "optimizer"))
    uc.save(tmp_path / "c", model=model, optimizer=moments, options=options)
    assert set(manifest(tmp_path / "c")["parts"]) == {"master_weights", "optimizer"}
    for dtype in (torch.float32, torch.bfloat16):
        other = {name: torch.zeros_like(t, dtype=dtype) for name, t in model.items()}
        chosen = uc.LoadOptions(parts=("model", "optimizer"))  # bf16 has no place for the masters
        report = uc.load(
            tmp_path / "c",
            model=other,
            optimizer={"embed.weight/exp_avg": torch.zeros(30, 8)},
            options=chosen,
        )
        assert all(torch.equal(other[name], t.to(dtype)) for name, t in model.items())
        assert report.sources["model"] == ("master_weights",)


class Mixed(nn.Module):
    """Tensors with a master in the optimizer, and every kind without: frozen, statistics, integers,
    one in float32, a tied name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6, dtype=torch.bfloat16).requires_grad_(False)
        self.again = self.frozen
        self.head = nn.Linear(6, 20, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.again(self.frozen(self.norm(self.embed(tokens).float()).bfloat16()))
        logits: torch.Tensor = self.head(hidden)
        return logits


class MasterSGD(torch.optim.Optimizer):
    """Momentum over float32 masters, which it keeps in its state as `master_param`, for parameters
    that are narrower.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if param.dtype != torch.float32:
                state.setdefault("master_param", param.detach().float())
            state["momentum"] = (
                0.9 * state.get("momentum", torch.zeros(param.shape)) + param.grad.float()
            )
            master = state.get("master_param", param)
            master.sub_(self.param_groups[0]["lr"] * state["momentum"])
            param.copy_(master)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, seeds: range) -> None:
    for seed in seeds:
        tokens = torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).float(), tokens).backward()
        optimizer.step()


def mixed_job(seed: int) -> tuple[Mixed, MasterSGD]:
    torch.manual_seed(seed)
    model = Mixed()
    return model, MasterSGD(model)


@pytest.mark.parametrize("words", ["skip_save_model_weight", "enable_all_options"])
def test_save_without_the_model_resumes_bitwise(tmp_path: Path, words: str) -> None:
    """What has no master is stored beside the masters, and not under a name that `from_pretrained`
    takes for a model.
    """
    model, optimizer = mixed_job(0)
    train(model, optimizer, seeds=range(3))
    folder = tmp_path / "c"
    with uc.Checkpointer(options=from_paddle(words).save) as checkpointer:
        checkpointer.save(folder, model=model, optimizer=optimizer)
        train(model, optimizer, seeds=range(3, 4))
        checkpointer.save_async(tmp_path / "d", model=model, optimizer=optimizer).result()
    assert set(stored(folder, "master_weights")) == {"embed.weight"}
    assert not list(folder.glob("model.safetensors*"))
    assert stored(folder, "model_without_masters").keys() == {
        n for n in model.state_dict() if n.startswith(("norm", "frozen"))
    }
    assert manifest(folder)["omitted_parts"] == ["model"]
    other, theirs = mixed_job(1)
    train(other, theirs, seeds=range(7, 8))
    report = uc.load(folder, model=other, optimizer=theirs)
    assert report.sources["model"] == ("master_weights", "model_without_masters")
    train(other, theirs, seeds=range(3, 7))
    train(model, optimizer, seeds=range(4, 7))
    assert same_state(other, model)
    uc.load(tmp_path / "d", model=other, optimizer=theirs)
    train(other, theirs, seeds=range(4, 7))
    assert same_state(other, model)


def test_save_without_the_model_keeps_other_values(tmp_path: Path) -> None:
    """A model tensor that is not its master, rounded, is stored too: on any rank, for all ranks.
    NaN payloads do not count.
    """
    nan = torch.tensor([float("nan"), -0.0, 3.0])
    masters = {
        "same": nan,
        "edited": torch.ones(3),
        "whole": torch.ones(3, dtype=torch.int32),
        "other": torch.ones(4),
    }
    model = {
        "same": nan.bfloat16(),
        "edited": torch.full((3,), 2.0).bfloat16(),
        "whole": torch.ones(3).bfloat16(),
    }
    model |= {"other": torch.ones(2, 2).bfloat16(), "zero": torch.tensor(-0.0).bfloat16()}
    options = uc.SaveOptions(parts=("master_weights",))
    uc.save(
        tmp_path / "c",
        model=model,
        master_weights=masters | {"zero": torch.tensor(0.0)},
        options=options,
    )
    assert stored(tmp_path / "c", "model_without_masters").keys() == model.keys() - {"same"}
    other = {name: torch.ones_like(tensor) for name, tensor in model.items()}
    uc.load(tmp_path / "c", model=other)
    assert all(
        torch.equal(other[name].view(torch.int16), model[name].view(torch.int16))
        for name in model.keys() - {"same"}
    )
    assert torch.equal(other["same"].nan_to_num(7.0), model["same"].nan_to_num(7.0))


def test_save_without_the_model_is_decided_by_all_ranks(tmp_path: Path) -> None:
    """Ranks keep masters of some tensors each, or of some rows: one that any rank finds different
    is stored, the others are not.
    """
    values = torch.arange(8.0).reshape(4, 2)
    model = {name: values.clone() for name in ("first", "second", "rows", "edited", "none")}
    options = uc.SaveOptions(parts=("master_weights",), timeout_seconds=20)

    def act(comm: Comm) -> None:
        masters = {
            "first" if comm.rank == 0 else "second": values.double(),
            "rows": values,
            "edited": values + comm.rank,
        }
        rows = slice(2 * comm.rank, 2 * comm.rank + 2)
        mine = {**model, "rows": model["rows"][rows], "edited": model["edited"][rows]}
        held = {
            name: tensor[rows] if name in ("rows", "edited") else tensor
            for name, tensor in masters.items()
        }
        layout = uc.Layout({"dp": 2}, {"rows": {"dp": 0}, "edited": {"dp": 0}})
        with make_checkpointer(comm) as checkpointer:
            for name in ("c", "d"):  # the second by the kept plan
                checkpointer.save(
                    tmp_path / name, model=mine, master_weights=held, layout=layout, options=options
                )

    run_ranks(2, act)
    for name in ("c", "d"):
        assert stored(tmp_path / name, "model_without_masters").keys() == {"edited", "none"}
        other = {name: torch.zeros(4, 2) for name in model}
        uc.load(tmp_path / name, model=other)
        assert all(torch.equal(other[name], values) for name in model)


def test_model_dtype_keeps_tensors_without_master(tmp_path: Path) -> None:
    """float32 tensors beside an optimizer's masters are rounded in `model`, and whole in
    `master_weights`.
    """
    model, optimizer = mixed_job(0)
    train(model, optimizer, seeds=range(2))
    uc.save(
        tmp_path / "c",
        model=model,
        optimizer=optimizer,
        options=uc.SaveOptions(model_dtype="bfloat16"),
    )
    other, theirs = mixed_job(1)
    uc.load(tmp_path / "c", model=other, optimizer=theirs)
    assert same_state(other, model)


def test_load_names_an_omitted_optimizer(tmp_path: Path) -> None:
    """Its param groups alone must not pass for an optimizer without state."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    uc.save(
        tmp_path / "c", model=model, optimizer=optimizer, options=uc.SaveOptions(parts=("model",))
    )
    with pytest.raises(
        uc.MismatchError, match=r"optimizer:embed\.weight: is not in the checkpoint"
    ):
        uc.load(tmp_path / "c", model=model, optimizer=optimizer)


def test_masters_are_read_from_a_model_without_them(tmp_path: Path) -> None:
    model = {"w": torch.randn(300, 100)}
    uc.save(tmp_path / "c", model=model)
    masters = {"w": torch.zeros(300, 100)}
    report = uc.load(tmp_path / "c", model={"w": torch.zeros(300, 100)}, master_weights=masters)
    assert torch.equal(masters["w"], model["w"])
    assert report.sources == {"model": ("model",), "master_weights": ("model",)}


def test_explicit_masters(tmp_path: Path) -> None:
    model = {"w": torch.randn(300, 100).bfloat16(), "count": torch.tensor(3)}
    masters = {"w": torch.randn(300, 100)}
    uc.save(
        tmp_path / "c",
        model=model,
        master_weights=masters,
        options=uc.SaveOptions(model_dtype="bfloat16"),
    )
    assert torch.equal(stored(tmp_path / "c", "master_weights")["w"], masters["w"])
    small, large = (
        {"w": torch.zeros(300, 100).bfloat16(), "count": torch.tensor(0)},
        {"w": torch.zeros(300, 100)},
    )
    uc.load(tmp_path / "c", model=small, master_weights=large)
    assert torch.equal(small["w"], model["w"])
    assert torch.equal(large["w"], masters["w"])


# extra


def test_extra_round_trip(tmp_path: Path) -> None:
    extra = {
        "tuple": (1, [2, (3,)]),
        4: {"int keys": {5: 6, -7: 8}},
        "counter": Counter("abca"),
        "ordered": OrderedDict(b=1, a=2),
        "bytes": bytes(range(256)) * 30,
        "floats": [math.inf, -math.inf, 1e-300, 0.1],
        "big": 2**80,
        "numpy": np.arange(6, dtype="<u2").reshape(2, 3),
        "scalar": np.float32(0.5),
        "tensor": torch.randn(40, 30).bfloat16(),
        "none": None,
        "flags": {True, False},
        "complex": 1 + 2j,
        "dtype": torch.bfloat16,
    }
    uc.save(tmp_path / "c", model=Net(), extra={**extra, "nan": math.nan})
    for found in (uc.load(tmp_path / "c", model=Net()).extra, uc.open(tmp_path / "c").extra):
        assert math.isnan(found.pop("nan"))
        assert found.keys() == extra.keys()
        for key, value in extra.items():
            assert type(found[key]) is type(value)
            same = (
                torch.equal
                if key == "tensor"
                else np.array_equal
                if key == "numpy"
                else lambda a, b: a == b
            )
            assert same(found[key], value), key


def test_scheduler_resumes(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    uc.save(
        tmp_path / "c",
        model=model,
        optimizer=optimizer,
        extra={"scheduler": scheduler.state_dict()},
    )
    fresh = torch.optim.SGD(model.parameters(), lr=0.5)
    other = CosineAnnealingLR(fresh, 10)
    other.load_state_dict(uc.load(tmp_path / "c", model=model, optimizer=fresh).extra["scheduler"])
    for _ in range(3):
        for one, schedule in ((optimizer, scheduler), (fresh, other)):
            one.step()
            schedule.step()
    assert (
        fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    )


def test_random_states_resume(tmp_path: Path) -> None:
    state = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    uc.save(tmp_path / "c", model=Net(), rank_extra=state)
    drawn = torch.rand(3), np.random.rand(3), random.random()
    found = uc.load(tmp_path / "c", model={}, strict=False).rank_extra
    torch.set_rng_state(found["torch"])
    np.random.set_state(found["numpy"])
    random.setstate(found["python"])
    assert torch.equal(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.rand(3), drawn[1])
    assert random.random() == drawn[2]
    with uc.open(tmp_path / "c") as opened:
        assert len(opened.rank_extra) == 1
        assert opened.rank_extra[-1]["python"] == state["python"]
        with pytest.raises(IndexError, match=r"rank_extra\[1\]: the checkpoint has 1 entries"):
            opened.rank_extra[1]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        amax = (0.0,)

        def get_extra_state(self) -> object:
            return {"amax": self.amax, "history": torch.ones(3)}

        def set_extra_state(self, state: dict[str, object]) -> None:
            self.amax = state["amax"]

    model, other = nn.Sequential(Scaled(2, 2)), nn.Sequential(Scaled(2, 2))
    model[0].amax = (1.5, 2.5)
    uc.save(tmp_path / "c", model=model)
    uc.load(tmp_path / "c", model=other)
    assert other[0].amax == (1.5, 2.5)


# attach


def test_attached_files_are_committed_with_the_rest(tmp_path: Path) -> None:
    def attach(folder: str) -> None:
        assert not (tmp_path / "c").exists()
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "code" / "deep").mkdir(parents=True)
        (Path(folder) / "code" / "deep" / "model.py").write_text("x = 1")

    uc.save(tmp_path / "c", model=Net(), attach=attach)
    assert (tmp_path / "c" / "config.json").read_text() == "{}"
    assert (tmp_path / "c" / "code" / "deep" / "model.py").read_text() == "x = 1"
    assert uc.verify(tmp_path / "c", deep=True).ok


@pytest.mark.parametrize("name", ["unified_checkpoint.json", "model.safetensors.index.json"])
def test_attach_must_not_write_engine_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        uc.StorageError,
        match=rf"`attach` changed {name}, a file of the checkpoint; write to another name",
    ):
        uc.save(
            tmp_path / "c",
            model=Net(),
            attach=lambda folder: (Path(folder) / name).write_text("{}"),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "digests.safetensors"])
def test_attach_must_not_replace_engine_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(uc.CheckpointError, match=rf"{name}"):
        uc.save(
            tmp_path / "c",
            model=Net(),
            attach=lambda folder: (Path(folder) / name).write_bytes(b"x"),
        )
    assert list(tmp_path.iterdir()) == []


def test_attach_fails(tmp_path: Path) -> None:
    def attach(folder: str) -> None:
        raise ValueError("no tokenizer")

    with pytest.raises(Exception, match="no tokenizer"):
        uc.save(tmp_path / "c", model=Net(), attach=attach)
    assert list(tmp_path.iterdir()) == []


# what is in the way


def test_if_exists(tmp_path: Path) -> None:
    old, new = Net(), Net(seed=1)
    first = uc.save(tmp_path / "c", model=old, step=1)
    with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
        uc.save(tmp_path / "c", model=new, step=2)
    kept = uc.save(tmp_path / "c", model=new, step=2, options=uc.SaveOptions(if_exists="keep"))
    assert (kept.id, kept.step, kept.path) == (first.id, 1, first.path)
    assert torch.equal(stored(tmp_path / "c")["embed.weight"], old.embed.weight)
    replaced = uc.save(
        tmp_path / "c", model=new, step=2, options=uc.SaveOptions(if_exists="replace")
    )
    assert replaced.id != first.id
    assert torch.equal(stored(tmp_path / "c")["embed.weight"], new.embed.weight)
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]


@pytest.mark.parametrize("if_exists", ["error", "keep"])
def test_concurrent_checkpoint_is_not_overwritten(tmp_path: Path, if_exists: str) -> None:
    """Another job was faster."""
    with pytest.raises(uc.StorageError, match="another job has committed a checkpoint"):
        uc.save(
            tmp_path / "c",
            model=Net(),
            step=2,
            attach=lambda _: uc.save(tmp_path / "c", model=Net(seed=1), step=1),
            options=uc.SaveOptions(if_exists=if_exists),
        )
    other = Net()
    assert uc.load(tmp_path / "c", model=other).step == 1
    assert same_state(other, Net(seed=1))
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]


FOLDERS = {  # what the caller's path holds -> what the refusal says
    "files": (("notes.txt", "src/a.py"), r"holds other files \(notes.txt, src\)"),
    "weights": (("model.safetensors",), r"holds other files \(model.safetensors\)"),
    "our run": (
        ("checkpoint-2/", "checkpoint-10/", "notes.txt"),
        r"holds checkpoints, .* did you mean .*/c/checkpoint-10\?",
    ),
    "stock run": (
        ("checkpoint-500/optimizer.pt", "checkpoint-60/optimizer.pt"),
        r"did you mean .*/c/checkpoint-500\?",
    ),
    "DeepSpeed's run": (
        ("latest", "global_step3/mp_rank_00_model_states.pt"),
        r"did you mean .*/c/global_step3\?",
    ),
    "checkpoint with checkpoints in it": (
        (".", "checkpoint-2/"),
        r"holds checkpoints|holds a committed checkpoint",
    ),
}


def fill(folder: Path, entries: Sequence[str]) -> dict[str, bytes]:
    """Files by name; a name that ends in a slash, or is a dot, is a checkpoint of ours."""
    for name in entries:
        if name == "." or name.endswith("/"):
            uc.save(folder / name, model=Net(), step=int(name[11:-1] or 0) if len(name) > 1 else 7)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(name.encode())
    return tree(folder)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("if_exists", ["error", "keep", "keep_complete", "replace"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_foreign_folder_is_refused(tmp_path: Path, kind: str, if_exists: str) -> None:
    """Before the first byte, in the foreground and in the background; nothing changes."""
    entries, says = FOLDERS[kind]
    before = fill(tmp_path / "c", entries)
    options = uc.SaveOptions(if_exists=if_exists)
    if kind.startswith("checkpoint") and if_exists == "keep":
        assert uc.save(tmp_path / "c", model=Net(), options=options).existed
        return
    with pytest.raises(uc.StorageError, match=says):
        uc.save(tmp_path / "c", model=Net(), options=options)
    with pytest.raises(uc.StorageError, match=says):
        uc.save_async(tmp_path / "c", model=Net(), options=options).result()
    assert tree(tmp_path / "c") == before
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("entries", [(), ("checkpoint-is-incomplete.txt",)])
def test_empty_folder_is_replaced(tmp_path: Path, entries: tuple[str, ...]) -> None:
    """So does one with nothing but the file by which transformers announces a checkpoint."""
    (tmp_path / "c").mkdir()
    fill(tmp_path / "c", entries)
    uc.save(tmp_path / "c", model=Net())
    assert uc.verify(tmp_path / "c", deep=True).ok
    assert os.listdir(tmp_path) == ["c"]
    assert not set(entries) & set(os.listdir(tmp_path / "c"))


def test_uncommitted_checkpoint_is_renamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged manifest shows that it is ours. It stays, under a name that anybody sees."""
    uc.save(tmp_path / "c", model=Net())
    (tmp_path / "c" / "unified_checkpoint.json").write_bytes(b"{")
    (tmp_path / "c" / "results.csv").write_text("mine")
    before = tree(tmp_path / "c")
    uc.save(tmp_path / "c", model=Net())
    assert uc.verify(tmp_path / "c", deep=True).ok
    assert tree(tmp_path / "c-before-1") == before
    assert sorted(os.listdir(tmp_path)) == ["c", "c-before-1"]
    assert "c-before-1" in caplog.text


# paths


URLS = ["s3://bucket/run", "gs://bucket/run", "memory://run", Path("s3://bucket/run")]
WRITES: dict[str, Callable[[Any, Path], object]] = {
    "save": lambda url, _: uc.save(url, model=Net()),
    "save below a root": lambda url, _: uc.Checkpointer(url).save("checkpoint-1", model=Net()),
    "save_async": lambda url, _: uc.save_async(url, model=Net()).result(),
    "manager": lambda url, _: uc.CheckpointManager(url),
    "local tier": lambda url, ours: uc.CheckpointManager(
        ours.parent,
        options=uc.ManagerOptions(local_directory=os.fspath(url), local_interval_steps=1),
    ),
    "convert": lambda url, ours: uc.convert(ours, url),
    "export": lambda url, ours: uc.convert(ours, url, to="dcp"),
    "repair": lambda url, _: uc.repair(url),
}


@pytest.mark.parametrize("write", WRITES)
def test_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    """It was a local folder called `s3:`, and the next run started fresh elsewhere."""
    uc.save(tmp_path / "ours", model=Net())
    monkeypatch.chdir(tmp_path)
    for url in URLS:
        with pytest.raises(uc.StorageError, match=r"://.*: got a URL, expected a local folder"):
            WRITES[write](url, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["ours"]


READS: dict[str, Callable[[Path], object]] = {
    "load": lambda path: uc.load(path, model=Net()),
    "open": uc.open,
    "verify": uc.verify,
    "convert": lambda path: uc.convert(path, path.with_name("other")),
    "load of two": lambda path: uc.load([path, path], model=Net()),
}


@pytest.mark.parametrize("kind", ["our run", "stock run", "DeepSpeed's run"])
@pytest.mark.parametrize("read", READS)
def test_run_folder_suggests_its_latest_checkpoint(tmp_path: Path, read: str, kind: str) -> None:
    entries = [one for one in FOLDERS[kind][0] if one != "latest"]
    fill(tmp_path / "c", entries)
    newest = {
        "our run": "checkpoint-10",
        "stock run": "checkpoint-500",
        "DeepSpeed's run": "global_step3",
    }[kind]
    with pytest.raises(
        uc.NotFoundError, match=rf"c: is the folder of a run, .* did you mean .*/c/{newest}\?"
    ):
        READS[read](tmp_path / "c")


def test_relative_paths_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the working directory at construction; a program may change it later."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = uc.ManagerOptions(
        asynchronous=False, on_preemption=False, load_parameters_path="pretrained/1000"
    )
    uc.save("pretrained/1000", model=Net(seed=3))
    with (
        uc.Checkpointer("run") as checkpointer,
        uc.CheckpointManager("managed", options=options) as manager,
    ):
        monkeypatch.chdir("elsewhere")
        checkpointer.save("checkpoint-1", model=Net())
        target = Net()
        assert manager.restore(model=target) is not None
        assert same_state(target, Net(seed=3))
        manager.save(2, model=target, force=True)
    assert sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("unified_checkpoint.json")
    ) == [
        "managed/checkpoint-2/unified_checkpoint.json",
        "pretrained/1000/unified_checkpoint.json",
        "run/checkpoint-1/unified_checkpoint.json",
    ]


def test_save_checks_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.4 MB fit where 0.9 MB are free; where they do not, the error says what takes the room."""
    model = {"w": torch.zeros(100_000)}
    monkeypatch.setattr(LocalStorage, "free_nbytes", lambda _: 900_000)
    uc.save(tmp_path / "c", model=model)
    used = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    monkeypatch.setattr(LocalStorage, "free_nbytes", lambda _: used)
    with pytest.raises(
        uc.StorageError,
        match=r"of free space, expected 41\d+: 400\d+ of tensors and digests, \d+ of indexes "
        r"and the manifest",
    ):
        uc.save(tmp_path / "d", model=model)
    assert os.listdir(tmp_path) == ["c"]


# loads that need not fit


def test_load_not_strict(tmp_path: Path) -> None:
    uc.save(
        tmp_path / "c",
        model={
            "same": torch.ones(3),
            "shape": torch.ones(3),
            "dtype": torch.ones(3),
            "old": torch.ones(3),
        },
    )
    target = {
        "same": torch.zeros(3),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(3).half(),
        "new": torch.zeros(3),
    }
    report = uc.load(tmp_path / "c", model=target, strict=False)
    assert report.missing == ("model:new",)
    assert report.unexpected == ("model:old",)
    assert [text.partition(": ")[0] for text in report.wrong] == ["model:dtype", "model:shape"]
    assert {name: tensor.sum().item() for name, tensor in target.items()} == {
        "same": 3,
        "shape": 0,
        "dtype": 0,
        "new": 0,
    }


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float64"), ("int64", "int32")],
)
@pytest.mark.parametrize("shape", [(), (7,), (300, 100)])
def test_load_with_cast(tmp_path: Path, saved: str, wanted: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(getattr(torch, saved))
    uc.save(tmp_path / "c", model={"w": tensor})
    plain = torch.zeros(shape, dtype=getattr(torch, wanted))
    for target in (plain, plain.mT.contiguous().mT if len(shape) == 2 else plain.clone()):
        uc.load(tmp_path / "c", model={"w": target}, options=uc.LoadOptions(cast=True))
        assert torch.equal(target, tensor.to(getattr(torch, wanted)))


def test_meta_device_is_refused(tmp_path: Path) -> None:
    model = Net()
    model.embed.to("meta")
    text = r"embed\.weight: is on the meta device; call `to_empty\(device=\.\.\.\)` first"
    with pytest.raises(uc.LayoutError, match=text):
        uc.save(tmp_path / "c", model=model)
    uc.save(tmp_path / "c", model=Net())
    with pytest.raises(uc.LayoutError, match=text):
        uc.load(tmp_path / "c", model=model)
    model.embed.to_empty(device="cpu")
    uc.load(tmp_path / "c", model=model)
    assert same_state(model, Net())


# wrappers


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data parallel": nn.DataParallel,
    "compile": torch.compile,
    "activation checkpointing": checkpoint_wrapper,
    "all of them": lambda model: nn.DataParallel(torch.compile(checkpoint_wrapper(model))),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_leave_no_trace(tmp_path: Path, wrap: str) -> None:
    model = Net()
    model.block[0] = checkpoint_wrapper(model.block[0])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    sum((p**2).sum() for p in model.parameters()).backward()
    optimizer.step()
    uc.save(tmp_path / "c", model=WRAPPERS[wrap](model), optimizer=optimizer)
    assert set(stored(tmp_path / "c")) == set(Net().state_dict())
    plain, wrapped = Net(seed=1), Net(seed=2)
    fresh = torch.optim.SGD(plain.parameters(), momentum=0.9)
    uc.load(tmp_path / "c", model=plain, optimizer=fresh)
    assert torch.equal(
        fresh.state[plain.embed.weight]["momentum_buffer"],
        optimizer.state[model.embed.weight]["momentum_buffer"],
    )
    uc.load(tmp_path / "c", model=WRAPPERS[wrap](wrapped))
    assert same_state(plain, wrapped)
    assert torch.equal(plain.embed.weight, model.embed.weight)


# Hugging Face folders


@pytest.mark.parametrize("sharded", [False, True])
def test_load_hugging_face_folder(tmp_path: Path, sharded: bool) -> None:
    state = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    halves = [dict(list(state.items())[:3]), dict(list(state.items())[3:])] if sharded else [state]
    files = (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        if sharded
        else ["model.safetensors"]
    )
    for file, half in zip(files, halves, strict=True):
        save_file(half, tmp_path / file, metadata={"format": "pt"})
    if sharded:
        weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    (tmp_path / "config.json").write_text("{}")
    other = Net(seed=1)
    report = uc.load(tmp_path, model=other)
    assert same_state(other, Net())
    assert (report.step, report.extra, report.verified_bytes) == (None, None, 0)
    assert report.bytes_read == sum(t.nbytes for t in state.values())
    with uc.open(tmp_path) as opened:
        assert (opened.format, opened.parts) == ("huggingface", ("model",))
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(
        uc.MismatchError, match=r"optimizer:embed\.weight: is not in the checkpoint"
    ):
        uc.load(tmp_path, model=other, optimizer=optimizer)
    masters = {name: torch.zeros_like(t) for name, t in state.items() if t.is_floating_point()}
    report = uc.load(tmp_path, master_weights=masters, strict=False)
    assert all(torch.equal(masters[name], state[name]) for name in masters)
    assert report.sources == {"master_weights": ("model",)}


def test_transformers_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    other = transformers.LlamaForCausalLM(config)
    uc.load(tmp_path / "theirs", model=other)
    assert same_state(other, model)
    uc.save(tmp_path / "ours", model=model, attach=config.save_pretrained)
    third = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert same_state(third, model)


# uc.open


def test_open_reads_lazily(tmp_path: Path) -> None:
    tensor = torch.randn(70, 40, 3).bfloat16()
    uc.save(
        tmp_path / "c", model={"w": tensor, "b": torch.tensor(3), "none": torch.zeros(0, 2)}, step=4
    )
    with uc.open(tmp_path / "c") as opened:
        assert (opened.format, opened.parts, opened.step) == ("unified", ("model",), 4)
        view = opened["model"]["w"]
        assert (view.shape, view.dtype) == ((70, 40, 3), torch.bfloat16)
        for index in (
            (slice(None),),
            (3,),
            (slice(10, 20), slice(5, 6)),
            (..., 1),
            (-1, ..., slice(1, 3)),
            (slice(60, 900), 0, 2),
            (slice(9, 3),),
        ):
            assert torch.equal(view[index], tensor[index]), index
        assert torch.equal(view[5:7], tensor[5:7])
        assert opened["model"]["b"][...].item() == 3
        assert opened["model"]["none"][...].shape == (0, 2)
        assert list(opened["model"]) == ["b", "none", "w"]
        assert len(opened["model"]) == 3
        with pytest.raises(IndexError, match=r"model:w: got slice step 2, expected 1"):
            view[::2]
        with pytest.raises(
            IndexError, match=r"model:w: index 70 is out of range for a dim of size 70"
        ):
            view[70]
        with pytest.raises(IndexError, match=r"model:w: 4 indices for 3 dims"):
            view[0, 0, 0, 0]
        with pytest.raises(KeyError, match="model:x"):
            opened["model"]["x"]
        with pytest.raises(uc.NotFoundError, match=r"part 'optimizer': the checkpoint has model"):
            opened["optimizer"]


# verify


def test_verify_counts_bytes(tmp_path: Path) -> None:
    model = {f"w{n}": torch.randn(600, 500) for n in range(3)}
    uc.save(tmp_path / "c", model=model, optimizer={"w0/m": torch.zeros(5)})
    seen: list[int] = []
    report = uc.verify(tmp_path / "c", deep=True, progress=seen.append)
    assert report.ok
    assert (report.tensors, report.nbytes, report.deep) == (4, 3 * 1_200_000 + 20, True)
    assert sum(seen) == report.nbytes


# a Checkpointer between calls


def test_checkpointer_is_reusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    plan = save_module.make_plan
    monkeypatch.setattr(save_module, "make_plan", lambda *a, **k: made.append(1) or plan(*a, **k))
    model = Net()
    with uc.Checkpointer(
        root=tmp_path, options=uc.SaveOptions(if_exists="replace")
    ) as checkpointer:
        for step in range(3):
            with torch.no_grad():
                model.embed.weight += 1
            assert checkpointer.save("latest", model=model, step=step).path == str(
                tmp_path / "latest"
            )
        assert len(made) == 1, "one layout, one plan"
        other = Net(seed=1)
        assert checkpointer.load("latest", model=other).step == 2
        assert same_state(other, model)
        checkpointer.save(
            "elsewhere", model=model, optimizer={"embed.weight/m": torch.zeros(30, 8)}
        )
        assert len(made) == 2
        with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
            checkpointer.save("latest", model=model, options=uc.SaveOptions())
        checkpointer.close()
        checkpointer.save(tmp_path / "latest", model=model, step=9)
        assert len(made) == 3
    assert uc.load(tmp_path / "latest", model=Net()).step == 9


def test_checkpointer_after_an_error(tmp_path: Path) -> None:
    with uc.Checkpointer(root=tmp_path) as checkpointer:
        checkpointer.save("a", model=Net())
        with pytest.raises(uc.FormatError, match=r"extra: got an object"):
            checkpointer.save("b", model=Net(), extra=object())
        with pytest.raises(uc.NotFoundError, match="no such folder"):
            checkpointer.load("b", model=Net())
        shutil.rmtree(tmp_path / "a")
        checkpointer.save("b", model=Net())
        assert uc.verify(tmp_path / "b", deep=True).ok


def test_unknown_arguments_are_refused(tmp_path: Path) -> None:
    """As Python refuses them, before any rank waits for another."""
    unknown: dict[str, Any] = {"modle": {}}
    with uc.Checkpointer(tmp_path) as checkpointer:
        for call in (uc.save, uc.save_async, checkpointer.save, checkpointer.save_async):
            with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
                call(tmp_path / "c", **unknown)
    assert not (tmp_path / "c").exists()


def test_invalid_options() -> None:
    for wrong in (
        {"model_dtype": "int8"},
        {"if_exists": "maybe"},
        {"max_file_bytes": 0},
        {"timeout_seconds": 0},
        {"typo": 1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            uc.SaveOptions(**wrong)
    for wrong in ({"verify": "some"}, {"max_over_read": 0.9}, {"typo": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            uc.LoadOptions(**wrong)


def test_safetensors_reads_slices(tmp_path: Path) -> None:
    tensor = torch.randn(500, 70)
    uc.save(tmp_path / "c", model={"w": tensor})
    with safe_open(tmp_path / "c" / "model.safetensors", framework="pt") as opened:
        assert torch.equal(opened.get_slice("w")[100:200, 3:9], tensor[100:200, 3:9])

"""torch.save files and pytorch_model*.bin match torch.load; files without a model are refused."""

from __future__ import annotations

import argparse
import types
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.torch_training import Counting, process_group, state_of


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


FORMS: dict[str, Any] = {
    "bare": lambda state: state,
    "model": lambda state: {"model": state, "optimizer": {"state": {}}, "epoch": 3},
    "lightning": lambda state: {
        "state_dict": state,
        "optimizer_states": [{}],
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
    },
    "compiled": lambda state: {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    },
    "ddp": lambda state: {
        "model_state_dict": {f"module.{name}": tensor for name, tensor in state.items()}
    },
}


def test_namespaces_and_paths_become_plain(tmp_path: Path) -> None:
    """Many scripts save an argparse.Namespace; a placeholder replaces it without an import."""
    args = argparse.Namespace(
        lr=0.1,
        out=Path("/a/b"),
        inner=types.SimpleNamespace(names=["x", Path("c")]),
        none=argparse.Namespace(),
    )
    torch.save(
        {"model": net().state_dict(), "args": args, "paths": (Path("d"), Path())},
        tmp_path / "last.pt",
    )
    with uc.open(tmp_path / "last.pt") as source:
        settings = {"lr": 0.1, "out": "/a/b", "inner": {"names": ["x", "c"]}, "none": {}}
        assert source.extra == {"args": settings, "paths": ("d", ".")}


def test_plain_values_keep_their_classes(tmp_path: Path) -> None:
    """A Counter holds the milestones of `MultiStepLR`, which calls its `elements`."""
    optimizer = torch.optim.SGD(net().parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5])
    values = {
        "scheduler": scheduler.state_dict(),
        "order": OrderedDict(b=1, a=argparse.Namespace(x=2)),
        "dtype": torch.bfloat16,
        "shapes": [torch.Size([1, 2])],
    }
    torch.save({"model": net().state_dict(), **values}, tmp_path / "last.pt")
    uc.convert(tmp_path / "last.pt", tmp_path / "ours")
    expected = str(values | {"order": OrderedDict(b=1, a={"x": 2})})
    for path in (tmp_path / "last.pt", tmp_path / "ours"):
        with uc.open(path) as source:
            assert str(source.extra) == expected
            scheduler.load_state_dict(source.extra["scheduler"])
        assert sorted(scheduler.milestones.elements()) == [3, 3, 5]


def stepped(model: nn.Module, groups: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups, lr=0.3)
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    return optimizer


def test_indexed_optimizer_goes_to_its_parameters(tmp_path: Path) -> None:
    model = net()
    optimizer = stepped(model, model.parameters())
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt"
    )
    other = net(1)
    fresh = torch.optim.AdamW(other.parameters())
    uc.load(tmp_path / "last.pt", model=other, optimizer=fresh)
    check_equal(state_of(other, fresh), state_of(model, optimizer))
    assert fresh.param_groups[0]["lr"] == 0.3
    # without a target optimizer, the order of the file's tensors without buffers is used
    with uc.open(tmp_path / "last.pt") as source:
        check_equal(
            {name: view[...] for name, view in source["optimizer"].items()},
            state_of(model, optimizer),
        )


def test_named_optimizer_needs_no_order(tmp_path: Path) -> None:
    model = net()
    optimizer = stepped(
        model,
        [
            {"params": list(model[2].named_parameters())},
            {"params": list(model[0].named_parameters())},
        ],
    )
    state = optimizer.state_dict()
    for group, layer in zip(state["param_groups"], (2, 0), strict=True):
        group["param_names"] = [f"{layer}.{name}" for name in group["param_names"]]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "last.pt")
    with uc.open(tmp_path / "last.pt") as source:
        check_equal(
            {name: view[...] for name, view in source["optimizer"].items()},
            state_of(model, optimizer),
        )


def test_config_gives_trainer_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "config")
    rest = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    decayed = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}])
    model(torch.ones(1, 4, dtype=torch.int64)).logits.square().sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt"
    )
    for config in (tmp_path / "config", tmp_path / "config" / "config.json"):
        with uc.open(tmp_path / "last.pt", options=uc.SourceOptions(config=str(config))) as source:
            check_equal(
                {name: view[...] for name, view in source["optimizer"].items()},
                state_of(model, optimizer),
            )
    with (
        uc.open(tmp_path / "last.pt") as source,
        pytest.raises(uc.FormatError, match=r"the model's config\.json as SourceOptions\(config"),
    ):
        list(source["optimizer"])
    uc.convert(tmp_path / "last.pt", tmp_path / "ours", parts=("model",))


def test_ambiguous_orders_are_refused(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    cases = {
        r"the order of the file's tensors: got 1 param group\(s\), expected 2": [
            {"params": model[0].parameters()},
            {"params": model[1].parameters(), "lr": 0.1},
        ],
        "has 2 of 6 parameters, and shapes do not identify them": model[1].parameters(),
    }
    for text, groups in cases.items():
        torch.save(
            {"model": model.state_dict(), "optimizer": stepped(model, groups).state_dict()},
            tmp_path / "last.pt",
        )
        with uc.open(tmp_path / "last.pt") as source, pytest.raises(uc.FormatError, match=text):
            list(source["optimizer"])
        other = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
        uc.load(tmp_path / "last.pt", model=other)
        check_equal(other.state_dict(), model.state_dict())
        with pytest.raises(uc.FormatError, match=r"the target optimizer: (got|param group)"):
            uc.load(
                tmp_path / "last.pt", model=other, optimizer=torch.optim.AdamW(other.parameters())
            )


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # quantized tensors are deprecated
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "got list"),
        ({"epoch": 3}, "no state dict: got the keys epoch"),
        ({"w": torch.ones(2).to_sparse()}, "expected a whole dense"),
        ({"w": torch.empty(3, device="meta")}, "w: got .*on the meta device"),
        ({"w": nested()}, "w: got .*a nested tensor"),
        ({"w": quantized()}, "w: got .*a quantized tensor"),
        ({"model": {"a": {}}}, "the keys model, expected tensors, alone or under one of model, "),
        (
            {"net": {"w": torch.ones(2)}, "state_dict": {"w": torch.zeros(2)}},
            r"expected one state dict that may be the model, got several \(2\):\n  "
            r"state_dict\n  net",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:TypedStorage")  # torch reads quantized tensors so
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.14
def test_files_without_model_are_refused(tmp_path: Path, value: Any, text: str) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(uc.FormatError, match=text):
        uc.open(tmp_path / "x.pt")


@pytest.mark.parametrize("form", ["bare", "model", "ddp", "lightning"])
def test_module_extra_state_is_restored(tmp_path: Path, form: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
    model[1].count = [4, torch.ones(2)]
    torch.save(FORMS[form](model.state_dict()), tmp_path / "last.pt")
    uc.convert(tmp_path / "last.pt", tmp_path / "ours")
    for path in (tmp_path / "last.pt", tmp_path / "ours"):
        other = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
        uc.load(path, model=other)
        assert other[1].count[0] == 4
        assert torch.equal(other[1].count[1], torch.ones(2))


def test_plain_values_among_the_weights_are_extra(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "version": 3}, tmp_path / "bare.pt")
    torch.save({"model": {"w": torch.ones(2), "version": 3}, "epoch": 1}, tmp_path / "last.pt")
    (tmp_path / "hf").mkdir()
    torch.save(
        {"w": torch.ones(2), "version": 3, "_extra_state": 5}, tmp_path / "hf" / "pytorch_model.bin"
    )
    for path, extra in {
        "bare.pt": {"version": 3},
        "last.pt": {"epoch": 1, "model": {"version": 3}},
        "hf": {"version": 3},
    }.items():
        with uc.open(tmp_path / path) as source:
            assert source.extra == extra
            assert list(source["model"]) == ["w"]
    uc.convert(tmp_path / "hf", tmp_path / "ours")
    model = Counting(1, 1)
    model.set_extra_state = lambda state: setattr(model, "seen", state)  # type: ignore[method-assign]
    uc.load(tmp_path / "ours", model=model, strict=False)
    assert model.seen == 5


def test_state_dict_of_lightning_is_the_model(tmp_path: Path) -> None:
    first, second = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    torch.save(
        {"model": first, "state_dict": second, "pytorch-lightning_version": "2.6.6"},
        tmp_path / "lightning.ckpt",
    )
    with uc.open(tmp_path / "lightning.ckpt") as source:
        assert torch.equal(source["model"]["w"][...], second["w"])


def test_submodule_called_module_keeps_its_name(tmp_path: Path) -> None:
    """As in `AveragedModel`, only some names have the prefix `module.`."""
    model = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    torch.save(model.state_dict(), tmp_path / "swa.pt")
    other = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    uc.load(tmp_path / "swa.pt", model=other)
    check_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("unwrapped", [True, False])
def test_optimizer_with_ddp_names(tmp_path: Path, unwrapped: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    optimizer = stepped(
        model,
        [
            (f"module.{name}", parameter)
            for name, parameter in reversed(list(model.named_parameters()))
        ],
    )
    weights = {
        name if unwrapped else f"module.{name}": tensor
        for name, tensor in model.state_dict().items()
    }
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    with uc.open(tmp_path / "last.pt") as source:
        check_equal(
            {name: view[...] for name, view in source["optimizer"].items()},
            state_of(model, optimizer),
        )


@pytest.mark.parametrize(
    "make",
    [lambda ps: torch.optim.SGD(ps, lr=0.3), lambda ps: torch.optim.AdamW(ps, lr=0.3)],
    ids=["sgd", "fresh"],
)
def test_optimizer_without_state_gives_hyperparameters(tmp_path: Path, make: Any) -> None:
    """Plain SGD never has state, AdamW has none before its first step."""
    model = net()
    torch.save(
        {"model": model.state_dict(), "optimizer": make(model.parameters()).state_dict()},
        tmp_path / "last.pt",
    )
    uc.convert(tmp_path / "last.pt", tmp_path / "ours")
    for path in (tmp_path / "last.pt", tmp_path / "ours"):
        other = net(1)
        fresh = make(other.parameters())
        fresh.param_groups[0]["lr"] = 0.7
        uc.load(path, model=other, optimizer=fresh)
        assert fresh.param_groups[0]["lr"] == 0.3
        assert not fresh.state


def test_dtensor_shard_is_refused(tmp_path: Path) -> None:
    with process_group():
        torch.save(
            {"w": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])},
            tmp_path / "x.pt",
        )
    with pytest.raises(
        uc.FormatError, match=r"w: got one rank's shard of a DTensor(.*)`full_tensor\(\)`"
    ):
        uc.open(tmp_path / "x.pt")


def test_tied_master_weights_are_one_tensor(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    half = shared.to(torch.bfloat16)
    torch.save(
        {"model": {"a": half, "b": half}, "master_weights": {"a": shared, "b": shared}},
        tmp_path / "tied.pt",
    )
    with uc.open(tmp_path / "tied.pt") as source:
        assert list(source["master_weights"]) == ["a"]
        assert torch.equal(source["master_weights"]["b"][...], shared)

"""Adapters of native PEFT and the native Trainer become the parts that our saves use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import unified_ckpt as uc
from tests.support.trainers import model, trainer
from unified_ckpt.integrations.transformers.adapters import adapter_parts

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*is deprecated and will be removed in v6:FutureWarning"
    ),  # PEFT calls it
    pytest.mark.filterwarnings("ignore:Could not find a config file in"),
]


def lora(seed: int) -> Any:
    peft_model = get_peft_model(
        model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    torch.manual_seed(seed)
    peft_model.add_adapter(
        "of-users", LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM")
    )
    for name, parameter in peft_model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    return peft_model


def test_peft_folder_has_the_parts_of_our_saves(tmp_path: Path) -> None:
    saved, loaded = lora(0), lora(1)
    saved.save_pretrained(str(tmp_path / "stock"))
    expected = adapter_parts(saved)
    with uc.open(tmp_path / "stock") as source:
        assert source.format == "peft"
        assert (
            set(source.parts)
            == {"adapter_model", "adapter_model_of_users"}
            == set(expected) - {"trainable"}
        )
        assert source.extra["adapters"]["adapter_model"]["r"] == 4
    report = uc.load(
        tmp_path / "stock",
        parts={
            part: tensors for part, tensors in adapter_parts(loaded).items() if part != "trainable"
        },
    )
    assert report.missing == ()
    assert all(
        torch.equal(tensor, expected[part][name])
        for part, part_tensors in adapter_parts(loaded).items()
        for name, tensor in part_tensors.items()
    )


def test_adapter_with_pickled_weights(tmp_path: Path) -> None:
    """As written by older versions of PEFT."""
    saved, loaded = lora(0), lora(1)
    saved.save_pretrained(str(tmp_path / "stock"))
    for part, folder in (
        ("adapter_model", tmp_path / "stock"),
        ("adapter_model_of_users", tmp_path / "stock" / "of-users"),
    ):
        (folder / "adapter_model.safetensors").unlink()
        torch.save(
            {name: tensor.detach() for name, tensor in adapter_parts(saved)[part].items()},
            folder / "adapter_model.bin",
        )
    uc.load(tmp_path / "stock", parts=adapter_parts(loaded))
    expected = adapter_parts(saved)
    assert all(
        torch.equal(tensor, expected[part][name])
        for part, tensors in adapter_parts(loaded).items()
        for name, tensor in tensors.items()
    )
    (tmp_path / "stock" / "of-users" / "adapter_model.bin").unlink()
    with pytest.raises(uc.IncompleteError, match=r"of-users: adapter_config.json without weights"):
        uc.open(tmp_path / "stock")


def test_trainer_adapters_load_with_their_optimizer(tmp_path: Path) -> None:
    def adapted() -> Any:
        return get_peft_model(
            model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )

    saved = trainer(tmp_path, stock=True, net=adapted(), max_steps=2)
    saved.train()
    other = adapted()
    parts = adapter_parts(other)
    trained = [parameter for parameter in other.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}, {"params": []}])
    report = uc.load(tmp_path / "checkpoint-2", parts=parts, optimizer=optimizer)
    assert report.step == 2
    inner = saved.optimizer.optimizer  # type: ignore[union-attr]
    parameters = {
        name: parameter
        for name, parameter in saved.model.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in other.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, parameters[name])
            assert all(
                torch.equal(value, inner.state[parameters[name]][key])
                for key, value in optimizer.state[parameter].items()
            )
    assert len(optimizer.state) == len(inner.state) == 8
    with uc.open(tmp_path / "checkpoint-2") as source:
        assert source.parts == ("adapter_model", "optimizer")


class Runs:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def test_hostile_adapter_is_refused_and_not_executed(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "adapter_config.json").write_text("{}")
    torch.save(Runs(tmp_path / "mark"), tmp_path / "c" / "adapter_model.bin")
    with pytest.raises(uc.FormatError, match=r"posix\.system"):
        uc.open(tmp_path / "c")
    assert not (tmp_path / "mark").exists()
    torch.save({"w": torch.ones(2)}, tmp_path / "c" / "adapter_model.bin")
    (tmp_path / "c" / "adapter_config.json").write_text("[")
    with pytest.raises(uc.FormatError, match=r"adapter_config.json: not valid JSON"):
        uc.open(tmp_path / "c")

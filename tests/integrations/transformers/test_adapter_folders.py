"""Adapter folders of PEFT and of the native Trainer open with the parts of our own saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import unified_ckpt as uc
from tests.support.integrations.trainers import model, trainer
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
    saved.save_pretrained(str(tmp_path / "native"))
    (tmp_path / "native" / "model.safetensors").write_text("weights of the base")
    expected = adapter_parts(saved)
    with uc.open(tmp_path / "native") as source:
        assert source.format == "peft"
        assert (
            set(source.parts)
            == {"adapter_model", "adapter_model_of_users"}
            == set(expected) - {"trainable"}
        )
        assert source.extra["adapters"]["adapter_model"]["r"] == 4
        assert source.source.metadata().left_out == ["model.safetensors"]
    report = uc.load(
        tmp_path / "native",
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


def test_trainer_adapters_load_with_their_optimizer(tmp_path: Path) -> None:
    def adapted() -> Any:
        return get_peft_model(
            model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )

    saved = trainer(tmp_path, native=True, net=adapted(), max_steps=2)
    saved.train()
    other = adapted()
    parts = adapter_parts(other)
    trained = [parameter for parameter in other.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}, {"params": []}])
    assert uc.load(tmp_path / "checkpoint-2", parts=parts, optimizer=optimizer).step == 2
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

"""PEFT adapters with Hugging Face's Trainer: compared with the stock Trainer, resumed, and opened
by stock PEFT.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    PromptEncoderConfig,
    get_peft_model,
)
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import unified_ckpt as uc
from tests.support.adapter_models import lora
from tests.support.trainers import STEPS, Sequences, StopAt, losses, model
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback
from unified_ckpt.integrations.transformers.adapters import adapter_parts, parameter_names

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*is deprecated and will be removed in v6:FutureWarning"
    ),  # PEFT calls it
    pytest.mark.filterwarnings("ignore:Could not find a config file in"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]


def lora_and_head() -> nn.Module:
    return get_peft_model(
        model(),
        LoraConfig(
            r=4,
            modules_to_save=["lm_head"],
            target_modules=["q_proj"],
            use_dora=True,
            bias="lora_only",
        ),
    )


def two() -> nn.Module:
    made = lora()
    torch.manual_seed(3)
    made.add_adapter("of-users", LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))  # type: ignore[operator]
    made.base_model.set_adapter(["default", "of-users"])  # type: ignore[union-attr, operator]
    return made


def freed() -> nn.Module:
    """A layer of the base made trainable by hand, which PEFT does not store."""
    made = lora()
    made.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    return made


def prompt() -> nn.Module:
    return get_peft_model(
        model(),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    )


def native() -> nn.Module:
    made = model()
    made.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    return made


KINDS: list[Callable[[], nn.Module]] = [lora, lora_and_head, two, freed, prompt, native]


def trainer(
    out: Path, of: nn.Module, *callbacks: TrainerCallback, stock: bool = False, **arguments: Any
) -> Trainer:
    told = TrainingArguments(
        output_dir=str(out),
        **{
            "max_steps": STEPS,
            "save_steps": 2,
            "logging_steps": 1,
            "seed": 1,
            "per_device_train_batch_size": 4,
            **arguments,
        },
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    ours = [] if stock else [UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False))]
    return Trainer(
        model=of,
        args=told,
        train_dataset=Sequences(),
        eval_dataset=Sequences(),
        callbacks=[*ours, *callbacks],
    )


def weights(of: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in of.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_equals_uninterrupted_stock_run(
    tmp_path: Path, kind: Callable[[], nn.Module]
) -> None:
    straight = trainer(tmp_path / "stock", kind(), stock=True)
    straight.train()
    trainer(tmp_path / "run", kind(), StopAt(4)).train()
    resumed = trainer(tmp_path / "run", kind())
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)
    expected = weights(straight.model)
    assert expected.keys() == weights(resumed.model).keys()
    assert [
        name
        for name, tensor in weights(resumed.model).items()
        if not torch.equal(tensor, expected[name])
    ] == []


def test_stock_peft_opens_the_folder_without_base_weights(tmp_path: Path) -> None:
    made = trainer(tmp_path, two(), save_steps=STEPS)
    made.train()
    folder = tmp_path / f"checkpoint-{STEPS}"
    assert uc.verify(folder, deep=True).ok
    with uc.open(folder) as source:
        assert sorted(source.parts) == ["adapter_model", "adapter_model_of_users", "optimizer"]
        assert (
            sum(
                one.startswith("adapter_model.") and one.endswith("exp_avg")
                for one in source["optimizer"]
            )
            == 8
        )
    assert not any(
        "model" in name and not name.startswith("adapter_model") for name in os.listdir(folder)
    )
    found = PeftModel.from_pretrained(model(), folder, is_trainable=True)
    found.load_adapter(folder / "of-users", "of-users", is_trainable=True)
    expected = weights(made.model)
    assert [
        name for name, tensor in weights(found).items() if not torch.equal(tensor, expected[name])
    ] == []
    assert json.loads((folder / "adapter_config.json").read_text())["inference_mode"]


@pytest.mark.parametrize("kind", [lora_and_head, prompt])
def test_stock_peft_computes_equal_outputs(tmp_path: Path, kind: Callable[[], nn.Module]) -> None:
    made = trainer(tmp_path, kind(), save_steps=STEPS)
    made.train()
    found = PeftModel.from_pretrained(model(), tmp_path / f"checkpoint-{STEPS}").eval()
    ids = Sequences()[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, made.model.eval()(input_ids=ids).logits)


def test_auto_class_and_stock_trainer_resume(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "base")

    def of_base() -> nn.Module:
        from transformers import AutoModelForCausalLM

        found = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return get_peft_model(
            found, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        )

    made = trainer(tmp_path / "run", of_base(), StopAt(4))
    made.train()
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    expected = weights(made.model)
    assert [
        name for name, tensor in weights(found).items() if not torch.equal(tensor, expected[name])
    ] == []
    stock = trainer(tmp_path / "run", of_base(), stock=True)
    stock.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert stock.state.global_step == STEPS


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    told = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "save_only_model": True,
    }
    stock = trainer(tmp_path / "stock", freed(), stock=True, **told)
    stock.train()
    made = trainer(tmp_path / "ours", freed(), **told)
    made.train()
    assert made.state.best_metric == stock.state.best_metric
    best = made.state.best_model_checkpoint
    assert best is not None
    assert Path(best).name == Path(str(stock.state.best_model_checkpoint)).name
    assert not any("optimizer" in name for name in os.listdir(best))
    expected = weights(made.model)
    other = trainer(tmp_path / "other", freed())
    uc.load(best, parts=adapter_parts(other.model))
    assert [
        name
        for name, tensor in weights(other.model).items()
        if not torch.equal(tensor, expected[name])
    ] == []


def test_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, lora(), StopAt(2)).train()
    other = trainer(tmp_path, freed())
    before = weights(other.model)
    with pytest.raises(uc.MismatchError, match=r"trainable:base_model.model.model.norm.weight"):
        other.train(resume_from_checkpoint=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(other.model).items())
    full = trainer(tmp_path, model())
    with pytest.raises(uc.MismatchError, match="model"):
        full.train(resume_from_checkpoint=True)


def test_adapters_with_equal_part_names_are_refused() -> None:
    made = lora()
    for name in ("a b", "a-b"):
        made.add_adapter(name, LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))  # type: ignore[operator]
    with pytest.raises(
        uc.LayoutError,
        match="adapter 'a-b': got the part name adapter_model_a_b of another adapter",
    ):
        adapter_parts(made)


def test_optimizer_state_has_the_names_of_saved_groups(tmp_path: Path) -> None:
    """By which a scheduler's rates follow the parameters."""
    made = trainer(tmp_path, two(), StopAt(2))
    made.train()
    with uc.open(tmp_path / "checkpoint-2") as source:
        saved = {name for group in source.source.metadata().groups for name in group["names"]}
    names = parameter_names(made.model)
    assert {names[id(p)] for group in made.optimizer.param_groups for p in group["params"]} == saved

"""PEFT adapters with Hugging Face's Trainer: compared with the native Trainer, resumed, and opened
by PEFT alone.
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
from transformers import Trainer, TrainerCallback

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.integrations.adapter_models import changing_lora, lora
from tests.support.integrations.trainers import SEQUENCES, STEPS, At, StopAt, losses, model, trainer
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback, base_state
from unified_ckpt.integrations.transformers.adapters import adapter_parts, parameter_names

pytestmark = [
    pytest.mark.integration,
    # PEFT calls the deprecated function
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
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


def two_adapters() -> nn.Module:
    model = lora()
    torch.manual_seed(3)
    model.add_adapter("of-users", LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))  # type: ignore[operator]
    model.base_model.set_adapter(["default", "of-users"])  # type: ignore[union-attr, operator]
    return model


def unfrozen_norm() -> nn.Module:
    """LoRA, and a norm of the base model that is trainable; PEFT does not store it."""
    model = lora()
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    return model


def prompt() -> nn.Module:
    return get_peft_model(
        model(),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    )


def native() -> nn.Module:
    adapted = model()
    adapted.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    return adapted


KINDS: list[Callable[[], nn.Module]] = [
    lora,
    lora_and_head,
    two_adapters,
    unfrozen_norm,
    prompt,
    native,
    changing_lora,
]


def adapter_trainer(
    out: Path, net: nn.Module, *callbacks: TrainerCallback, **arguments: Any
) -> Trainer:
    return trainer(out, *callbacks, net=net, learning_rate=1e-2, **arguments)


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_equals_uninterrupted_run(
    tmp_path: Path, kind: Callable[[], nn.Module]
) -> None:
    straight = adapter_trainer(tmp_path / "native", kind(), native=True)
    straight.train()
    adapter_trainer(tmp_path / "run", kind(), StopAt(4)).train()
    resumed = adapter_trainer(tmp_path / "run", kind())
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)
    check_equal(weights(resumed.model), weights(straight.model))


class FreezeHead(TrainerCallback):
    """Freezes the head of the base after two steps, also in a run that resumes later."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 2:
            kwargs["model"].base_model.model.lm_head.weight.requires_grad_(False)

    on_train_begin = on_step_end


def with_head() -> nn.Module:
    model = lora()
    model.get_parameter("base_model.model.lm_head.weight").requires_grad_(True)
    return model


def test_head_that_is_frozen_later_is_resumed(tmp_path: Path) -> None:
    """Its state stays in the optimizer, and its values are not those of the base."""
    straight = adapter_trainer(tmp_path / "native", with_head(), FreezeHead(), native=True)
    straight.train()
    adapter_trainer(tmp_path / "run", with_head(), FreezeHead(), StopAt(4)).train()
    resumed = adapter_trainer(tmp_path / "run", with_head(), FreezeHead())
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)
    check_equal(weights(resumed.model), weights(straight.model))


def test_head_that_is_frozen_later_is_in_a_save_of_the_model(tmp_path: Path) -> None:
    """A run without its optimizer resumes it too, and saves what it has loaded."""
    run = adapter_trainer(tmp_path / "a", with_head(), FreezeHead(), save_only_model=True)
    run.train()
    frozen = lora()
    again = adapter_trainer(tmp_path / "b", frozen, save_only_model=True)
    again._load_from_checkpoint(str(tmp_path / "a" / f"checkpoint-{STEPS}"))
    check_equal(weights(frozen), weights(run.model))
    again.train()
    other = adapter_trainer(tmp_path / "c", lora())
    other._load_from_checkpoint(str(tmp_path / "b" / f"checkpoint-{STEPS}"))
    check_equal(weights(other.model), weights(frozen))


def trained_names(folder: Path) -> set[str]:
    with uc.open(folder) as source:
        return {name.removeprefix("base_model.model.") for name in source["trainable"]}


def test_large_buffers_are_stored_if_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a quantized base are buffers. A save after an exception does not read them."""
    monkeypatch.setattr(base_state, "_SMALL_BUFFERS_NBYTES", 0)
    straight = adapter_trainer(tmp_path / "native", changing_lora(), native=True)
    straight.train()
    changed = {"balance", "average", "norm.running_mean", "norm.running_var"}
    changed |= {"norm.num_batches_tracked"}
    manager = uc.ManagerOptions(save_on_exception=True, asynchronous=False)
    callback = UnifiedCheckpointCallback(manager_options=manager)
    failure = At(5, lambda: 1 / 0, method="on_step_begin")
    failing = adapter_trainer(tmp_path / "run", changing_lora(), callback, failure, native=True)
    with pytest.raises(ZeroDivisionError):
        failing.train()
    assert trained_names(tmp_path / "run" / "checkpoint-4") == changed
    assert trained_names(tmp_path / "run" / "checkpoint-5") == {*changed, "table"}
    resumed = adapter_trainer(tmp_path / "run", changing_lora())
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)
    check_equal(weights(resumed.model), weights(straight.model))


@pytest.mark.parametrize("initialization", ["pissa_niter_4", "pissa", "olora"])
def test_base_that_an_adapter_changed_is_resumed(
    tmp_path: Path, initialization: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A random initialization leaves another base in every process."""

    def adapted(seed: int) -> nn.Module:
        base = model()
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=initialization)
        return get_peft_model(base, config)

    straight = adapter_trainer(tmp_path / "native", adapted(1), native=True)
    straight.train()
    adapter_trainer(tmp_path / "run", adapted(1), StopAt(4)).train()
    assert "init_lora_weights changed 2 weights of the base" in caplog.text
    resumed = adapter_trainer(tmp_path / "run", adapted(2))
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)
    check_equal(weights(resumed.model), weights(straight.model))


def test_quantized_base_that_an_adapter_changed_is_refused(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora")
    adapted = get_peft_model(model(), config)
    layer = adapted.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer")
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)  # type: ignore[operator, union-attr]
    with pytest.raises(uc.LayoutError, match=r"'olora': changed .*q_proj.base_layer.weight, which"):
        adapter_trainer(tmp_path, adapted)


def test_base_changes_are_followed_over_runs() -> None:
    """Between runs, wrappers may write to parameters, as DistributedDataParallel does."""
    changes, adapted = base_state.BaseChanges(), lora()
    names = ["base_model.model.model.norm.weight", "base_model.model.lm_head.weight"]
    first, second = map(adapted.get_parameter, names)
    for parameter in (first, second):
        with torch.no_grad():
            changes.start(adapted)
            assert changes.names(adapted, None) == {*names[: parameter is second]}
            parameter.add_(1)
            changes.stop(adapted)
            adapted.get_parameter("base_model.model.model.layers.0.mlp.up_proj.weight").add_(0)
    assert changes.names(adapted, None) == {*names}


def test_peft_opens_the_folder_without_base_weights(tmp_path: Path) -> None:
    run = adapter_trainer(tmp_path, two_adapters(), save_steps=STEPS)
    run.train()
    folder = tmp_path / f"checkpoint-{STEPS}"
    assert uc.verify(folder, deep=True).ok
    with uc.open(folder) as source:
        assert sorted(source.parts) == ["adapter_model", "adapter_model_of_users", "optimizer"]
        assert (
            sum(
                key.startswith("adapter_model.") and key.endswith("exp_avg")
                for key in source["optimizer"]
            )
            == 8
        )
    assert not any(
        "model" in name and not name.startswith("adapter_model") for name in os.listdir(folder)
    )
    loaded = PeftModel.from_pretrained(model(), folder, is_trainable=True)
    loaded.load_adapter(folder / "of-users", "of-users", is_trainable=True)
    check_equal(weights(loaded), weights(run.model))
    assert json.loads((folder / "adapter_config.json").read_text())["inference_mode"]


@pytest.mark.parametrize("kind", [lora_and_head, prompt])
def test_peft_computes_equal_outputs(tmp_path: Path, kind: Callable[[], nn.Module]) -> None:
    run = adapter_trainer(tmp_path, kind(), save_steps=STEPS)
    run.train()
    loaded = PeftModel.from_pretrained(model(), tmp_path / f"checkpoint-{STEPS}").eval()
    ids = SEQUENCES[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, run.model.eval()(input_ids=ids).logits)


def test_auto_class_and_native_trainer_resume(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "base")

    def of_base() -> nn.Module:
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return get_peft_model(
            base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        )

    run = adapter_trainer(tmp_path / "run", of_base(), StopAt(4))
    run.train()
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    check_equal(weights(loaded), weights(run.model))
    native = adapter_trainer(tmp_path / "run", of_base(), native=True)
    native.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert native.state.global_step == STEPS


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "save_only_model": True,
    }
    native = adapter_trainer(tmp_path / "native", unfrozen_norm(), native=True, **arguments)
    native.train()
    ours = adapter_trainer(tmp_path / "ours", unfrozen_norm(), **arguments)
    ours.train()
    assert ours.state.best_metric == native.state.best_metric
    best = ours.state.best_model_checkpoint
    assert best is not None
    assert Path(best).name == Path(str(native.state.best_model_checkpoint)).name
    assert not any("optimizer" in name for name in os.listdir(best))
    other = adapter_trainer(tmp_path / "other", unfrozen_norm())
    uc.load(best, parts=adapter_parts(other.model))
    check_equal(weights(other.model), weights(ours.model))


def test_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    adapter_trainer(tmp_path, lora(), StopAt(2)).train()
    other = adapter_trainer(tmp_path, unfrozen_norm())
    before = weights(other.model)
    with pytest.raises(uc.MismatchError, match=r"trainable:base_model.model.model.norm.weight"):
        other.train(resume_from_checkpoint=True)
    check_equal(weights(other.model), before)
    full = adapter_trainer(tmp_path, model())
    with pytest.raises(uc.MismatchError, match="model"):
        full.train(resume_from_checkpoint=True)


def test_adapters_with_equal_part_names_are_refused() -> None:
    model = lora()
    for name in ("a b", "a-b"):
        model.add_adapter(name, LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))  # type: ignore[operator]
    with pytest.raises(
        uc.LayoutError,
        match="adapter 'a-b': got the part name adapter_model_a_b of another adapter",
    ):
        adapter_parts(model)


def test_optimizer_state_has_the_names_of_saved_groups(tmp_path: Path) -> None:
    """A scheduler uses these names to assign its rates to parameters."""
    run = adapter_trainer(tmp_path, two_adapters(), StopAt(2))
    run.train()
    with uc.open(tmp_path / "checkpoint-2") as source:
        saved = {name for group in source.source.metadata().groups for name in group["names"]}
    names = parameter_names(run.model)
    assert {names[id(p)] for group in run.optimizer.param_groups for p in group["params"]} == saved

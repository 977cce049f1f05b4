"""Adapters: folders that PEFT opens, models with a merged LoRA, and averaged weights as a model.

PEFT and transformers are the oracles.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.support.foreign.paddles import FIXTURES
from tests.support.format.manifests import manifest_of
from tests.support.torch_training import train_step

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TOKENS = torch.arange(24).reshape(2, 12) % 64


def base_model(**sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **sizes,
        }
    )
    return transformers.LlamaForCausalLM(config).eval()


def save_base(folder: Path) -> None:
    base_model().save_pretrained(folder)


def save_adapter(folder: Path, *, seed: int = 1, **options: Any) -> None:
    """Save an adapter whose update is not zero."""
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **options}
    )
    model = peft.get_peft_model(base_model(), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=TOKENS).logits
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
    ],
)
def test_merged_model_is_that_of_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    save_base(tmp_path / "base")
    save_adapter(tmp_path / "adapter", **options)
    uc.convert(
        tmp_path / "base", tmp_path / "out", to="huggingface", adapter=str(tmp_path / "adapter")
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    model = peft.PeftModel.from_pretrained(base_model(), tmp_path / "adapter")
    expected = model.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(logits(merged), logits(base_model()), atol=1e-3)
    assert not (tmp_path / "out/adapter_config.json").exists()


def test_merge_reads_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unified_ckpt.views import materialize

    save_base(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    adapter = str(tmp_path / "adapter")
    uc.convert(tmp_path / "base", tmp_path / "whole", to="huggingface", adapter=adapter)
    monkeypatch.setattr(materialize, "CHUNK_NBYTES", 500)
    uc.convert(tmp_path / "base", tmp_path / "rows", to="huggingface", adapter=adapter)
    whole, rows = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "rows"))
    for name, tensor in whole.items():
        torch.testing.assert_close(rows[name], tensor, rtol=1e-6, atol=1e-6)


def test_merge_into_a_training_state_names_what_it_lacks(tmp_path: Path) -> None:
    base = base_model()
    optimizer = torch.optim.AdamW(base.parameters())
    train_step(optimizer)
    uc.save(tmp_path / "base", model=base, optimizer=optimizer, extra=1, rank_extra={"seed": 2})
    save_adapter(tmp_path / "adapter")
    report = uc.convert(tmp_path / "base", tmp_path / "out", adapter=str(tmp_path / "adapter"))
    assert report.left_out == ("optimizer",)
    manifest = manifest_of(tmp_path / "out")
    assert (manifest["omitted_parts"], manifest["optimizer"]) == (["optimizer"], None)
    with uc.open(tmp_path / "out") as opened:
        assert (opened.extra, list(opened.rank_extra)) == (1, [{"seed": 2}])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_dora": True}, "expected a plain LoRA, got.*use_dora=True"),
        ({"peft_type": "IA3"}, "expected a plain LoRA, got.*peft_type='IA3'"),
        ({"fan_in_fan_out": True}, "expected a plain LoRA, got.*fan_in_fan_out=True"),
        ({"alora_invocation_tokens": [5]}, r"expected a plain LoRA, got.*tokens=\[5\]"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "expected a plain LoRA, got.*layer_replication"),
        ({"arrow_config": {"top_k": 2}}, "expected a plain LoRA, got.*arrow_config"),
        *(
            ({"init_lora_weights": init}, f"init_lora_weights='{init}' also changed the weights")
            for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
        ),
    ],
)
def test_other_adapters_are_not_merged(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    save_base(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(uc.FormatError, match=f"(?s){text}"):
        uc.convert(tmp_path / "base", tmp_path / "out", adapter=str(tmp_path / "adapter"))
    assert not (tmp_path / "out").exists()


def test_adapter_of_another_model_is_not_merged(tmp_path: Path) -> None:
    base_model(hidden_size=16).save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    with pytest.raises(uc.FormatError, match=r"(?s)other shapes have.*q_proj.weight: got \(32, 32"):
        uc.convert(tmp_path / "base", tmp_path / "out", adapter=str(tmp_path / "adapter"))
    base_model(num_hidden_layers=1).save_pretrained(tmp_path / "small")
    with pytest.raises(uc.FormatError, match=r"(?s)which lacks.*layers.1.self_attn.q_proj.weight"):
        uc.convert(tmp_path / "small", tmp_path / "out", adapter=str(tmp_path / "adapter"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_neither_merged_nor_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    """Their scales are tensors of their own."""
    save_base(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    path, name = tmp_path / "base/model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype)}, path)
    with pytest.raises(uc.FormatError, match=rf"into quantized weights(.|\n)*{name} [IF]8"):
        uc.convert(tmp_path / "base", tmp_path / "out", adapter=str(tmp_path / "adapter"))
    if dtype.is_floating_point:
        with pytest.raises(uc.FormatError, match=rf"dtype: got quantized(.|\n)*{name} F8_E4M3"):
            uc.convert(tmp_path / "base", tmp_path / "out", model_dtype="bfloat16")
    assert not (tmp_path / "out").exists()


def test_tensors_beside_the_pairs_are_not_lost(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.weight": torch.ones(64, 32)}, path)
    with pytest.raises(uc.FormatError, match=r"(?s)more than the pairs of a LoRA.*lm_head"):
        uc.convert(tmp_path / "base", tmp_path / "out", adapter=str(tmp_path / "adapter"))


def test_parent_folder_of_adapters_opens(tmp_path: Path) -> None:
    parent = tmp_path / "adapters"
    for seed, name in enumerate(("first", "second"), 1):
        save_adapter(parent / name, seed=seed)
    with uc.open(parent) as opened:
        assert opened.format == "peft"
        assert set(opened.parts) == {"adapter_model_first", "adapter_model_second"}
        for name, tensor in load_file(parent / "second/adapter_model.safetensors").items():
            assert torch.equal(opened["adapter_model_second"][name][...], tensor)
    with pytest.raises(uc.FormatError, match="got several adapters"):
        uc.convert(parent, tmp_path / "out", to="peft")
    uc.convert(parent, tmp_path / "out", to="peft", parts=("adapter_model_second",))
    for folder in (tmp_path / "out", parent / "second"):
        model = peft.PeftModel.from_pretrained(base_model(), folder)
        assert torch.equal(
            logits(model), logits(peft.PeftModel.from_pretrained(base_model(), parent / "second"))
        )


def test_configuration_of_an_adapter_is_found_by_its_part(tmp_path: Path) -> None:
    """Also where the part has another name than the folder, and where only `extra` has it."""
    parent, trained = tmp_path / "adapters", tmp_path / "trained"
    save_adapter(parent / "my-adapter")
    weights = load_file(parent / "my-adapter/adapter_model.safetensors")
    uc.save(trained, parts={"adapter_model_my_adapter": weights})
    (trained / "my-adapter").mkdir()
    shutil.copy(parent / "my-adapter/adapter_config.json", trained / "my-adapter")
    uc.convert(parent, tmp_path / "unified")
    for name, source in (("a", trained), ("b", tmp_path / "unified")):
        uc.convert(source, tmp_path / name, to="peft")
        model = peft.PeftModel.from_pretrained(base_model(), tmp_path / name)
        loaded = peft.get_peft_model_state_dict(model)
        assert all(torch.equal(loaded[key], tensor) for key, tensor in weights.items())


@pytest.mark.parametrize("old", ["base_model.model.", ".lora_A.weight"])
def test_names_that_peft_does_not_find_are_refused(tmp_path: Path, old: str) -> None:
    """PEFT warns, and its adapter is a fresh one. Names in memory have the adapter's name."""
    save_adapter(tmp_path / "lora")
    weights = load_file(tmp_path / "lora/adapter_model.safetensors")
    new = ".lora_A.default.weight" if "lora" in old else ""
    renamed = {name.replace(old, new): tensor for name, tensor in weights.items()}
    uc.save(tmp_path / "trained", parts={"adapter_model": renamed, "ema": {"w": torch.ones(2)}})
    shutil.copy(tmp_path / "lora/adapter_config.json", tmp_path / "trained")
    with pytest.raises(uc.FormatError, match="PEFT does not read these names"):
        uc.convert(tmp_path / "trained", tmp_path / "new", to="peft", parts=("adapter_model",))
    assert not (tmp_path / "new").exists()
    if not new:
        rule = {"match": "*", "to": "base_model.model.{1}", "parts": ["adapter_model"]}
        source = uc.SourceOptions(rename=[rule])
        report = uc.convert(tmp_path / "trained", tmp_path / "new", to="peft", source=source)
        assert report.left_out == ("ema",)
        check = load_file(tmp_path / "new/adapter_model.safetensors")
        assert all(torch.equal(check[name], tensor) for name, tensor in weights.items())


def test_steps_with_adapters_are_not_a_parent_folder(tmp_path: Path) -> None:
    """A run of the stock Trainer: its newest step is meant, not an adapter named checkpoint-8."""
    save_adapter(tmp_path / "run/checkpoint-8")
    (tmp_path / "run/checkpoint-8/trainer_state.json").write_text("{}")
    with pytest.raises(uc.CheckpointError):
        uc.open(tmp_path / "run")


def test_paddle_adapter_as_a_folder_of_peft(tmp_path: Path) -> None:
    uc.convert(FIXTURES / "lora_tp2", tmp_path / "out", to="peft")
    config = peft.LoraConfig.from_pretrained(tmp_path / "out")
    assert (config.r, config.lora_alpha) == (4, 8)
    model = peft.PeftModel.from_pretrained(base_model(), tmp_path / "out")
    loaded = peft.get_peft_model_state_dict(model)
    with uc.open(FIXTURES / "lora_tp2") as opened:
        names = set(opened["model"])
        assert names == set(loaded)
        assert all(torch.equal(loaded[name], opened["model"][name][...]) for name in names)


def test_averaged_weights_as_a_model(tmp_path: Path) -> None:
    """What the average lacks is the model's, so that nothing is left at random."""
    model = base_model()
    ema = {name: tensor.float() + 1 for name, tensor in model.named_parameters()}
    del ema["lm_head.weight"]
    uc.save(tmp_path / "c", model=model, parts={"ema": ema}, attach=model.config.save_pretrained)
    uc.convert(tmp_path / "c", tmp_path / "out", to="huggingface", parts=("ema",))
    averaged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in averaged.named_parameters():
        assert torch.equal(tensor, ema.get(name, model.state_dict()[name])), name
    with pytest.raises(uc.NotFoundError, match="expected emma and the model"):
        uc.convert(tmp_path / "c", tmp_path / "other", to="huggingface", parts=("emma",))


def test_averaged_weights_with_other_names_are_refused(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model={"a": torch.ones(2)}, parts={"ema": {"module.a": torch.ones(2)}})
    with pytest.raises(uc.FormatError, match=r"(?s)expected the model's names.*module.a"):
        uc.convert(tmp_path / "c", tmp_path / "out", to="huggingface", parts=("ema",))

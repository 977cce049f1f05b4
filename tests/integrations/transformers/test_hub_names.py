"""Hub names of models with stacked experts, compared with `save_pretrained`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NomicBertConfig,
    NomicBertModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import unified_ckpt as uc
from tests.support.equality import check_equal
from unified_ckpt.integrations.transformers import open_hub_names, open_model_names
from unified_ckpt.integrations.transformers.hub_names import hub_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QUICK = uc.SaveOptions(fsync=False)


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=3))


def qwen(seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **SIZES,
        head_dim=4,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    return Qwen3MoeForCausalLM(config)


MODELS = pytest.mark.parametrize("make", [mixtral, qwen], ids=["mixtral", "qwen3_moe"])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name in os.listdir(folder):
        if name.startswith("model") and name.endswith(".safetensors"):
            tensors |= load_file(folder / name)
    return tensors


@MODELS
@pytest.mark.parametrize("from_config", [False, True])
def test_hub_names_equal_those_of_save_pretrained(
    tmp_path: Path, make: Any, from_config: bool
) -> None:
    model = make()
    model.save_pretrained(tmp_path / "hub")
    uc.save(tmp_path / "ours", model=model, attach=attach(model), options=QUICK)
    needed = stored(tmp_path / "hub")
    assert needed.keys() != stored(tmp_path / "ours").keys(), "or the test proves nothing"
    with open_hub_names(tmp_path / "ours", model=None if from_config else model) as source:
        assert source.parts == ("model",)
        check_equal({name: view[...] for name, view in source["model"].items()}, needed)


def attach(model: Any) -> Any:
    """Write the configuration as a Trainer does, with the name of the model class."""
    model.config.architectures = [type(model).__name__]
    return model.config.save_pretrained


@MODELS
@pytest.mark.parametrize("max_shard_size", ["50GB", "10KB"], ids=["one file", "many files"])
def test_hub_folder_loads_into_the_model(tmp_path: Path, make: Any, max_shard_size: str) -> None:
    model = make()
    model.save_pretrained(tmp_path / "hub", max_shard_size=max_shard_size)
    other = make(seed=1)
    report = uc.load(tmp_path / "hub", model=other)
    check_equal(other.state_dict(), model.state_dict())
    assert report.bytes_read == sum(tensor.nbytes for tensor in model.state_dict().values())


def test_folder_with_model_names_is_unchanged(tmp_path: Path) -> None:
    model, other = mixtral(), mixtral(seed=1)
    uc.save(tmp_path / "ours", model=model, options=QUICK)
    report = uc.load(tmp_path / "ours", model=other)
    check_equal(other.state_dict(), model.state_dict())
    assert report.verified_bytes == report.bytes_read, "its digests are those of the folder"


def test_saved_view_opens_with_hub_names(tmp_path: Path) -> None:
    model = mixtral()
    uc.save(tmp_path / "ours", model=model, attach=attach(model), options=QUICK)
    loaded = MixtralForCausalLM.from_pretrained(tmp_path / "ours")
    assert hub_tensors(loaded) == hub_tensors(model), "though its own loading has renamed nothing"
    with open_hub_names(tmp_path / "ours") as source:
        tensors = {name: view[...] for name, view in source["model"].items()}
    uc.save(tmp_path / "hub", model=tensors, attach=model.config.save_pretrained, options=QUICK)
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    check_equal(reopened.state_dict(), model.state_dict())


def test_master_weights_have_hub_names(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "hub")
    uc.save(
        tmp_path / "ours", model=model, options=uc.SaveOptions(model_dtype="bfloat16", fsync=False)
    )
    with open_hub_names(tmp_path / "ours", model=model) as source:
        needed = stored(tmp_path / "hub")
        check_equal(
            {name: view[...] for name, view in source["model"].items()},
            {n: t.to(torch.bfloat16) for n, t in needed.items()},
        )
        masters = {name: view[...] for name, view in source["master_weights"].items()}
        check_equal(masters, {name: needed[name] for name in masters})


@MODELS
@pytest.mark.parametrize("differ", [False, True])
def test_state_with_hub_names_follows_its_parameters(
    tmp_path: Path, make: Any, differ: bool
) -> None:
    """As another engine saves it, per expert: moments are joined, steps must be equal."""
    model, other = make(), make(seed=1)
    model.save_pretrained(tmp_path / "hub")
    weights = stored(tmp_path / "hub")
    moments = {"exp_avg": 2.0, "exp_avg_sq": 3.0}
    state = {f"{n}/{moment}": t * by for n, t in weights.items() for moment, by in moments.items()}
    state |= {f"{name}/step": torch.tensor(5.0) for name in weights}
    if differ:
        name = next(name for name in weights if "experts.1." in name)
        state[f"{name}/step"] = torch.tensor(6.0)
    masters = {name: tensor.double() for name, tensor in weights.items()}
    uc.save(
        tmp_path / "theirs",
        model=weights,
        optimizer=state,
        parts={"ema": masters},
        options=QUICK,
    )
    optimizer = torch.optim.AdamW(other.parameters())
    ema = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in model.state_dict().items()}
    targets: dict[str, Any] = {"model": other, "optimizer": optimizer, "parts": {"ema": ema}}
    if differ:
        with pytest.raises(uc.CheckpointError, match=r"experts(.|\n)*step"):
            uc.load(tmp_path / "theirs", **targets)
        return
    uc.load(tmp_path / "theirs", **targets)
    check_equal(other.state_dict(), model.state_dict())
    check_equal(ema, {name: tensor.double() for name, tensor in model.state_dict().items()})
    for parameter in other.parameters():
        entries = optimizer.state[parameter]
        assert {name: entries[name].equal(parameter * by) for name, by in moments.items()} == {
            "exp_avg": True,
            "exp_avg_sq": True,
        }
        assert entries["step"] == 5


def test_missing_expert_is_named(tmp_path: Path) -> None:
    model, other = mixtral(), mixtral(seed=1)
    model.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    missing = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != missing}, file)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(uc.MismatchError) as caught:
        uc.load(tmp_path / "hub", model=other)
    assert caught.value.missing == ("model:model.layers.1.mlp.experts.gate_up_proj",)
    assert "model:model.layers.1.block_sparse_moe.experts.2.w3.weight" in caught.value.unexpected
    check_equal(other.state_dict(), before)


def test_model_with_hub_names_in_memory_is_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=24, tie_word_embeddings=True))
    uc.save(tmp_path / "ours", model=model, attach=attach(model), options=QUICK)
    with open_hub_names(tmp_path / "ours") as source:
        check_equal(
            {name: view[...] for name, view in source["model"].items()}, stored(tmp_path / "ours")
        )
        assert torch.equal(source["model"]["lm_head.weight"][...], model.lm_head.weight)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    uc.save(tmp_path / "ours", model=mixtral(), options=QUICK)
    with pytest.raises(
        uc.NotFoundError,
        match=r"no config.json that names the model; pass model=\.\.\.",
    ):
        open_hub_names(tmp_path / "ours")
    with pytest.raises(uc.NotFoundError, match="there is no such folder"):
        open_model_names(tmp_path / "nothing", model=mixtral())


def test_fused_hub_tensors_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    }
    with pytest.raises(
        uc.FormatError,
        match=r"Wqkv.weight: transformers .* derives it from NomicBertModel's tensors by more "
        r"than slicing",
    ):
        hub_tensors(NomicBertModel(NomicBertConfig(**sizes)))

"""`convert --to huggingface`: transformers opens the folder with the saved weights, or an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaModel

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.foreign.dcp_folders import save_dcp
from tests.support.foreign.expert_models import mixtral
from tests.support.foreign.paddles import llama

Tensors = dict[str, torch.Tensor]
QUICK = uc.SaveOptions(fsync=False)
STACKED = uc.SourceOptions(layers="stacked")


def attach(model: Any, **changes: Any) -> Callable[[str], object]:
    """Write the model's config.json with some changes."""
    model.config.architectures = [type(model).__name__]

    def write(folder: str) -> None:
        config = json.loads(model.config.to_json_string(use_diff=False)) | changes
        Path(folder, "config.json").write_text(json.dumps(config))

    return write


def opened(folder: Path) -> Tensors:
    """Return the tensors that `from_pretrained` loads. It must find every weight."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    return dict(model.state_dict())


def test_stacked_layers_are_unstacked(tmp_path: Path) -> None:
    model = llama()
    uc.save(tmp_path / "u", model=model, attach=attach(model), options=QUICK)
    uc.convert(tmp_path / "u", tmp_path / "stacked", source=STACKED)
    report = uc.convert(tmp_path / "stacked", tmp_path / "hf", to="huggingface")
    assert report.notes == ("layers were unstacked along dim 0, as from_pretrained has them",)
    check_equal(opened(tmp_path / "hf"), dict(model.state_dict()))


def test_stacked_layers_of_an_unknown_model_are_unstacked(tmp_path: Path) -> None:
    """Without a class of transformers, names with numbers of layers are what to go by."""
    model, changes = llama(), {"architectures": ["MyModel"], "model_type": "mine"}
    uc.save(tmp_path / "u", model=model, attach=attach(model, **changes), options=QUICK)
    uc.convert(tmp_path / "u", tmp_path / "stacked", source=STACKED)
    report = uc.convert(tmp_path / "stacked", tmp_path / "hf", to="huggingface")
    assert report.notes[0].startswith("names were not checked: ")
    check_equal(load_file(tmp_path / "hf" / "model.safetensors"), dict(model.state_dict()))


TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48, "image_size": 8, "patch_size": 4}
HEADS = {"num_attention_heads": 4}
MODELS: Mapping[str, Callable[[], Any]] = {
    "conv1d": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    ),
    "tied to the encoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "other prefixes on the hub": lambda: transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION, **HEADS, num_hidden_layers=2),
            text_config=transformers.LlamaConfig(**TINY, **HEADS),
            image_token_index=3,
        )
    ),
    "head for classes": lambda: transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**TINY, **HEADS, pad_token_id=0)
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers_are_converted(tmp_path: Path, kind: str) -> None:
    model, other = MODELS[kind](), MODELS[kind]()
    uc.save(tmp_path / "u", model=model, attach=attach(model), options=QUICK)
    model.save_pretrained(tmp_path / "hub")
    for name in ("u", "hub"):
        report = uc.convert(tmp_path / name, tmp_path / f"{name}-hf", to="huggingface")
        assert all(note.startswith("names of tied tensors") for note in report.notes)
        converted = type(model).from_pretrained(tmp_path / f"{name}-hf")
        check_equal(dict(converted.state_dict()), dict(model.state_dict()))
    uc.load(tmp_path / "hub", model=other)
    check_equal(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("names", ["memory", "hub"])
def test_both_names_of_experts_are_known(tmp_path: Path, names: str) -> None:
    model = mixtral()
    if names == "hub":
        model.save_pretrained(tmp_path / "source")
    else:
        uc.save(tmp_path / "source", model=model, attach=attach(model), options=QUICK)
    assert uc.convert(tmp_path / "source", tmp_path / "hf", to="huggingface").notes == ()
    check_equal(opened(tmp_path / "hf"), dict(model.state_dict()))


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace("model.", "net.", 1): tensor for name, tensor in tensors.items()}


def without_a_layer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}


def stacked_along_the_last_dim(tensors: Tensors) -> Tensors:
    layers = {name: tensors[name.replace(".0.", ".1.")] for name in tensors if ".0." in name}
    return without_a_layer({n: t for n, t in tensors.items() if n not in layers}) | {
        name.replace(".0.", "."): torch.stack([tensors[name], other], dim=-1)
        for name, other in layers.items()
    }


def of_another_size(tensors: Tensors) -> Tensors:
    return {**tensors, "model.norm.weight": torch.ones(7)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (renamed, r"model.embed_tokens.weight(.|\n)*got a model with lm_head.weight, net"),
        (without_a_layer, r"would start with random values for \(9\):\n  model.layers.1"),
        (stacked_along_the_last_dim, r"model.layers.0(.|\n)*layer_dim=..."),
        (of_another_size, r"model.norm.weight: got shape \(7,\), expected \(32,\)"),
    ],
)
@pytest.mark.parametrize("kind", ["unified", "dcp"])
def test_models_that_would_be_random_are_refused(
    tmp_path: Path, change: Callable[[Tensors], Tensors], text: str, kind: str
) -> None:
    model, source = llama(), tmp_path / "source"
    tensors = change(dict(model.state_dict()))
    if kind == "dcp":
        save_dcp({"model": tensors}, source)
        attach(model)(str(source))
    else:
        uc.save(source, model=tensors, attach=attach(model), options=QUICK)
    with pytest.raises(uc.FormatError, match=text):
        uc.convert(source, tmp_path / "hf", to="huggingface")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_names_of_maxtext_are_refused(tmp_path: Path) -> None:
    model = llama()
    uc.save(tmp_path / "u", model=model, attach=attach(model), options=QUICK)
    uc.convert(tmp_path / "u", tmp_path / "maxtext", to="maxtext")
    with pytest.raises(uc.FormatError, match=r"random values for(.|\n)*decoder.decoder_norm"):
        uc.convert(tmp_path / "maxtext", tmp_path / "hf", to="huggingface")


def test_what_from_pretrained_does_not_read_is_noted(tmp_path: Path) -> None:
    model = llama()
    backbone = LlamaModel(model.config).state_dict()
    cases = {
        "head": (backbone, r"creates anew for LlamaForCausalLM: lm_head.weight"),
        "other": ({**model.state_dict(), "score.weight": torch.ones(2)}, "does not read .* score"),
        "quantized": ({"a.qweight": torch.ones(2)}, "is quantized, so its names were not checked"),
        "none": ({"a": torch.ones(2)}, "there is no config.json, so names were not checked"),
    }
    for name, (tensors, text) in cases.items():
        changes = {"quantization_config": {"quant_method": "gptq"}} if name == "quantized" else {}
        write = attach(model, **changes) if name != "none" else None
        uc.save(tmp_path / name, model=tensors, attach=write, options=QUICK)
        (note,) = uc.convert(tmp_path / name, tmp_path / f"{name}-hf", to="huggingface").notes
        assert re.search(text, note), note


def test_a_model_folder_that_lacks_weights_is_copied(tmp_path: Path) -> None:
    """Such folders are on the hub, as those of BERT without a pooler."""
    llama().save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if name != "model.norm.weight"}
    save_file(tensors, file, metadata={"format": "pt"})
    (note,) = uc.convert(tmp_path / "hub", tmp_path / "hf", to="huggingface").notes
    assert note == "from_pretrained creates anew for LlamaForCausalLM: model.norm.weight"

"""PaddleNLP Unified Checkpoints are read bit for bit in torch's names and layout.

Damaged and ambiguous ones are rejected.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.support.paddle_files import changed, rewritten, same
from tests.support.paddles import FIXTURES, as_torch, copied, llama, stored, torch_name
from unified_ckpt.cli.main import main
from unified_ckpt.options import SourceOptions
from unified_ckpt.sources.detect.paddle import is_paddle

STATES = {"moment1_0": "exp_avg", "moment2_0": "exp_avg_sq"}


def check_weights(source: Any, part: str, expected: dict[str, torch.Tensor]) -> None:
    assert set(source[part]) == {torch_name(name) for name in expected}
    for name, tensor in expected.items():
        assert same(source[part][torch_name(name)][...], as_torch(name, tensor)), name


def check_moments(source: Any, expected: dict[str, torch.Tensor]) -> None:
    moments = {name: tensor for name, tensor in expected.items() if "moment" in name}
    for name, tensor in moments.items():
        owner, _, kind = name.partition("/")
        assert same(
            source["optimizer"][f"{torch_name(owner)}/{STATES[kind]}"][...], as_torch(name, tensor)
        ), name
    owners = {torch_name(name.partition("/")[0]) for name in moments}
    assert set(source["optimizer"]) == {
        f"{owner}/{kind}" for owner in owners for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    assert all(
        same(source["optimizer"][f"{owner}/step"][...], torch.tensor(2.0)) for owner in owners
    )


@pytest.mark.parametrize("name", ["single_bf16", "tp2_nomerge", "tp2_skip"])
def test_all_layouts_are_bitwise_equal(name: str) -> None:
    """The fixtures are one state, written whole, by two ranks without merging, and with master
    weights in place of the model.
    """
    whole = FIXTURES / "single_bf16"
    with uc.open(FIXTURES / name) as source:
        check_weights(source, "model", stored(whole, "model-"))
        check_weights(source, "master_weights", stored(whole, "master_weights"))
        check_moments(source, stored(whole, "optimizer"))
        assert source.format == "paddle"
        assert source.step == 2
        assert source.extra["scheduler"] == {"last_epoch": 2, "last_lr": 0.001}
        assert source.source.metadata().groups[0]["options"] == {"lr": 0.001, "betas": (0.9, 0.999)}


@pytest.mark.parametrize(
    ("name", "stage", "expected"),
    [
        # sha256 of what Paddle 3.0.0 itself makes of them: `dequant_unified_optimizer(...,
        # use_pd=True)` of paddlenlp 3.0.0b4
        ("tp2_O1_rm", "O1", "480eddbfdc1bd1f1fc6b6b290e29ea6b16454e299a08a532e07d88ff2ed2c748"),
        ("single_O2", "O2", "122ffa46a2f19f23ed8dd38b1e67a1f357bf2036e625bb09f3b435d27a23599b"),
    ],
)
def test_quantized_moments_equal_paddles(
    tmp_path: Path, name: str, stage: str, expected: str
) -> None:
    folder = copied(name, tmp_path / "c")
    assert (
        json.loads((folder / "optimizer.safetensors.index.json").read_text())["ckpt_quant_stage"]
        == stage
    )
    digest = hashlib.sha256()
    with uc.open(folder) as source:
        for key in sorted(
            one
            for one in json.loads((folder / "optimizer.safetensors.index.json").read_text())[
                "weight_map"
            ]
            if "moment" in one
        ):
            owner, _, kind = key.partition("/")
            moment = source["optimizer"][f"{torch_name(owner)}/{STATES[kind]}"][...]
            digest.update(key.encode() + as_torch(key, moment).contiguous().numpy().tobytes())
        if name == "tp2_O1_rm":
            assert "master_weights" not in source.parts  # `remove_master_weight`
            check_weights(source, "model", stored(FIXTURES / "single_bf16", "model-"))
    assert digest.hexdigest() == expected


@pytest.mark.parametrize(
    "box",
    [(slice(3, 9), slice(5, 8)), (slice(31, 33), slice(0, 64)), (slice(63, 64), slice(63, 64))],
)
def test_slices_of_quantized_and_joined_tensors(tmp_path: Path, box: tuple[slice, slice]) -> None:
    for name, key in (
        ("single_O2", "mlp.gate_proj"),
        ("tp2_O1_rm", "mlp.gate_proj"),
        ("tp2_nomerge", "mlp.gate_proj"),
    ):
        with uc.open(copied(name, tmp_path / name)) as source:
            tensor = source["optimizer"][f"model.layers.1.{key}.weight/exp_avg_sq"]
            assert same(tensor[box], tensor[...][box])


def test_square_weight_is_transposed_embedding_is_not() -> None:
    """[in, out] and [out, in] of q_proj and o_proj look alike, as do both ways to see them in a
    32x32 model.
    """
    files = stored(FIXTURES / "single_bf16", "model-")
    with uc.open(FIXTURES / "single_bf16") as source:
        for layer in ("self_attn.q_proj", "self_attn.o_proj"):
            name = f"layers.0.{layer}.weight"
            assert files[f"llama.{name}"].shape == (32, 32)
            assert same(source["model"][f"model.{name}"][...], files[f"llama.{name}"].t())
            assert not same(source["model"][f"model.{name}"][...], files[f"llama.{name}"])
        assert same(
            source["model"]["model.embed_tokens.weight"][...], files["llama.embed_tokens.weight"]
        )
        assert source["model"]["lm_head.weight"].shape == (64, 32)


def test_tied_embedding_has_two_names() -> None:
    """Symptom elsewhere: KeyError 'llama.embed_tokens.weight/moment2_0' when one process's tied
    checkpoint is loaded by several.
    """
    folder = FIXTURES / "single_tied"
    head = "lm_head.weight"
    with uc.open(folder) as source:
        assert head not in set(source["model"])
        for part in ("model", "master_weights"):
            expected = stored(folder, "model-" if part == "model" else part)[head]
            assert expected.shape == (64, 32)
            assert same(source[part]["model.embed_tokens.weight"][...], expected)
            assert same(source[part][head][...], expected)
        assert same(
            source["optimizer"]["model.embed_tokens.weight/exp_avg"][...],
            stored(folder, "optimizer")[f"{head}/moment1_0"],
        )
    model = llama(tied=True).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    masters = {name: tensor.detach().float() for name, tensor in model.named_parameters()}
    uc.load(
        folder,
        model=model,
        optimizer=optimizer,
        master_weights=masters,
        options=uc.LoadOptions(cast=True),
    )
    assert same(model.lm_head.weight.detach(), stored(folder, "model-")[head])
    moment = stored(folder, "optimizer")[f"{head}/moment2_0"]
    assert same(optimizer.state[model.lm_head.weight]["exp_avg_sq"], moment.to(torch.bfloat16))


def test_tied_tensors_that_differ_are_rejected(tmp_path: Path) -> None:
    folder = copied("single_tied", tmp_path / "c")
    path = folder / "model-00001-of-00001.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"].view(torch.int16)[7, 7] += 1
    save_file(tensors, path, metadata={"format": "np"})
    with pytest.raises(uc.IntegrityError, match=r"embed_tokens.weight: values in .* differ"):
        uc.load(folder, model=llama(tied=True).to(torch.bfloat16))


def test_lora_adapter_has_peft_names() -> None:
    files = stored(FIXTURES / "lora_tp2", "peft_model")
    with uc.open(FIXTURES / "lora_tp2") as source:
        for name, tensor in files.items():
            assert same(
                source["model"][f"base_model.model.{torch_name(name)}.weight"][...], tensor.t()
            )
        moments = {
            name: tensor
            for name, tensor in stored(FIXTURES / "lora_tp2", "optimizer").items()
            if "moment" in name
        }
        for name, tensor in moments.items():
            owner, _, kind = name.partition("/")
            key = f"base_model.model.{torch_name(owner)}.weight/{STATES[kind]}"
            assert same(source["optimizer"][key][...], tensor.t())
        assert len(source["optimizer"]) == len(moments) // 2 * 3


def test_peft_loads_the_lora_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    uc.convert(FIXTURES / "lora_tp2", tmp_path / "c")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers for what is deprecated
        model = get_peft_model(
            llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        )
    result = set_peft_model_state_dict(model, load_file(tmp_path / "c" / "model.safetensors"))
    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora" in name]


def test_training_resumes_in_torch() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0, betas=(0.1, 0.2))
    report = uc.load(
        FIXTURES / "tp2_nomerge", model=model, optimizer=optimizer
    )  # a float32 model: from the master weights
    assert report.step == 2
    assert optimizer.param_groups[0]["lr"] == 0.001
    assert tuple(optimizer.param_groups[0]["betas"]) == (0.9, 0.999)
    masters = stored(FIXTURES / "single_bf16", "master_weights")
    for name, tensor in masters.items():
        assert same(
            model.get_parameter(torch_name(name)).detach(), as_torch(name, tensor).contiguous()
        )
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


@pytest.mark.parametrize(
    "name", ["single_bf16", "tp2_nomerge", "tp2_skip", "tp2_O1_rm", "single_tied", "lora_tp2"]
)
def test_convert_inspect_and_diff(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(FIXTURES / name), str(tmp_path / "c")]) == 0
    assert main(["verify", str(tmp_path / "c"), "--deep"]) == 0
    assert main(["diff", str(FIXTURES / name), str(tmp_path / "c")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(FIXTURES / name)]) == 0
    assert "PaddleNLP Unified Checkpoint" in capsys.readouterr().out


def test_own_names_and_unknown_models(tmp_path: Path) -> None:
    with uc.open(FIXTURES / "single_bf16", options=SourceOptions(names="own")) as source:
        files = stored(FIXTURES / "single_bf16", "model-")
        assert set(source["model"]) == set(files)
        assert all(
            same(source["model"][name][...], as_torch(name, tensor))
            for name, tensor in files.items()
        )
    folder = copied("single_bf16", tmp_path / "c")
    changed(folder, "config.json", model_type="ernie_next")
    with uc.open(folder) as source:
        assert "llama.norm.weight" in source["model"]
    with pytest.raises(
        uc.FormatError, match="no Hugging Face names are known for model_type 'ernie_next'"
    ):
        uc.open(folder, options=SourceOptions(names="huggingface"))


# ---- what a folder is


def model_only(tmp_path: Path, name: str = "single_bf16") -> Path:
    """What PaddleNLP's last `save_model` leaves: every name in it is Hugging Face's too."""
    folder = copied(name, tmp_path / "c")
    for path in [
        *folder.glob("optimizer*"),
        *folder.glob("master*"),
        folder / "scheduler.pdparams",
        folder / "trainer_state.json",
    ]:
        path.unlink()
    return folder


def test_folder_with_hugging_face_names_is_paddle(tmp_path: Path) -> None:
    """Symptom elsewhere: bfloat16 is read as integers (U16), and weights are transposed."""
    folder = model_only(tmp_path)
    with uc.open(folder) as source:
        assert source.format == "paddle"
        check_weights(source, "model", stored(FIXTURES / "single_bf16", "model-"))


def test_numpy_headers_alone_do_not_prove_the_layout(tmp_path: Path) -> None:
    folder = model_only(tmp_path)
    changed(folder, "config.json", paddlenlp_version=None, model_type="stranger")
    with pytest.raises(uc.FormatError, match="only headers show that PaddleNLP wrote it"):
        uc.open(folder)
    (folder / "config.json").unlink()
    with pytest.raises(uc.FormatError, match="only headers show"):
        uc.open(folder)
    with uc.open(folder, options=SourceOptions(config=str(FIXTURES / "single_bf16"))) as source:
        assert source["model"]["lm_head.weight"].shape == (64, 32)


def test_transposed_weights_are_rejected_by_the_config(tmp_path: Path) -> None:
    folder = model_only(tmp_path)
    path = folder / "model-00001-of-00001.safetensors"
    tensors = {
        name: as_torch(name, tensor).contiguous() for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "np"})
    with pytest.raises(uc.FormatError, match=r"got shape \[\d+, \d+\], expected .* by config.json"):
        uc.open(folder)


@pytest.mark.parametrize("tied", [None, False])
def test_tie_follows_from_config_or_sizes(tmp_path: Path, tied: bool | None) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    changed(folder, "config.json", tie_word_embeddings=tied)
    with uc.open(folder) as source:
        assert source["model"]["lm_head.weight"].shape == (64, 32)


def test_ambiguous_lm_head_is_rejected(tmp_path: Path) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    changed(folder, "config.json", tie_word_embeddings=None, hidden_size=None)
    with pytest.raises(uc.FormatError, match=r"lm_head.weight: .* depends on tie_word_embeddings"):
        uc.open(folder)


def test_unknown_layer_is_rejected(tmp_path: Path) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    for stem in ("model", "master_weights", "optimizer"):
        path, index = (
            folder / f"{stem}-00001-of-00001.safetensors",
            folder / f"{stem}.safetensors.index.json",
        )
        save_file(
            {name.replace("o_proj", "mixer"): tensor for name, tensor in load_file(path).items()},
            path,
            metadata={"format": "np"},
        )
        index.write_text(index.read_text().replace("o_proj", "mixer"))
    with pytest.raises(
        uc.FormatError, match=r"mixer.weight: got shape \(32, 32\) of an unknown layer"
    ):
        uc.open(folder)


def test_unified_folder_is_not_paddle(tmp_path: Path) -> None:
    uc.convert(FIXTURES / "single_bf16", tmp_path / "c")
    with uc.open(tmp_path / "c") as source:
        assert source.format == "unified"
    (tmp_path / "c" / "unified_checkpoint.json").unlink()
    with pytest.raises(uc.FormatError, match="unfinished save"):
        uc.open(tmp_path / "c")


# ---- damaged and incomplete


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Turns a bit in the header's first name."""
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_bytes(b""), cut, flip], ids=["empty", "half", "a bit"]
)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("single_bf16", "master_weights-00001-of-00001.safetensors"),
        ("single_bf16", "optimizer-00001-of-00001.safetensors"),
        ("tp2_skip", "model-00001-of-00002.safetensors"),
        ("lora_tp2", "optimizer-00001-of-00002.safetensors"),
    ],
)
def test_folder_with_damaged_file_is_not_hugging_face(
    tmp_path: Path, name: str, file: str, damage: Callable[[Path], object]
) -> None:
    """Symptom: converted with success, to turned weights without master weights and optimizer."""
    folder = copied(name, tmp_path / "c")
    damage(folder / file)
    with pytest.raises(uc.CheckpointError, match=file):
        uc.open(folder)


def test_model_only_folder_is_detected_by_an_intact_file(tmp_path: Path) -> None:
    folder = copied("tp2_skip", tmp_path / "c")
    for path in folder.glob("optimizer*"):
        path.unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(uc.CheckpointError, match=r"model-00001-of-00002.safetensors"):
        uc.open(folder)


def test_folder_with_all_files_damaged_is_paddle(tmp_path: Path) -> None:
    folder = model_only(tmp_path)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    assert not is_paddle(str(folder), os.listdir(folder))
    shutil.copy(FIXTURES / "single_bf16" / "optimizer.safetensors.index.json", folder)
    assert is_paddle(str(folder), os.listdir(folder))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("single_bf16", "optimizer"),
        ("single_bf16", "master_weights"),
        ("single_tied", "model"),
        ("tp2_nomerge", "optimizer"),
        ("lora_tp2", "peft_model"),
        ("lora_tp2", "optimizer"),
    ],
)
def test_files_without_an_index_are_an_error(tmp_path: Path, name: str, part: str) -> None:
    """Symptom: read with success, without the optimizer, without master weights, or without the
    embedding.
    """
    folder = copied(name, tmp_path / "c")
    if name == "lora_tp2":
        shutil.copy(FIXTURES / "single_bf16" / "model.safetensors.index.json", folder)
        shutil.copy(FIXTURES / "single_bf16" / "model-00001-of-00001.safetensors", folder)
    (folder / f"{part}.safetensors.index.json").unlink()
    with pytest.raises(
        uc.IncompleteError, match=rf"{part}.safetensors.index.json is missing, .*\n?.*{part}"
    ):
        uc.open(folder)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tp2_O1_rm", "model-00002-of-00002.safetensors"),
        ("tp2_O1_rm", "optimizer-00001-of-00002.safetensors"),
        ("single_bf16", "master_weights-00001-of-00001.safetensors"),
        ("tp2_nomerge", "master_weights.tp00.safetensors"),
        ("tp2_nomerge", "optimizer.tp00.safetensors"),
        ("tp2_nomerge", "optimizer.tp01.safetensors"),
        ("lora_tp2", "peft_model-00001-of-00002.safetensors"),
    ],
)
def test_missing_file_is_named(tmp_path: Path, name: str, file: str) -> None:
    folder = copied(name, tmp_path / "c")
    (folder / file).unlink()
    model = llama()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(uc.IncompleteError, match=file.replace(".", r"\.")):
        uc.load(folder, model=model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_missing_files_of_the_last_rank_are_an_error(tmp_path: Path) -> None:
    """No number is skipped then: the slices do not make up the parameters."""
    folder = copied("tp2_nomerge", tmp_path / "c")
    (folder / "optimizer.tp01.safetensors").unlink()
    (folder / "master_weights.tp01.safetensors").unlink()
    with pytest.raises(
        uc.IncompleteError, match=r"of shape .* in .*tp00.safetensors, expected the parameter's"
    ):
        uc.open(folder)


@pytest.mark.parametrize("name", ["single_bf16", "tp2_nomerge", "tp2_O1_rm"])
def test_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    folder = copied(name, tmp_path / "c")
    path = max(folder.glob("optimizer*.safetensors"))
    for nbytes in (path.stat().st_size - 1, 100, 3, 0):
        path.write_bytes(path.read_bytes()[:nbytes])
        with pytest.raises(uc.CheckpointError, match=path.name):
            uc.open(folder)


@pytest.mark.parametrize(
    ("name", "stem", "key", "match"),
    [
        (
            "single_bf16",
            "model",
            "llama.norm.weight",
            r"tensors of .*index.json are in no file(.|\n)*llama.norm.weight",
        ),
        (
            "single_bf16",
            "optimizer",
            "llama.norm.weight/moment2_0",
            r"in no file(.|\n)*llama.norm.weight/moment2_0",
        ),
        (
            "single_O2",
            "optimizer",
            "llama.layers.0.mlp.up_proj.weight/moment1_0@scales",
            r"is quantized, but .*@scales is in no file",
        ),
        (
            "single_O2",
            "optimizer",
            "llama.layers.0.mlp.up_proj.weight/moment2_0@min_scales",
            "is quantized, but .*@min_scales is in no file",
        ),
    ],
)
def test_missing_tensor_is_named(
    tmp_path: Path, name: str, stem: str, key: str, match: str
) -> None:
    folder = copied(name, tmp_path / "c")
    rewritten(folder, stem, lambda tensors: tensors.pop(key))
    with pytest.raises(uc.IncompleteError, match=match):
        uc.open(folder)


def without(folder: Path, stem: str, key: str) -> None:
    """Not in the index either."""
    rewritten(folder, stem, lambda tensors: tensors.pop(key))
    index = folder / f"{stem}.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map.pop(key)
    changed(folder, index.name, weight_map=weight_map)


@pytest.mark.parametrize(
    ("stem", "key", "error", "match"),
    [
        (
            "optimizer",
            "llama.norm.weight/moment2_0",
            uc.IncompleteError,
            r"state is missing(.|\n)*llama.norm.weight/moment2_0",
        ),
        (
            "optimizer",
            "llama.norm.weight/beta1_pow_acc_0",
            uc.IncompleteError,
            r"state is missing(.|\n)*norm.weight/beta1_pow_acc_0",
        ),
        (
            "master_weights",
            "llama.norm.weight",
            uc.IncompleteError,
            r"state is missing(.|\n)*norm.weight \(master weight\)",
        ),
        (
            "model",
            "llama.norm.weight",
            uc.FormatError,
            r"parameters that the model lacks(.|\n)*llama.norm.weight",
        ),
    ],
)
def test_partial_state_is_rejected(
    tmp_path: Path, stem: str, key: str, error: type[Exception], match: str
) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    without(folder, stem, key)
    with pytest.raises(error, match=match):
        uc.open(folder)


def test_tensors_missing_in_the_index_are_rejected(tmp_path: Path) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    rewritten(folder, "model", lambda tensors: tensors.update(stranger=torch.zeros(2)))
    with pytest.raises(
        uc.FormatError,
        match=r"model.safetensors.index.json does not have these tensors here(.|\n)*stranger",
    ):
        uc.open(folder)


def test_missing_master_weights_are_an_error(tmp_path: Path) -> None:
    """The optimizer's index says that they were written; the model is bfloat16 and no stand-in."""
    folder = copied("single_bf16", tmp_path / "c")
    (folder / "master_weights.safetensors.index.json").unlink()
    with pytest.raises(
        uc.IncompleteError, match=r"master_weights.safetensors.index.json is missing"
    ):
        uc.open(folder)


def test_quantized_bytes_are_not_used_as_they_are(tmp_path: Path) -> None:
    folder = copied("tp2_O1_rm", tmp_path / "c")
    changed(folder, "optimizer.safetensors.index.json", ckpt_quant_stage=None)
    with pytest.raises(uc.FormatError, match="under ckpt_quant_stage O0, expected float32"):
        uc.open(folder)
    changed(folder, "optimizer.safetensors.index.json", ckpt_quant_stage="O3")
    with pytest.raises(uc.FormatError, match="got ckpt_quant_stage 'O3'"):
        uc.open(folder)


def test_unknown_optimizer_state_is_rejected(tmp_path: Path) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    path, index = (
        folder / "optimizer-00001-of-00001.safetensors",
        folder / "optimizer.safetensors.index.json",
    )
    save_file(
        {
            name.replace("moment2_0", "moment2_max_0"): tensor
            for name, tensor in load_file(path).items()
        },
        path,
    )
    index.write_text(index.read_text().replace("moment2_0", "moment2_max_0"))
    with pytest.raises(uc.FormatError, match=r"unknown optimizer state(.|\n)*moment2_max_0"):
        uc.open(folder)


def test_step_contradicting_the_powers_is_rejected(
    tmp_path: Path,
) -> None:
    """fp16 skips steps whose gradients overflow: then the trainer has counted more than the
    optimizer has made.
    """
    folder = copied("single_bf16", tmp_path / "c")
    changed(folder, "trainer_state.json", global_step=5)
    with uc.open(folder) as source:
        assert source.step == 5
        assert source["optimizer"]["lm_head.weight/step"][...] == 2
    rewritten(
        folder, "optimizer", lambda tensors: tensors["lm_head.weight/beta1_pow_acc_0"].fill_(0.9)
    )
    with uc.open(folder) as source, pytest.raises(uc.FormatError, match="expected equal powers of"):
        source["optimizer"]["lm_head.weight/step"][...]


def test_adapter_other_than_lora_is_rejected(tmp_path: Path) -> None:
    folder = copied("lora_tp2", tmp_path / "c")
    changed(folder, "peft_model.safetensors.index.json", type="ptuning")
    with pytest.raises(uc.FormatError, match="not of a LoRA adapter"):
        uc.open(folder)


class Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("file", ["scheduler.pdparams", "scaler.pdparams"])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_hostile_trainer_pickle_is_rejected_not_executed(
    tmp_path: Path, file: str, protocol: int
) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    (folder / file).write_bytes(
        pickle.dumps({"last_lr": 0.1, "x": Hostile(tmp_path / "mark")}, protocol)
    )
    with pytest.raises(uc.FormatError, match=rf"{file}: asks for classes(.|\n)*posix.system"):
        uc.open(folder)
    assert not (tmp_path / "mark").exists()
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "optimizer.safetensors.index.json",
        "model.safetensors.index.json",
        "trainer_state.json",
    ],
)
@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_json_that_is_no_object_is_rejected(tmp_path: Path, file: str, text: str) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    (folder / file).write_text(text)
    with pytest.raises(uc.FormatError, match=file.replace(".", r"\.")):
        uc.open(folder)

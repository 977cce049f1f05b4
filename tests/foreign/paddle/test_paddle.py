"""PaddleNLP Unified Checkpoints are read bit for bit in torch's names and layout.

Damaged and ambiguous ones are rejected.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.equality import same
from tests.support.foreign.paddle_files import changed, rewritten
from tests.support.foreign.paddles import FIXTURES, as_torch, copied, llama, stored, torch_name
from unified_ckpt.foreign.files.listing import list_path
from unified_ckpt.foreign.paddle.detect import is_paddle
from unified_ckpt.options import SourceOptions

STATES = {"moment1_0": "exp_avg", "moment2_0": "exp_avg_sq"}


def check_weights(source: Any, part: str, expected: dict[str, torch.Tensor]) -> None:
    assert set(source[part]) == {torch_name(name) for name in expected}
    for name, tensor in expected.items():
        assert same(source[part][torch_name(name)][...], as_torch(name, tensor)), name


@pytest.mark.parametrize(
    ("name", "stage", "expected"),
    [
        # sha256 of what Paddle 3.0.0 computes from them: `dequant_unified_optimizer(...,
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
            entry
            for entry in json.loads((folder / "optimizer.safetensors.index.json").read_text())[
                "weight_map"
            ]
            if "moment" in entry
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


def test_peft_loads_the_lora_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    uc.convert(FIXTURES / "lora_tp2", tmp_path / "c")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT uses deprecated names of transformers
        model = get_peft_model(
            llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        )
    result = set_peft_model_state_dict(model, load_file(tmp_path / "c" / "model.safetensors"))
    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora" in name]


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


# ---- detecting the format


def drop_state(folder: Path) -> None:
    """Leave what PaddleNLP's last `save_model` leaves, in Hugging Face names."""
    state = (*folder.glob("optimizer*"), *folder.glob("master*"))
    for path in (*state, folder / "scheduler.pdparams", folder / "trainer_state.json"):
        path.unlink()


def model_only(tmp_path: Path) -> Path:
    folder = copied("single_bf16", tmp_path / "c")
    drop_state(folder)
    return folder


def test_config_given_for_numpy_headers(tmp_path: Path) -> None:
    folder = model_only(tmp_path)
    (folder / "config.json").unlink()
    with uc.open(folder, options=SourceOptions(config=str(FIXTURES / "single_bf16"))) as source:
        assert source["model"]["lm_head.weight"].shape == (64, 32)


def test_folder_with_hugging_face_names_is_paddle(tmp_path: Path) -> None:
    """Other readers take bfloat16 for integers (U16) and transpose no weights."""
    with uc.open(model_only(tmp_path)) as source:
        assert source.format == "paddle"
        check_weights(source, "model", stored(FIXTURES / "single_bf16", "model-"))


@pytest.mark.parametrize("tied", [None, False])
def test_tie_follows_from_config_or_sizes(tmp_path: Path, tied: bool | None) -> None:
    folder = copied("single_bf16", tmp_path / "c")
    changed(folder, "config.json", tie_word_embeddings=tied)
    with uc.open(folder) as source:
        assert source["model"]["lm_head.weight"].shape == (64, 32)


def test_unified_folder_is_not_paddle(tmp_path: Path) -> None:
    uc.convert(FIXTURES / "single_bf16", tmp_path / "c")
    with uc.open(tmp_path / "c") as source:
        assert source.format == "unified"
    (tmp_path / "c" / "unified_checkpoint.json").unlink()
    with pytest.raises(uc.FormatError, match="unfinished save"):
        uc.open(tmp_path / "c")


# ---- damaged and incomplete

Damage = Callable[[Path], object]


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def edit(file: str, **values: Any) -> Damage:
    """Change values of a JSON file; None removes a key."""
    return lambda folder: changed(folder, file, **values)


def remove(*patterns: str) -> Damage:
    return lambda folder: [path.unlink() for glob in patterns for path in folder.glob(glob)]


def write(file: str, text: str) -> Damage:
    return lambda folder: (folder / file).write_text(text)


def rewrite(stem: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Write a part's file again with other tensors; the index stays."""
    return lambda folder: rewritten(folder, stem, change)


def flipped(file: str) -> Damage:
    """Flip a bit in the first name of the header."""
    return lambda folder: flip(folder / file, 20)


def without(stem: str, key: str) -> Damage:
    """Remove a tensor from its file and from the index."""

    def act(folder: Path) -> None:
        rewritten(folder, stem, lambda tensors: tensors.pop(key))
        index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
        index["weight_map"].pop(key)
        changed(folder, f"{stem}.safetensors.index.json", **index)

    return act


def renamed(old: str, new: str, *stems: str) -> Damage:
    """Rename tensors in files and indexes."""

    def act(folder: Path) -> None:
        for stem in stems:
            path, index = (
                folder / f"{stem}-00001-of-00001.safetensors",
                folder / f"{stem}.safetensors.index.json",
            )
            tensors = {name.replace(old, new): t for name, t in load_file(path).items()}
            save_file(tensors, path, metadata={"format": "np"})
            index.write_text(index.read_text().replace(old, new))

    return act


def transpose(folder: Path) -> None:
    path = folder / "model-00001-of-00001.safetensors"
    turned = {name: as_torch(name, tensor).contiguous() for name, tensor in load_file(path).items()}
    save_file(turned, path, metadata={"format": "np"})


def beside_a_model(folder: Path) -> None:
    shutil.copy(FIXTURES / "single_bf16" / "model.safetensors.index.json", folder)
    shutil.copy(FIXTURES / "single_bf16" / "model-00001-of-00001.safetensors", folder)


INDEX, LAYER = "optimizer.safetensors.index.json", "llama.layers.0.mlp.up_proj.weight"
NORM = "llama.norm.weight"
ONE = "00001-of-00001.safetensors"
HEADERS = "only headers show that PaddleNLP wrote it"
DAMAGE: dict[str, tuple[str, Damage, type[uc.CheckpointError], str]] = {
    "tied tensors that differ": (
        "single_tied",
        rewrite("model", lambda t: t["lm_head.weight"].view(torch.int16)[7].add_(1)),
        uc.IntegrityError,
        r"embed_tokens.weight: values in .* differ",
    ),
    "master weights of another save": (
        "single_bf16",
        rewrite("master_weights", lambda tensors: tensors[NORM].add_(0.25)),
        uc.IntegrityError,
        r"norm.weight: the master weight in .* does not round to the weight in",
    ),
    "a model of an unknown type alone": (
        "single_bf16",
        both(drop_state, edit("config.json", paddlenlp_version=None, model_type="stranger")),
        uc.FormatError,
        HEADERS,
    ),
    "a model alone without a config": (
        "single_bf16",
        both(drop_state, remove("config.json")),
        uc.FormatError,
        HEADERS,
    ),
    "transposed": (
        "single_bf16",
        both(drop_state, transpose),
        uc.FormatError,
        r"got shape \[\d+, \d+\], expected .* by config.json",
    ),
    "an unknown layer": (
        "single_bf16",
        renamed("o_proj", "mixer", "model", "master_weights", "optimizer"),
        uc.FormatError,
        r"mixer.weight: got shape \(32, 32\) of an unknown layer",
    ),
    "unknown state": (
        "single_bf16",
        renamed("moment2_0", "moment2_max_0", "optimizer"),
        uc.FormatError,
        r"unknown optimizer state(.|\n)*moment2_max_0",
    ),
    # such a folder was once converted without an error: weights transposed, no optimizer
    **{
        f"a bit of {file}": (name, flipped(file), uc.CheckpointError, file)
        for name, file in (
            ("single_bf16", f"master_weights-{ONE}"),
            ("single_bf16", f"optimizer-{ONE}"),
            ("tp2_skip", "model-00001-of-00002.safetensors"),
            ("lora_tp2", "optimizer-00001-of-00002.safetensors"),
        )
    },
    "an empty file of a model alone": (
        "tp2_skip",
        both(remove("optimizer*"), write("model-00001-of-00002.safetensors", "")),
        uc.CheckpointError,
        r"model-00001-of-00002.safetensors",
    ),
    # such a folder was once read without an error, but without optimizer or embedding
    **{
        f"no index of {part} beside a model": (
            "lora_tp2",
            both(beside_a_model, remove(f"{part}.safetensors.index.json")),
            uc.IncompleteError,
            rf"{part}.safetensors.index.json is missing, .*\n?.*{part}",
        )
        for part in ("peft_model", "optimizer")
    },
    # no number is skipped; the slices do not make up the parameters
    "no files of the last rank": (
        "tp2_nomerge",
        remove("optimizer.tp01.safetensors", "master_weights.tp01.safetensors"),
        uc.IncompleteError,
        r"of shape .* in .*tp00.safetensors, expected the parameter's",
    ),
    "a weight in no file": (
        "single_bf16",
        rewrite("model", lambda tensors: tensors.pop(NORM)),
        uc.IncompleteError,
        rf"tensors of .*index.json are in no file(.|\n)*{NORM}",
    ),
    "a moment in no file": (
        "single_bf16",
        rewrite("optimizer", lambda tensors: tensors.pop(f"{NORM}/moment2_0")),
        uc.IncompleteError,
        rf"in no file(.|\n)*{NORM}/moment2_0",
    ),
    **{
        f"no {scales} of a quantized moment": (
            "single_O2",
            rewrite("optimizer", lambda tensors, key=f"{LAYER}/{scales}": tensors.pop(key)),
            uc.IncompleteError,
            rf"is quantized, but .*{scales.partition('@')[2]} is in no file",
        )
        for scales in ("moment1_0@scales", "moment2_0@min_scales")
    },
    **{
        f"no {state} of a parameter": (
            "single_bf16",
            without("optimizer", f"{NORM}/{state}"),
            uc.IncompleteError,
            rf"state is missing(.|\n)*norm.weight/{state}",
        )
        for state in ("moment2_0", "beta1_pow_acc_0")
    },
    "no master weight of a parameter": (
        "single_bf16",
        without("master_weights", NORM),
        uc.IncompleteError,
        r"state is missing(.|\n)*norm.weight \(master weight\)",
    ),
    "state of no parameter": (
        "single_bf16",
        without("model", NORM),
        uc.FormatError,
        rf"parameters that the model lacks(.|\n)*{NORM}",
    ),
    "a tensor that the index lacks": (
        "single_bf16",
        rewrite("model", lambda tensors: tensors.update(stranger=torch.zeros(2))),
        uc.FormatError,
        r"model.safetensors.index.json does not have these tensors here(.|\n)*stranger",
    ),
    "quantized bytes as they are": (
        "tp2_O1_rm",
        edit(INDEX, ckpt_quant_stage=None),
        uc.FormatError,
        "under ckpt_quant_stage O0, expected F32",
    ),
    "another quantization": (
        "tp2_O1_rm",
        edit(INDEX, ckpt_quant_stage="O3"),
        uc.FormatError,
        "got ckpt_quant_stage 'O3'",
    ),
    "another adapter": (
        "lora_tp2",
        edit("peft_model.safetensors.index.json", type="ptuning"),
        uc.FormatError,
        "not of a LoRA adapter",
    ),
    **{
        f"{text} as {file}": (
            "single_bf16",
            write(file, text),
            uc.FormatError,
            file.replace(".", r"\."),
        )
        for file in ("config.json", INDEX, "model.safetensors.index.json", "trainer_state.json")
        for text in ("{", "[1]", '"x"')
    },
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folder_is_rejected(tmp_path: Path, case: str) -> None:
    name, damage, error, text = DAMAGE[case]
    folder = copied(name, tmp_path / "c")
    damage(folder)
    with pytest.raises(error, match=text), uc.open(folder) as source:
        _ = [view[...] for part in source.parts for view in source[part].values()]


def test_folder_with_all_files_damaged_is_paddle(tmp_path: Path) -> None:
    folder = model_only(tmp_path)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    assert not is_paddle(list_path(str(folder)))
    shutil.copy(FIXTURES / "single_bf16" / "optimizer.safetensors.index.json", folder)
    assert is_paddle(list_path(str(folder)))


def test_step_contradicting_the_powers_is_rejected(
    tmp_path: Path,
) -> None:
    """fp16 skips steps whose gradients overflow, so the trainer counts more than the optimizer."""
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

"""Folders of .pdparams and .pdopt are read lazily and joined over ranks.

Hostile and damaged pickles are rejected, not executed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.foreign.paddle_files import changed
from tests.support.foreign.paddles import FIXTURES, LINEAR, copied, llama
from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.foreign.paddle.lazy_pickles import FileBytes, load_arrays, map_arrays
from unified_ckpt.foreign.paddle.slices import load


def unpickled(path: Path) -> Any:
    """Load with the standard pickle: these fixtures are ours."""
    return pickle.loads(path.read_bytes(), encoding="latin1")


def tensor(array: Any) -> torch.Tensor:
    array = array[1] if isinstance(array, tuple) else array
    values = torch.from_numpy(array.copy())
    return values.view(torch.bfloat16) if values.dtype == torch.uint16 else values


def read_tensors(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    with uc.open(path) as source:
        return {
            (part, name): source[part][name][...] for part in source.parts for name in source[part]
        }


def test_layers_of_an_unknown_model() -> None:
    """Without config.json, Paddle's own names show which layers are linear."""
    folder = FIXTURES / "layers_legacy"
    weights, state = (
        unpickled(folder / "model_state.tp00_pp00.pdparams"),
        unpickled(folder / "optimizer.tp00_pp00.pdopt"),
    )
    statics = weights.pop("StructuredToParameterName@@")
    tensors = read_tensors(folder)
    for name, array in weights.items():
        assert same(tensors["model", name], tensor(array).t())
        assert same(
            tensors["optimizer", f"{name}/exp_avg"], tensor(state[f"{statics[name]}_moment1_0"]).t()
        )
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 6), "b": torch.nn.Linear(6, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    uc.load(folder, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == state["LR_Scheduler"]["last_lr"]


@pytest.mark.parametrize("name", ["fused_tp2", "fused_legacy2"])
def test_slices_and_old_protocols_give_the_same_model(name: str) -> None:
    """One model, stored three ways.

    As a Unified Checkpoint, pickled by two tensor-parallel ranks, and pickled in protocol 2.
    """
    expected, state = read_tensors(FIXTURES / "fused"), read_tensors(FIXTURES / name)
    assert state.keys() == {key for key in expected if name == "fused_tp2" or key[0] == "model"}
    assert all(same(tensor, expected[key]) for key, tensor in state.items())


@pytest.mark.parametrize("name", ["fused", "fused_tp2"])
def test_fused_layers_are_split_for_torch(name: str) -> None:
    model = llama(rms_norm_eps=1e-6, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    uc.load(FIXTURES / name, model=model, optimizer=optimizer)
    ids = torch.from_numpy(np.random.RandomState(3).randint(0, 64, (2, 16)))
    expected = torch.tensor(np.load(FIXTURES / "fused" / "logits.npy"))  # computed by Paddle
    assert float((model(input_ids=ids).logits.detach() - expected).abs().max()) < 1e-6
    # without trainer_state.json, common betas that explain the powers are used
    assert tuple(optimizer.param_groups[0]["betas"]) == (0.9, 0.95)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_fused_layers_stay_fused_under_own_names(tmp_path: Path) -> None:
    with uc.open(FIXTURES / "fused", options=uc.SourceOptions(names="own")) as source:
        assert source["model"]["llama.layers.0.self_attn.qkv_proj.weight"].shape == (64, 32)
        assert source["model"]["llama.layers.0.mlp.gate_up_fused_proj.weight"].shape == (128, 32)


# ---- ranks


def test_files_of_any_mesh_are_joined(tmp_path: Path) -> None:
    """Tensor parallel 2 x pipeline 2 x sharding 2, made from the fixture of two ranks.

    Each stage has half of the layers' names, and each sharding rank half of their state.
    """
    write_mesh(tmp_path / "c")
    expected, state = read_tensors(FIXTURES / "fused"), read_tensors(tmp_path / "c")
    assert state.keys() == expected.keys()
    assert all(same(tensor, expected[key]) for key, tensor in state.items())


def write_mesh(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_bytes((FIXTURES / "fused_tp2" / "config.json").read_bytes())
    for tp in range(2):
        weights = unpickled(FIXTURES / "fused_tp2" / f"model_state.tp{tp:02d}.pdparams")
        state = unpickled(FIXTURES / "fused_tp2" / f"optimizer.tp{tp:02d}.pdopt")
        statics = weights.pop("StructuredToParameterName@@")
        for pp in range(2):
            names = [
                name
                for name in weights
                if (".layers.1." in name or name.startswith("lm_head") or ".norm" in name[:11])
                == bool(pp)
            ]
            content = {name: weights[name] for name in names} | {
                "StructuredToParameterName@@": {name: statics[name] for name in names}
            }
            dump(folder / f"model_state.tp{tp:02d}_pp{pp:02d}.pdparams", content)
            for shard in range(2):
                owners = [statics[name] for name in names[shard::2]]
                some = {
                    key: array
                    for key, array in state.items()
                    if any(key.startswith(f"{owner}_") for owner in owners)
                }
                dump(folder / f"optimizer.tp{tp:02d}_pp{pp:02d}_shard{shard:02d}.pdopt", some)


def dump(path: Path, content: Any, protocol: int = 4) -> None:
    path.write_bytes(pickle.dumps(content, protocol))


def test_replicated_key_heads_are_not_joined(tmp_path: Path) -> None:
    """PaddleNLP does not split one key head over two ranks. Copies that differ are refused."""
    folder, shapes = tmp_path / "c", {"q_proj": (8, 4), "k_proj": (8, 2), "o_proj": (4, 8)}
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 4,
    }
    (folder / "config.json").write_text(str({**config, "vocab_size": 4}).replace("'", '"'))
    slices = [
        {
            name: np.random.RandomState(tp + ord(name[0])).rand(*shape).astype("f4")
            for name, shape in shapes.items()
        }
        for tp in range(2)
    ]
    slices[1]["k_proj"] = slices[0]["k_proj"]
    for tp, arrays in enumerate(slices):
        dump(
            folder / f"model_state.tp0{tp}.pdparams",
            {f"llama.layers.0.self_attn.{n}.weight": a for n, a in arrays.items()},
        )
    state = read_tensors(folder)
    prefix = "model.layers.0.self_attn"
    assert same(
        state["model", f"{prefix}.k_proj.weight"], torch.from_numpy(slices[0]["k_proj"]).t()
    )
    assert same(
        state["model", f"{prefix}.q_proj.weight"],
        torch.from_numpy(np.concatenate([s["q_proj"] for s in slices], 1)).t(),
    )
    assert same(
        state["model", f"{prefix}.o_proj.weight"],
        torch.from_numpy(np.concatenate([s["o_proj"] for s in slices], 0)).t(),
    )
    slices[1]["k_proj"] = slices[0]["k_proj"] + 1
    dump(
        folder / "model_state.tp01.pdparams",
        {f"llama.layers.0.self_attn.{n}.weight": a for n, a in slices[1].items()},
    )
    with pytest.raises(uc.IntegrityError, match=r"k_proj.weight: values in .*tp01.* differ"):
        read_tensors(folder)


# ---- pickles


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_from_the_file(tmp_path: Path, protocol: int, order: Any) -> None:
    rng = np.random.RandomState(0)
    arrays = {
        # every byte value: protocol 2 stores bytes as text
        "large": rng.randint(0, 256, (33, 77)).astype("u1"),
        "floats": np.asarray(rng.rand(64, 65), order="C").astype("f4"),
        "small": np.arange(6, dtype="i8").reshape(2, 3),
        "bits": rng.randint(0, 65536, (40, 40)).astype("u2"),
        "none": np.zeros((0, 4), "f4"),
        "scalar": np.array(2.5),
        "complex": (rng.rand(20, 30) + 1j).astype("c8"),
    }
    if protocol > 2:
        arrays = {name: np.asarray(array, order=order) for name, array in arrays.items()}
    dump(tmp_path / "x.pdparams", {**arrays, "nested": ("name", arrays["floats"])}, protocol)
    content = load_arrays(str(tmp_path / "x.pdparams"))
    assert isinstance(content["floats"].raw, FileBytes)  # not read yet
    tensors = map_arrays(str(tmp_path / "x.pdparams"), content)
    for name, array in {**arrays, "nested": arrays["floats"]}.items():
        assert same(
            load(tensors[name], full_box(tensors[name].shape)),
            tensor(np.ascontiguousarray(array).reshape(array.shape)),
        )
    box = Box((3, 5), (2, 9))
    assert same(load(tensors["floats"], box), tensor(arrays["floats"])[3:5, 5:14])


def test_array_split_by_an_old_protocol(tmp_path: Path) -> None:
    """For protocols 2 and 3, Paddle splits arrays over 1 GiB and lists the parts separately."""
    array = np.arange(120, dtype="f4").reshape(10, 12)
    parts = {f"w@@.{i}": array.reshape(-1)[i * 50 : (i + 1) * 50] for i in range(3)}
    content = {
        **parts,
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (10, 12), "slices": list(parts)}},
    }
    path = tmp_path / "x.pdparams"
    dump(path, content, 2)
    tensors = map_arrays(str(path), load_arrays(str(path)))
    assert list(tensors) == ["w"]
    assert same(load(tensors["w"], Box((3, 2), (5, 7))), torch.from_numpy(array[3:8, 2:9]))
    del content["w@@.1"]
    dump(path, content, 2)
    with pytest.raises(uc.IncompleteError, match="w: got 2 of 3 parts"):
        map_arrays(str(path), load_arrays(str(path)))


CRAFTED = {
    "attributes of a class": b"cnumpy\nndarray\n(S'__call__'\ntR.",
    "a module's name in the name": b"\x80\x04\x8c\x05numpy\x8c\x10core.os.getcwd()\x93.",
    "instances of an old kind": b"(S'touch mark'\nios\nsystem\n.",
    "an object to build from": b"(cos\nsystem\nS'touch mark'\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "an array in no order": b"\x80\x04\x8c\x12numpy.core.numeric\x8c\x0b_frombuffer\x93("
    b"C\x01a\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02u1\x85RK\x01\x85\x8c\x01KtR.",
    "an array beyond its buffer": b"\x80\x04\x8c\x12numpy.core.numeric\x8c\x0b_frombuffer\x93("
    b"C\x01a\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02u1\x85RK\x02\x85\x8c\x01CtR.",
    "a buffer out of band": b"\x80\x05\x97.",
    "a long string that is none": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    "a large number of bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xffabc",
    "nothing": b"",
    "text": b"hello",
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_pickles_name_the_file(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where their commands would create a file
    (tmp_path / "model_state.pdparams").write_bytes(CRAFTED[case])
    with pytest.raises(uc.CheckpointError, match=r"model_state.pdparams"):
        uc.open(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model_state.pdparams"]


# ---- damage


def stored(content: Any, file: str = "model_state.pdparams") -> Callable[[Path], object]:
    return lambda folder: dump(folder / file, content)


def state_with(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        state = unpickled(folder / "optimizer.pdopt")
        change(state)
        dump(folder / "optimizer.pdopt", state)

    return act


def lose(pattern: str) -> Callable[[Path], object]:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def lie_about_a_size(folder: Path) -> None:
    path = folder / "model_state.tp00_pp00.pdparams"
    whole = path.read_bytes()
    assert whole.count(b"K\x04K\x06\x86") == 1
    path.write_bytes(whole.replace(b"K\x04K\x06\x86", b"K\x04K\x07\x86"))


ROW = np.ones(3, "f4")
HALF = "half_legacy"
UNKNOWN = r"unknown state, or state of parameters that its .pdparams lacks(.|\n)*"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], type[uc.CheckpointError], str]] = {
    **{
        f"no {file}": (
            "mesh",
            lose(file),
            uc.IncompleteError,
            rf"files of some ranks are missing(.|\n)*{file}",
        )
        for file in (
            "model_state.tp00_pp00.pdparams",
            "model_state.tp01_pp01.pdparams",
            "optimizer.tp01_pp00_shard01.pdopt",
        )
    },
    # no number is skipped; the sizes in the config reveal the missing row
    "no second stage": (
        "mesh",
        lose("*pp01*"),
        uc.IncompleteError,
        r"layers are missing, expected 2 by config.json(.|\n)*layer 1",
    ),
    "no second slice": ("mesh", lose("*tp01*"), uc.FormatError, r"got shape .*by config.json"),
    "no second shard": (
        "mesh",
        lose("*shard01*"),
        uc.IncompleteError,
        "optimizer state is missing",
    ),
    "slices without a config": (
        "fused_tp2",
        lose("config.json"),
        uc.FormatError,
        r"requires the model's sizes; add its config\.json",
    ),
    "config of another model": (
        HALF,
        lambda folder: changed(folder, "config.json", hidden_size=16, head_dim=8),
        uc.FormatError,
        r"by config.json",
    ),
    "a false size": (
        "layers_legacy",
        lie_about_a_size,
        uc.FormatError,
        r"shape \(4, 7\) .* is not 112 bytes",
    ),
    "a moment of no parameter": (
        HALF,
        state_with(lambda state: state.update(extra_0_moment1_0=ROW)),
        uc.FormatError,
        UNKNOWN + "extra_0_moment1_0",
    ),
    "state without a name": (
        HALF,
        state_with(lambda state: state.update(linear_0=ROW)),
        uc.FormatError,
        UNKNOWN + "linear_0",
    ),
    "a master weight of no parameter": (
        HALF,
        state_with(lambda state: state["master_weights"].update(stranger=ROW)),
        uc.FormatError,
        UNKNOWN + "stranger",
    ),
    **{
        f"{number}: {text}": (HALF, stored(content, file), uc.FormatError, f"{file}: (.|\n)*{text}")
        for number, (file, content, text) in enumerate(
            [
                ("model_state.pdparams", [1], "got list, expected a dict of arrays"),
                ("model_state.pdparams", {"w": 1}, r"entries that are not arrays(.|\n)*w"),
                ("model_state.pdparams", {}, "or no arrays"),
                (
                    "model_state.pdparams",
                    {"w": ROW, "StructuredToParameterName@@": 3},
                    "StructuredToParameterName@@: got int, expected a dict",
                ),
                (
                    "model_state.pdparams",
                    {"w": ROW, "UnpackBigParamInfor@@": {"v": 3}},
                    "v: got int, expected a dict",
                ),
                ("model_state.pdparams", {"w": np.ones(3, ">f4")}, "little-endian"),
                (
                    "model_state.pdparams",
                    {"w": np.array([None, "x"])},
                    "expected little-endian",
                ),
                (
                    "optimizer.pdopt",
                    {"master_weights": [1]},
                    "master_weights: got list, expected a dict",
                ),
                ("optimizer.pdopt", 3, "got int, expected a dict of arrays"),
            ]
        )
    },
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folder_is_rejected(tmp_path: Path, case: str) -> None:
    name, damage, error, text = DAMAGE[case]
    folder = tmp_path / "c"
    write_mesh(folder) if name == "mesh" else copied(name, folder)
    damage(folder)
    with pytest.raises(error, match=text):
        uc.open(folder)


def test_all_linear_layers_of_the_fixture_are_known() -> None:
    names = {
        key[1].split(".")[-2] for key in read_tensors(FIXTURES / "half_legacy") if key[0] == "model"
    }
    assert names == {*LINEAR, "embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}

"""Folders of .pdparams and .pdopt are read lazily and joined over ranks.

Hostile and damaged pickles are rejected, not executed.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.paddle_files import changed, same
from tests.support.paddles import FIXTURES, LINEAR, as_torch, copied, llama, torch_name
from unified_ckpt.cli.main import main
from unified_ckpt.sources.paddle.lazy_pickles import FileBytes, load_arrays, map_arrays


def unpickled(path: Path) -> Any:
    """By the real pickle: the fixtures are ours."""
    return pickle.loads(path.read_bytes(), encoding="latin1")


def tensor(array: Any) -> torch.Tensor:
    array = array[1] if isinstance(array, tuple) else array
    values = torch.from_numpy(array.copy())
    return values.view(torch.bfloat16) if values.dtype == torch.uint16 else values


def everything(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    with uc.open(path) as source:
        return {
            (part, name): source[part][name][...] for part in source.parts for name in source[part]
        }


def test_bfloat16_with_master_weights() -> None:
    folder = FIXTURES / "half_legacy"
    weights, state = (
        unpickled(folder / "model_state.pdparams"),
        unpickled(folder / "optimizer.pdopt"),
    )
    statics = weights.pop("StructuredToParameterName@@")
    tensors = everything(folder)
    for name, array in weights.items():
        assert same(tensors["model", torch_name(name)], as_torch(name, tensor(array)))
        assert tensors["model", torch_name(name)].dtype == torch.bfloat16
        assert same(
            tensors["master_weights", torch_name(name)],
            as_torch(name, tensor(state["master_weights"][statics[name]])),
        )
        for theirs, ours in (("moment1_0", "exp_avg"), ("moment2_0", "exp_avg_sq")):
            key = f"{statics[name]}_fp32_master_0_{theirs}"
            assert same(
                tensors["optimizer", f"{torch_name(name)}/{ours}"],
                as_torch(name, tensor(state[key])),
            )
        assert tensors["optimizer", f"{torch_name(name)}/step"] == 2  # beta1 ** 3 is stored
    assert len(tensors) == 5 * len(weights)


def test_layers_of_an_unknown_model() -> None:
    """No config.json: Paddle's own names say that they are linear."""
    folder = FIXTURES / "layers_legacy"
    weights, state = (
        unpickled(folder / "model_state.tp00_pp00.pdparams"),
        unpickled(folder / "optimizer.tp00_pp00.pdopt"),
    )
    statics = weights.pop("StructuredToParameterName@@")
    tensors = everything(folder)
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
    """The fixtures are one model: as a Unified Checkpoint, pickled by two tensor parallel ranks,
    pickled in protocol 2.
    """
    expected, state = everything(FIXTURES / "fused"), everything(FIXTURES / name)
    assert state.keys() == {key for key in expected if name == "fused_tp2" or key[0] == "model"}
    assert all(same(tensor, expected[key]) for key, tensor in state.items())


@pytest.mark.parametrize("name", ["fused", "fused_tp2"])
def test_fused_layers_are_split_for_torch(name: str) -> None:
    model = llama(rms_norm_eps=1e-6, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    uc.load(FIXTURES / name, model=model, optimizer=optimizer)
    ids = torch.from_numpy(np.random.RandomState(3).randint(0, 64, (2, 16)))
    expected = torch.tensor(np.load(FIXTURES / "fused" / "logits.npy"))  # of Paddle's model
    assert float((model(input_ids=ids).logits.detach() - expected).abs().max()) < 1e-6
    assert tuple(optimizer.param_groups[0]["betas"]) == (
        0.9,
        0.95,
    )  # no trainer_state.json: the usual ones that explain the powers
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_fused_layers_stay_fused_under_own_names(tmp_path: Path) -> None:
    with uc.open(FIXTURES / "fused", options=uc.SourceOptions(names="own")) as source:
        assert source["model"]["llama.layers.0.self_attn.qkv_proj.weight"].shape == (64, 32)
        assert source["model"]["llama.layers.0.mlp.gate_up_fused_proj.weight"].shape == (128, 32)


def test_convert_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(FIXTURES / "fused_tp2"), str(tmp_path / "c")]) == 0
    assert main(["diff", str(FIXTURES / "fused"), str(tmp_path / "c")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(FIXTURES / "fused_tp2")]) == 0
    assert "PaddleNLP, .pdparams" in capsys.readouterr().out


# ---- ranks


def test_files_of_any_mesh_are_joined(tmp_path: Path) -> None:
    """Tensor parallel 2 x pipeline 2 x sharding 2, from the fixture of two ranks: each stage has
    half of the layers' names, each rank of the sharding half of the state.
    """
    meshed(tmp_path / "c")
    expected, state = everything(FIXTURES / "fused"), everything(tmp_path / "c")
    assert state.keys() == expected.keys()
    assert all(same(tensor, expected[key]) for key, tensor in state.items())


def meshed(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_bytes((FIXTURES / "fused_tp2" / "config.json").read_bytes())
    for tp in range(2):
        weights = unpickled(FIXTURES / "fused_tp2" / f"model_state.tp{tp:02d}.pdparams")
        state = unpickled(FIXTURES / "fused_tp2" / f"optimizer.tp{tp:02d}.pdopt")
        statics = weights.pop("StructuredToParameterName@@")
        for pp in range(2):
            mine = [
                name
                for name in weights
                if (".layers.1." in name or name.startswith("lm_head") or ".norm" in name[:11])
                == bool(pp)
            ]
            told = {name: weights[name] for name in mine} | {
                "StructuredToParameterName@@": {name: statics[name] for name in mine}
            }
            dump(folder / f"model_state.tp{tp:02d}_pp{pp:02d}.pdparams", told)
            for shard in range(2):
                owners = [statics[name] for name in mine[shard::2]]
                some = {
                    key: array
                    for key, array in state.items()
                    if any(key.startswith(f"{owner}_") for owner in owners)
                }
                dump(folder / f"optimizer.tp{tp:02d}_pp{pp:02d}_shard{shard:02d}.pdopt", some)


def dump(path: Path, told: Any, protocol: int = 4) -> None:
    path.write_bytes(pickle.dumps(told, protocol))


@pytest.mark.parametrize(
    ("file", "match"),
    [
        ("model_state.tp00_pp00.pdparams", "model_state.tp00_pp00.pdparams"),
        ("model_state.tp01_pp01.pdparams", "model_state.tp01_pp01.pdparams"),
        ("optimizer.tp01_pp00_shard01.pdopt", "optimizer.tp01_pp00_shard01.pdopt"),
    ],
)
def test_missing_rank_is_named(tmp_path: Path, file: str, match: str) -> None:
    meshed(tmp_path / "c")
    (tmp_path / "c" / file).unlink()
    with pytest.raises(uc.IncompleteError, match=rf"files of some ranks are missing(.|\n)*{match}"):
        uc.open(tmp_path / "c")


@pytest.mark.parametrize(
    ("lost", "error", "match"),
    [
        (
            "*pp01*",
            uc.IncompleteError,
            r"layers are missing, expected 2 by config.json(.|\n)*layer 1",
        ),
        ("*tp01*", uc.FormatError, r"got shape .*by config.json"),
        ("*shard01*", uc.IncompleteError, "optimizer state is missing"),
    ],
)
def test_missing_row_of_the_mesh_is_named(
    tmp_path: Path, lost: str, error: type[Exception], match: str
) -> None:
    """No number is skipped then: the config's sizes and the parameters tell."""
    meshed(tmp_path / "c")
    for path in (tmp_path / "c").glob(lost):
        path.unlink()
    with pytest.raises(error, match=match):
        uc.open(tmp_path / "c")


def test_replicated_key_heads_are_not_joined(tmp_path: Path) -> None:
    """One key head for two ranks: PaddleNLP does not split it. Copies that differ are refused."""
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
    state = everything(folder)
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
        everything(folder)


def test_slices_without_a_config_are_rejected(tmp_path: Path) -> None:
    folder = copied("fused_tp2", tmp_path / "c")
    (folder / "config.json").unlink()
    with pytest.raises(uc.FormatError, match=r"requires the model's sizes; add its config\.json"):
        uc.open(folder)


# ---- pickles


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_from_the_file(tmp_path: Path, protocol: int, order: Any) -> None:
    rng = np.random.RandomState(0)
    arrays = {
        "large": rng.randint(0, 256, (33, 77)).astype(
            "u1"
        ),  # bytes of every value: protocol 2 has them as text
        "floats": np.asarray(rng.rand(64, 65), order="C").astype("f4"),
        "small": np.arange(6, dtype="i8").reshape(2, 3),
        "bits": rng.randint(0, 65536, (40, 40)).astype("u2"),
        "none": np.zeros((0, 4), "f4"),
        "scalar": np.array(2.5),
    }
    if protocol > 2:
        arrays = {name: np.asarray(array, order=order) for name, array in arrays.items()}
    dump(tmp_path / "x.pdparams", {**arrays, "nested": ("name", arrays["floats"])}, protocol)
    content = load_arrays(str(tmp_path / "x.pdparams"))
    assert isinstance(content["floats"].raw, FileBytes)  # was not read
    tensors = map_arrays(str(tmp_path / "x.pdparams"), content)
    from unified_ckpt.core.sharding.boxes import Box, full_box

    for name, array in {**arrays, "nested": arrays["floats"]}.items():
        assert same(
            tensors[name].load(full_box(tensors[name].shape)),
            tensor(np.ascontiguousarray(array).reshape(array.shape)),
        )
    assert same(tensors["floats"].load(Box((3, 5), (2, 9))), tensor(arrays["floats"])[3:5, 5:14])


def test_array_split_by_an_old_protocol(tmp_path: Path) -> None:
    """Paddle cuts what is over 1 GiB in parts for protocols 2 and 3, and says so under a name of
    its own.
    """
    array = np.arange(120, dtype="f4").reshape(10, 12)
    parts = {f"w@@.{i}": array.reshape(-1)[i * 50 : (i + 1) * 50] for i in range(3)}
    content = {
        **parts,
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (10, 12), "slices": list(parts)}},
    }
    path = tmp_path / "x.pdparams"
    dump(path, content, 2)
    tensors = map_arrays(str(path), load_arrays(str(path)))
    from unified_ckpt.core.sharding.boxes import Box

    assert list(tensors) == ["w"]
    assert same(tensors["w"].load(Box((3, 2), (5, 7))), torch.from_numpy(array[3:8, 2:9]))
    del content["w@@.1"]
    dump(path, content, 2)
    with pytest.raises(uc.IncompleteError, match="w: got 2 of 3 parts"):
        map_arrays(str(path), load_arrays(str(path)))


class Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


class LoDTensor:
    """As Paddle's own reduces."""

    def __reduce__(self) -> Any:
        return eval, ("data", {"data": np.zeros(3)})


@pytest.mark.parametrize("file", ["model_state.pdparams", "optimizer.pdopt"])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_hostile_pickles_are_rejected_not_executed(
    tmp_path: Path, file: str, protocol: int
) -> None:
    folder, mark = copied("half_legacy", tmp_path / "c"), tmp_path / "mark"
    dump(folder / file, {"w": np.ones(4, "f4"), "x": Hostile(mark), "y": [LoDTensor()]}, protocol)
    with pytest.raises(
        uc.FormatError, match=rf"{file}: asks for classes(.|\n)*eval(.|\n)*posix.system"
    ):
        uc.open(folder)
    assert not mark.exists()


HAND_MADE = {
    "attributes of a class": b"cnumpy\nndarray\n(S'__call__'\ntR.",
    "a module's name in the name": b"\x80\x04\x8c\x05numpy\x8c\x10core.os.getcwd()\x93.",
    "instances of an old kind": b"(S'touch mark'\nios\nsystem\n.",
    "an object to build from": b"(cos\nsystem\nS'touch mark'\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "a long string that is none": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    "a large number of bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xffabc",
    "nothing": b"",
    "text": b"hello",
}


@pytest.mark.parametrize("what", HAND_MADE)
def test_crafted_pickles_name_the_file(tmp_path: Path, what: str) -> None:
    (tmp_path / "model_state.pdparams").write_bytes(HAND_MADE[what])
    with pytest.raises(uc.CheckpointError, match=r"model_state.pdparams"):
        uc.open(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model_state.pdparams"]


def test_truncated_pickle_is_an_error(tmp_path: Path) -> None:
    whole = (FIXTURES / "half_legacy" / "model_state.pdparams").read_bytes()
    for nbytes in [*range(0, len(whole), len(whole) // 60), len(whole) - 1]:
        (tmp_path / "model_state.pdparams").write_bytes(whole[:nbytes])
        with pytest.raises(
            uc.CheckpointError, match=r"model_state.pdparams: (is truncated|is damaged)"
        ):
            uc.open(tmp_path)


def test_arrays_of_a_false_size_are_rejected(tmp_path: Path) -> None:
    whole = (FIXTURES / "layers_legacy" / "model_state.tp00_pp00.pdparams").read_bytes()
    assert whole.count(b"K\x04K\x06\x86") == 1
    (tmp_path / "model_state.pdparams").write_bytes(
        whole.replace(b"K\x04K\x06\x86", b"K\x04K\x07\x86")
    )
    with pytest.raises(uc.FormatError, match=r"shape \(4, 7\) .* is not 112 bytes"):
        uc.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state.update(extra_0_moment1_0=np.zeros(3, "f4")), "extra_0_moment1_0"),
        (lambda state: state.update(linear_0=np.zeros(3, "f4")), "linear_0"),
        (lambda state: state["master_weights"].update(stranger=np.zeros(3, "f4")), "stranger"),
    ],
)
def test_state_without_a_parameter_is_rejected(tmp_path: Path, change: Any, match: str) -> None:
    folder = copied("half_legacy", tmp_path / "c")
    state = unpickled(folder / "optimizer.pdopt")
    change(state)
    dump(folder / "optimizer.pdopt", state)
    with pytest.raises(
        uc.FormatError,
        match=rf"unknown state, or state of parameters that its .pdparams lacks(.|\n)*{match}",
    ):
        uc.open(folder)


def test_all_linear_layers_of_the_fixture_are_known() -> None:
    names = {
        key[1].split(".")[-2] for key in everything(FIXTURES / "half_legacy") if key[0] == "model"
    }
    assert names == {*LINEAR, "embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}


def test_config_of_another_model_is_rejected(tmp_path: Path) -> None:
    folder = copied("half_legacy", tmp_path / "c")
    changed(folder, "config.json", hidden_size=16, head_dim=8)
    with pytest.raises(uc.FormatError, match=r"by config.json"):
        uc.open(folder)


@pytest.mark.parametrize(
    ("file", "told", "match"),
    [
        ("model_state.pdparams", [1], "got list, expected a dict of arrays"),
        ("model_state.pdparams", {"w": 1}, r"entries that are not arrays(.|\n)*w"),
        ("model_state.pdparams", {}, "or no arrays"),
        (
            "model_state.pdparams",
            {"w": np.ones(3, "f4"), "StructuredToParameterName@@": 3},
            "StructuredToParameterName@@: got int, expected a dict",
        ),
        (
            "model_state.pdparams",
            {"w": np.ones(3, "f4"), "UnpackBigParamInfor@@": {"v": 3}},
            "v: got int, expected a dict",
        ),
        ("model_state.pdparams", {"w": np.ones(3, ">f4")}, "little-endian"),
        ("model_state.pdparams", {"w": np.array([None, "x"])}, "expected little-endian"),
        ("optimizer.pdopt", {"master_weights": [1]}, "master_weights: got list, expected a dict"),
        ("optimizer.pdopt", 3, "got int, expected a dict of arrays"),
    ],
)
def test_pickles_of_other_values_are_rejected(
    tmp_path: Path, file: str, told: Any, match: str
) -> None:
    folder = copied("half_legacy", tmp_path / "c")
    dump(folder / file, told)
    with pytest.raises(uc.FormatError, match=rf"{file}: (.|\n)*{match}"):
        uc.open(folder)

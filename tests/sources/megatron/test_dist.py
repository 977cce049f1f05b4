"""Megatron-Core's torch_dist matches Megatron's own load; flat buffers and damage are refused."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

import unified_ckpt as uc
from tests.support.megatrons import (
    Job,
    Tensors,
    arguments,
    group,
    megatron_classes,
    no_decay,
    stage,
)
from tests.support.processes.launch import HERE, environment, torchrun
from unified_ckpt.cli.main import main
from unified_ckpt.integrations.transformers.hub_names import open_model_names
from unified_ckpt.options import SourceOptions

JOB = Job(layers=2)


def named(job: Job = JOB) -> Tensors:
    """A model's tensors under Hugging Face names."""
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape) for name, tensor in llama(job).state_dict().items()}


def llama(job: Job = JOB) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=job.hidden,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.groups,
        intermediate_size=job.ffn,
    )
    return transformers.LlamaForCausalLM(config)


def stacked(tensors: Tensors, job: Job) -> Tensors:
    """Stack all layers of a kind into one tensor."""
    merged = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            if number == "0":
                merged[f"decoder.layers.{rest}"] = torch.stack(
                    [tensors[f"decoder.layers.{n}.{rest}"] for n in range(job.layers)]
                )
        else:
            merged[name] = tensor
    return merged


def write(
    folder: Path,
    hub: dict[str, Tensors],
    *,
    form: Any = stacked,
    common: Any = None,
    weights: Tensors | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a folder like `dist_checkpointing.save`; DCP itself writes the tensors."""
    job = JOB
    stages = {key: form(stage(tensor, job, (0, 0, 0, 0), 0), job) for key, tensor in hub.items()}
    model = (
        form(stage(weights, job, (0, 0, 0, 0), 0), job) if weights is not None else stages["param"]
    )
    state: dict[str, Any] = {
        name: tensor.bfloat16()
        for name, tensor in model.items()
        if not name.startswith("optimizer")
    }
    for key, tensors in stages.items():
        state |= {
            name if name.startswith("optimizer") else f"optimizer.state.{key}.{name}": tensor
            for name, tensor in tensors.items()
        }
    state |= more or {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Saving without distributed", which is meant
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    with megatron_classes() as backend:
        args = arguments(job, attention_backend=backend.flash)
        groups = [group(True, False), group(False, False)]
        state = {
            "args": args,
            "iteration": 7,
            "checkpoint_version": 3.0,
            "optimizer": {"optimizer": {"param_groups": groups}},
        }
        torch.save(state | (common or {}), folder / "common.pt")
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    return folder


def drawn() -> dict[str, Tensors]:
    params = {name: tensor.bfloat16().float() for name, tensor in named().items()}
    return {"param": params} | {
        key: {n: torch.randn(t.shape) for n, t in params.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }


@pytest.fixture
def hub() -> dict[str, Tensors]:
    return drawn()


@pytest.fixture
def folder(tmp_path: Path, hub: dict[str, Tensors]) -> Path:
    return write(tmp_path / "c", hub)


@pytest.mark.parametrize("form", [stacked, lambda own, _: own], ids=["stacked", "apart"])
def test_tensors_and_optimizer_in_hf_names(
    tmp_path: Path, hub: dict[str, Tensors], form: Any
) -> None:
    with uc.open(write(tmp_path / "c", hub, form=form)) as source:
        assert source.format == "megatron-core"
        assert source.step == 7
        assert set(source["model"].keys()) == set(hub["param"])
        for name, tensor in hub["param"].items():
            assert torch.equal(source["model"][name][...], tensor.bfloat16())
            assert torch.equal(source["master_weights"][name][...], tensor)
            assert torch.equal(source["optimizer"][f"{name}/exp_avg"][...], hub["exp_avg"][name])
            assert torch.equal(
                source["optimizer"][f"{name}/exp_avg_sq"][...], hub["exp_avg_sq"][name]
            )
            assert source["optimizer"][f"{name}/step"][...] == 7


def test_own_names_of_each_layer(folder: Path, hub: dict[str, Tensors]) -> None:
    tensors = stage(hub["param"], JOB, (0, 0, 0, 0), 0)
    with uc.open(folder, options=SourceOptions(names="own")) as source:
        assert {name: source["model"][name].shape for name in source["model"]} == {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }


def test_param_groups_by_name(folder: Path, hub: dict[str, Tensors]) -> None:
    model = llama()
    groups = [
        {
            "params": [
                param
                for name, param in model.named_parameters()
                if no_decay(name, param) == decayed
            ]
        }
        for decayed in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups)
    uc.load(folder, model=model, optimizer=optimizer)
    assert [param["weight_decay"] for param in optimizer.param_groups] == [0.1, 0.0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, hub["param"][name])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], hub["exp_avg"][name])


def test_optimizer_state_of_other_model_is_refused(tmp_path: Path, hub: dict[str, Tensors]) -> None:
    """Megatron-Core 0.16 shifts state by the padding if there are several buckets."""
    name = "model.layers.1.mlp.down_proj.weight"
    shifted = hub | {"param": hub["param"] | {name: hub["param"][name].roll(1)}}
    with uc.open(write(tmp_path / "c", shifted, weights=hub["param"])) as source:
        assert torch.equal(source["model"][name][...], hub["param"][name].bfloat16())
        for part, key in (("master_weights", name), ("optimizer", f"{name}/exp_avg")):
            with pytest.raises(
                uc.IntegrityError,
                match=r"linear_fc2.weight: its fp32 copy does not round to the model's",
            ):
                _ = source[part][key][...]


def test_flat_buffers_are_refused_and_model_loads(
    tmp_path: Path, hub: dict[str, Tensors], capsys: pytest.CaptureFixture[str]
) -> None:
    key = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, "
        "torch.float32).bucket_idx_0.exp_avg"
    )
    folder = write(tmp_path / "c", {"param": hub["param"]}, more={key: torch.zeros(64)})
    model = llama().bfloat16()
    uc.load(folder, model=model)
    assert torch.equal(model.model.norm.weight, hub["param"]["model.norm.weight"].bfloat16())
    with pytest.raises(uc.FormatError, match=r"optimizer: got flat buffers \(dp_reshardable\)"):
        uc.load(folder, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert main(["inspect", str(folder)]) == 0
    assert "unreadable: " in capsys.readouterr().out
    with pytest.raises(uc.FormatError, match=r"--dist-ckpt-optim-fully-reshardable"):
        uc.convert(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_config_gives_names_without_arguments(tmp_path: Path, hub: dict[str, Tensors]) -> None:
    folder = write(tmp_path / "c", hub, common={"args": None})
    llama().config.save_pretrained(tmp_path / "hub")
    with uc.open(folder, options=SourceOptions(config=str(tmp_path / "hub"))) as source:
        assert set(source["model"]) == set(hub["param"])
    with uc.open(folder) as source:
        assert "decoder.layers.1.mlp.linear_fc1.weight" in source["model"]
    with pytest.raises(uc.FormatError, match=r"got no Megatron arguments(.|\n)*config.json"):
        uc.open(folder, options=SourceOptions(names="huggingface"))
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(uc.FormatError, match=r"config.json: expected a config of llama, mistral"):
        uc.open(folder, options=SourceOptions(config=str(tmp_path / "hub"), names="huggingface"))


# ---- damage


def test_unfinished_save_is_refused(folder: Path) -> None:
    (folder / "metadata.json").unlink()
    with pytest.raises(uc.FormatError, match=r"no metadata.json.*the save did not complete"):
        uc.open(folder, options=SourceOptions(format="megatron"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not valid JSON"),
        ("[]", "got a JSON list"),
        ('{"sharded_backend": "zarr"}', "sharded_backend: got 'zarr'"),
    ],
)
def test_other_backend_and_damaged_metadata_are_refused(
    folder: Path, content: str, text: str
) -> None:
    (folder / "metadata.json").write_text(content)
    with pytest.raises(uc.FormatError, match=rf"metadata.json: {text}"):
        uc.open(folder)


def test_missing_file_is_named_with_its_entries(folder: Path) -> None:
    next(iter(folder.glob("*.distcp"))).unlink()
    with pytest.raises(uc.IncompleteError, match=r"distcp: is missing"):
        uc.open(folder)


@pytest.mark.parametrize("cut", [0, 100, -10])
def test_truncated_file_is_named(folder: Path, cut: int) -> None:
    path = folder / "common.pt"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(uc.FormatError, match=r"common\.pt"):
        uc.open(folder)


def test_missing_common_state(folder: Path) -> None:
    (folder / "common.pt").unlink()
    with pytest.raises(uc.NotFoundError, match=r"common\.pt"):
        uc.open(folder)


@pytest.mark.parametrize(
    "name", ["decoder.layers.mlp.linear_fc9.weight", "decoder.final_layernorm.weight"]
)
def test_flattened_state_is_refused_and_model_loads(
    tmp_path: Path, hub: dict[str, Tensors], name: str
) -> None:
    folder = write(tmp_path / "c", hub, more={f"optimizer.state.exp_avg.{name}": torch.zeros(2, 3)})
    with uc.open(folder) as source:
        assert set(source["model"]) == set(hub["param"])
        with pytest.raises(
            uc.FormatError,
            match=rf"{name}/exp_avg: got shape \(2, 3\), as in flattened state",
        ):
            list(source["optimizer"])


class Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def test_hostile_files_are_refused_and_not_executed(
    tmp_path: Path, hub: dict[str, Tensors]
) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(
        uc.FormatError,
        match=r"common.pt: asks for classes that are not loaded from files(.|\n)*system",
    ):
        uc.open(write(tmp_path / "a", hub, common={"content_metadata": Hostile(mark)}))
    path = write(tmp_path / "b", hub, more={"rng_state/shard_0.0_1.1": [Hostile(mark)]})
    with (
        uc.open(path) as source,
        pytest.raises(
            uc.FormatError, match=r"rng_state/shard_0.0_1.1: asks for classes(.|\n)*system"
        ),
    ):
        _ = source.rank_extra[0]
    folder = write(tmp_path / "c", hub)
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Hostile(mark)}))
    with pytest.raises(
        uc.FormatError,
        match=r"metadata: asks for classes that are not loaded from files(.|\n)*system",
    ):
        uc.open(folder)
    assert not mark.exists()


# ---- Megatron-Core itself

REAL = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
PLAIN = {
    "tp": 1,
    "pp": 1,
    "ep": 1,
    "vpp": 1,
    "experts": 0,
    "groups": 2,
    "qkv_bias": False,
    "qk_norm": False,
    "vocab": 128,
    "tied": False,
}
PLAIN |= {"flat": False, "bucket": 0, "sharding": "fully_reshardable", "dist": True}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen2": (2, {"tp": 2, "flat": True, "qkv_bias": True}),
    "Qwen3": (4, {"tp": 2, "pp": 2, "vpp": 2, "tied": True, "qk_norm": True}),
    "Mixtral": (4, {"pp": 2, "ep": 2, "experts": 4, "flat": True, "groups": 4}),
}


def run(folder: Path, kind: str) -> dict[str, Any]:
    """Return what Megatron-Core reports of loading its own save."""
    world, more = RUNS[kind]
    job = json.dumps(PLAIN | more)
    torchrun(world, "worker_megatron_core.py", "save", folder, job, timeout_seconds=300)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(HERE / "worker_megatron_core.py"), "report", str(folder), job]
    done = subprocess.run(
        command,
        env=environment() | {"MASTER_PORT": port},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(torch.load(folder / "loaded.pt"))


@pytest.mark.slow
@REAL
@pytest.mark.parametrize("kind", RUNS)
def test_matches_megatron_core_itself(tmp_path: Path, kind: str) -> None:
    expected = run(tmp_path, kind)
    with uc.open(tmp_path / "legacy", options=SourceOptions(names="own")) as source:
        assert set(source["model"].keys()) == set(expected["model"])
        for key in ("model", "master_weights", "exp_avg", "exp_avg_sq"):
            for name, tensor in expected[key].items():
                actual = (
                    source["optimizer"][f"{name}/{key}"]
                    if key.startswith("exp")
                    else source[key][name]
                )
                assert torch.equal(actual[...], tensor), f"{key}:{name}"
        assert expected["exp_avg"] or kind == "Mixtral"
    with uc.open(tmp_path / "legacy") as legacy, uc.open(tmp_path / "dist") as dist:
        for rank in range(RUNS[kind][0]):
            states = [
                both.rank_extra[rank]["rng_state"]["torch_rng_state"] for both in (legacy, dist)
            ]
            assert torch.equal(*states)
        for part in ("model", "master_weights", "optimizer"):
            assert set(legacy[part].keys()) == set(dist[part].keys())
            assert all(
                torch.equal(legacy[part][name][...], dist[part][name][...]) for name in legacy[part]
            )
    more = {"num_local_experts": 4, "moe_intermediate_size": 24} if kind == "Mixtral" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=RUNS[kind][1].get("groups", 2),
        head_dim=8,
        intermediate_size=24 if kind == "Mixtral" else 48,
        tie_word_embeddings=kind == "Qwen3",
        rms_norm_eps=1e-6,
        **more,
    )
    for name in ("legacy", "dist"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()
        with open_model_names(tmp_path / name, model=model) as renamed:
            uc.load(renamed, model=model)
        with torch.no_grad():
            actual = model(expected["tokens"]).logits
        assert expected["logits"].float().std() > 0.05
        torch.testing.assert_close(actual.float(), expected["logits"].float(), atol=0.02, rtol=0.02)

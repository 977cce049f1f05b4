"""Megatron-Core's torch_dist matches Megatron's own load; flat buffers and damage are refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import unified_ckpt as uc
from tests.support.foreign.megatron_core import JOB, drawn, llama, write
from tests.support.foreign.megatrons import Tensors, arguments, group, no_decay, stage
from tests.support.foreign.source_cases import Hostile
from tests.support.processes.launch import PROGRAMS, environment, torchrun
from unified_ckpt.cli.main import main
from unified_ckpt.integrations.transformers.hub_names import open_model_names
from unified_ckpt.options import SourceOptions


@pytest.fixture
def hub() -> dict[str, Tensors]:
    return drawn()


@pytest.fixture
def folder(tmp_path: Path, hub: dict[str, Tensors]) -> Path:
    return write(tmp_path / "c", hub)


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
    """With several buckets, Megatron-Core 0.16 shifts the state by the padding."""
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


@pytest.mark.parametrize("grid", [(1, 1), (1, 1, 4), (1, 1, 2, 2)])
def test_random_state_of_each_rank(
    tmp_path: Path, hub: dict[str, Tensors], grid: tuple[int, ...]
) -> None:
    """Newer versions store one per data-parallel rank if experts are spread over them."""
    places = list(product(*map(range, grid)))
    more = {
        f"rng_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, grid))}": (
            f"state {number}",
        )
        for number, place in enumerate(places)
    }
    args = arguments(JOB, world_size=4, data_parallel_size=4)
    with uc.open(write(tmp_path / "c", hub, common={"args": args}, more=more)) as source:
        numbers = {2: [0] * 4, 3: [0, 1, 2, 3], 4: []}[len(grid)]
        assert [state["rng_state"] for state in source.rank_extra] == [
            f"state {number}" for number in numbers
        ]
        assert ("rng_state" in source.source.metadata().left_out) == (len(grid) == 4)
        assert source.extra["args"]["params_dtype"] is torch.bfloat16


def test_unknown_optimizer_is_refused_and_model_loads(
    tmp_path: Path, hub: dict[str, Tensors]
) -> None:
    """Such as SGD, which has no step count."""
    groups = [group(True, False), group(False, False)]
    for options in groups:
        del options["step"]
    optimizer = {"optimizer": {"optimizer": {"param_groups": groups}}}
    folder = write(tmp_path / "c", hub, common=optimizer)
    model = llama().bfloat16()
    uc.load(folder, model=model)
    assert torch.equal(model.model.norm.weight, hub["param"]["model.norm.weight"].bfloat16())
    with pytest.raises(uc.FormatError, match=r"optimizer: .*no step count(.*)load only the model"):
        uc.load(folder, model=model, optimizer=torch.optim.AdamW(model.parameters()))


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


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, r"the save did not complete"),
        ("{", "not valid JSON"),
        ("[]", "got a JSON list"),
        ('{"sharded_backend": "zarr"}', "sharded_backend: got 'zarr'"),
    ],
)
def test_other_backend_and_damaged_metadata_are_refused(
    folder: Path, content: str | None, text: str
) -> None:
    path = folder / "metadata.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(uc.FormatError, match=rf"metadata.json.*{text}"):
        uc.open(folder, options=SourceOptions(format=None if content else "megatron"))


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


def test_hostile_state_of_a_rank_is_not_executed(tmp_path: Path, hub: dict[str, Tensors]) -> None:
    hostile = Hostile(tmp_path / "mark")
    path = write(tmp_path / "b", hub, more={"rng_state/shard_0.0_1.1": [hostile]})
    with (
        uc.open(path) as source,
        pytest.raises(
            uc.FormatError, match=r"rng_state/shard_0.0_1.1: asks for classes(.|\n)*system"
        ),
    ):
        _ = source.rank_extra[0]
    assert not (tmp_path / "mark").exists()


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
RUNS: dict[str, dict[str, Any]] = {
    "Qwen2": {"tp": 2, "flat": True, "qkv_bias": True},
    "Qwen3": {"tp": 2, "pp": 2, "vpp": 2, "tied": True, "qk_norm": True},
    "Mixtral": {"pp": 2, "ep": 2, "experts": 4, "flat": True, "groups": 4},
}
RANKS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of `RUNS`: saves of Megatron-Core on `RANKS`, and what it reports of loading them."""
    root = tmp_path_factory.mktemp("megatron-core")
    jobs = json.dumps({kind: PLAIN | more for kind, more in RUNS.items()})
    torchrun(RANKS, "worker_megatron_core.py", "save", root, jobs, timeout_seconds=280)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable,
        str(PROGRAMS / "worker_megatron_core.py"),
        "report",
        str(root),
        jobs,
    ]
    done = subprocess.run(
        command,
        env=environment() | {"MASTER_PORT": port},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.mark.slow
@REAL
@pytest.mark.parametrize("kind", RUNS)
def test_matches_megatron_core_itself(runs: Path, kind: str) -> None:
    folder = runs / kind
    expected = torch.load(folder / "loaded.pt")
    with uc.open(folder / "legacy", options=SourceOptions(names="own")) as source:
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
    with uc.open(folder / "legacy") as legacy, uc.open(folder / "dist") as dist:
        for rank in range(RANKS):
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
        num_key_value_heads=RUNS[kind].get("groups", 2),
        head_dim=8,
        intermediate_size=24 if kind == "Mixtral" else 48,
        tie_word_embeddings=kind == "Qwen3",
        rms_norm_eps=1e-6,
        **more,
    )
    for name in ("legacy", "dist"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()
        with open_model_names(folder / name, model=model) as renamed:
            uc.load(renamed, model=model)
        with torch.no_grad():
            actual = model(expected["tokens"]).logits
        assert expected["logits"].float().std() > 0.05
        torch.testing.assert_close(actual.float(), expected["logits"].float(), atol=0.02, rtol=0.02)

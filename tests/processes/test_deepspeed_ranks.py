"""DeepSpeed folders, written by DeepSpeed on two and three ranks, match its live engine.

Wrong folders are refused. The workers also resume from the folders, by hand and under FSDP2,
and must reproduce DeepSpeed's own further losses.
"""

from __future__ import annotations

import argparse
import operator
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.foreign.conformance import CHECKS
from tests.support.foreign.source_cases import Case, Key
from tests.support.processes.launch import torchrun
from unified_ckpt.cli.main import main
from unified_ckpt.foreign.deepspeed import optimizer_files as deepspeed_ranks
from unified_ckpt.foreign.deepspeed import source as deepspeed
from unified_ckpt.foreign.deepspeed.optimizer_files import PLACEHOLDER_CLASSES
from unified_ckpt.foreign.restricted_pickle.load import load_torch

pytestmark = pytest.mark.integration

TWO = [
    "1",
    "1-robin",
    "2",
    "2-robin",
    "2-elastic",
    "2-aligned",
    "2-unzipped",
    "2-half",
    "bf16-optimizer",
    "3",
    "3-whole",
]
# What says how DeepSpeed lays the tensors out; its settings are in `ds_config`, too.
LAYOUT = [
    "fp32_flat_groups",  # the last rank's padding has any values
    "param_shapes",
    "frozen_param_shapes",
    "buffer_names",
    "shared_params",
    "zero_stage",
    "partition_count",
    "group_paddings",
    "param_alignment_paddings",
    "param_slice_mappings",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    "cat_dim",
]
THREE = ["2", "2-robin", "bf16-optimizer", "3"]
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        yield


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(3, tmp_path_factory.mktemp("three"))


def written(world: int, root: Path) -> Path:
    torchrun(world, "worker_deepspeed.py", root, timeout_seconds=240)
    return root


@pytest.fixture
def folder(two: Path, tmp_path: Path) -> Path:
    """A copy to damage: ZeRO 2 in bf16 with `latest`, global_step3 and global_step6."""
    return Path(shutil.copytree(two / "2", tmp_path / "ds"))


def check_equal(path: Path, expected_file: Path) -> None:
    expected = {
        key: tensor
        for key, tensor in torch.load(expected_file).items()
        if isinstance(tensor, torch.Tensor)
    }
    with uc.open(path) as source:
        assert source.format == "deepspeed"
        low = "master_weights" in source.parts
        assert low == any(tensor.dtype != torch.float32 for tensor in expected.values())
        stored = {
            f"{part}:{name}"
            for part in source.parts
            for name in source[part]
            if not name.endswith("/step")
        }
        assert stored == {key for key in expected if low or not key.startswith("master_weights:")}
        for key, tensor in expected.items():
            part, _, name = key.partition(":")
            actual = source[part if part in source.parts else "model"][name][...]
            assert actual.dtype == tensor.dtype
            assert torch.equal(actual, tensor), key
        steps = {
            float(source["optimizer"][name][...])
            for name in source["optimizer"]
            if name.endswith("/step")
        }
        assert steps == {3.0}
        assert torch.equal(
            source["model"]["head.weight"][2:5, 1:], expected["model:embed.weight"][2:5, 1:]
        )  # tied


@pytest.mark.parametrize("case", TWO)
def test_tensors_match_the_live_engine(two: Path, case: str) -> None:
    check_equal(two / case, two / f"{case}.pt")
    check_equal(two / case / "global_step3", two / f"{case}.pt")


@pytest.mark.slow  # three ranks on two cores
@pytest.mark.parametrize("case", THREE)
def test_sizes_not_divisible_by_three_ranks(three: Path, case: str) -> None:
    check_equal(three / case, three / f"{case}.pt")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", ["2", "3", "2-universal"])
def test_source_conforms(
    two: Path, tmp_path: Path, case: str, check: Callable[[Case], None]
) -> None:
    truth = torch.load(two / f"{case.removesuffix('-universal')}.pt")
    expected: dict[Key, torch.Tensor] = {}
    for key, tensor in truth.items():
        part, _, name = key.partition(":")
        if isinstance(tensor, torch.Tensor):
            expected[part, name] = tensor.detach()
        if part == "optimizer":
            expected[part, f"{name.rpartition('/')[0]}/step"] = torch.tensor(3.0)
    folder = two / case if "universal" in case else two / case / "global_step3"
    path = Path(shutil.copytree(folder, tmp_path / "ds" / folder.name))
    aliases = {"model": {"head.weight": "embed.weight"}}
    check(
        Case(
            path,
            expected,
            format="deepspeed",
            aliases=aliases,
            lazy_nbytes=1 << 20,
            no_state=tuple(f"*: {name}*" for name in LAYOUT),
        )
    )


def test_fixtures_use_the_intended_classes(two: Path) -> None:
    classes = {case: torch.load(two / f"{case}.pt")["optimizer's class"] for case in TWO}
    assert set(classes.values()) == {
        "DeepSpeedZeroOptimizer",
        "BF16_Optimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    }
    assert classes["bf16-optimizer"] == "BF16_Optimizer"
    starts = {
        case: (two / case / "global_step3" / MODEL).read_bytes()[:2] for case in ("2", "2-unzipped")
    }
    assert starts == {"2": b"PK", "2-unzipped": b"\x80\x02"}


@pytest.mark.parametrize("case", ["2", "3"])
def test_universal_checkpoints(two: Path, case: str) -> None:
    check_equal(two / f"{case}-universal", two / f"{case}.pt")


def test_latest_universal(two: Path, tmp_path: Path) -> None:
    """The converter writes it next to its output folder; the step's own folder may be gone."""
    shutil.copytree(two / "2-universal", tmp_path / "alone" / "converted")
    (tmp_path / "alone" / "latest_universal").write_text("converted")
    check_equal(tmp_path / "alone", two / "2.pt")
    shutil.copytree(two / "2-universal", tmp_path / "run" / "global_step3_universal")
    (tmp_path / "run" / "latest_universal").write_text("global_step3_universal")
    (tmp_path / "run" / "latest").write_text("global_step3")
    check_equal(tmp_path / "run", two / "2.pt")
    (tmp_path / "run" / "latest").write_text("global_step6")  # a later step is not the named one
    with pytest.raises(uc.IncompleteError, match="'global_step6', which does not exist"):
        uc.open(tmp_path / "run")


def test_round_robin_universal_checkpoint_is_refused(two: Path, tmp_path: Path) -> None:
    """DeepSpeed's converter silently writes wrong values in the right shapes."""
    expected = torch.load(two / "2-robin.pt")
    path = two / "2-robin-universal"
    targets: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for key, tensor in expected.items():
        part, _, name = key.partition(":")
        if part in targets:
            targets[part][name] = torch.zeros_like(tensor)
    uc.load(path, model=targets["model"])  # model weights are not merged from shards
    assert all(torch.equal(t, expected[f"model:{n}"]) for n, t in targets["model"].items())
    with pytest.raises(
        uc.IntegrityError, match=r"down.bias: element 0 of the fp32 weights(.|\n)*wrong order"
    ):
        uc.load(path, optimizer=targets["optimizer"], strict=False)
    with pytest.raises(uc.IntegrityError, match="wrong order"):
        uc.convert(path, tmp_path / "ours")
    assert list(tmp_path.iterdir()) == []


def test_client_state_and_scheduler(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with uc.open(two / "2") as source:
        metadata = source.source.metadata()
    assert metadata.step == 3
    assert metadata.extra["mine"] == {"seen": (1, 2)}
    assert metadata.extra["lr_scheduler"]["step_size"] == 2
    assert metadata.extra["global_samples"] == 24
    assert [group["options"]["weight_decay"] for group in metadata.groups] == [0.1, 0.0, 0.0]
    assert [group["names"] for group in metadata.groups][::2] == [
        ["embed.weight", "up.weight", "down.weight"],
        ["gain"],
    ]
    with uc.open(two / "2-half") as source:
        assert source.source.metadata().extra["loss_scaler"]["cur_scale"] == 256
    assert main(["inspect", str(two / "2")]) == 0
    output = capsys.readouterr().out
    assert "deepspeed" in output.lower()
    assert "BF16 [11, 7]" in output


def test_state_without_zero(two: Path) -> None:
    """The optimizer's state is by position: its names come from groups of the same order."""
    expected = torch.load(two / "0.pt")
    stored = torch.load(two / "0" / "global_step1" / MODEL)["optimizer"]["state"]
    order = (
        ("embed.weight", "up.weight", "down.weight"),
        ("up.bias", "down.bias", "norm.weight", "norm.bias"),
        ("gain",),
    )
    options = uc.SourceOptions(optimizer_order=order)
    with uc.open(two / "0", options=options) as source:
        for number, name in enumerate(name for names in order for name in names):
            for key, tensor in stored[number].items():
                assert torch.equal(source["optimizer"][f"{name}/{key}"][...], tensor), name
    with uc.open(two / "0") as source:
        assert set(source.parts) == {"model", "optimizer"}
        assert source.source.aliases("model") == {"head.weight": "embed.weight"}
        assert {*source["model"], "head.weight"} == set(expected)
        assert all(
            torch.equal(source["model"][name][...], tensor) for name, tensor in expected.items()
        )
        assert source.source.metadata().step == 1


def test_hub_clone_without_step_folder(folder: Path) -> None:
    with uc.open(folder) as source:
        model = {name: source["model"][name][...] for name in source["model"]}
    shutil.rmtree(folder / "global_step3")
    with pytest.raises(uc.IncompleteError, match="'global_step3', which does not exist"):
        uc.open(folder)
    for step in ("global_step6", "fresh", "unfrozen"):
        shutil.rmtree(folder / step)
    save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    with uc.open(folder) as source:
        assert source.format != "deepspeed"
        assert set(source["model"]) == set(model)


def test_nan_weights_equal_themselves(two: Path, folder: Path) -> None:
    """A diverged job is read unchanged."""
    dealt(folder, 1)
    edit(
        shards(folder)[0].name,
        lambda c: masters(c)[2].detach()[0].fill_(torch.nan),
    )(folder)
    with pytest.raises(uc.IntegrityError, match="gain: element 0 of the fp32 weights is nan"):
        read_all(folder)
    edit(MODEL, lambda content: content["module"]["gain"].fill_(torch.nan))(folder)
    read_all(folder)


@pytest.mark.parametrize(("case", "compared"), [("1", 0), ("2", 8), ("2-robin", 0), ("3", 8)])
def test_convert_compares_both_weights(two: Path, tmp_path: Path, case: str, compared: int) -> None:
    assert uc.convert(two / case, tmp_path / "ours").compared == compared
    with uc.open(tmp_path / "ours") as source:
        lr = source.source.metadata().groups[2]["options"]["lr"]
        assert lr == (0.003 if case != "2" else 0.0015)
        assert source.source.metadata().extra["mine"] == {"seen": (1, 2)}


def test_open_older_step_by_folder(folder: Path) -> None:
    with uc.open(folder / "global_step6") as source:
        assert source.source.metadata().step == 6
    (folder / "latest").write_text("global_step9")
    with pytest.raises(uc.IncompleteError, match="'global_step9', which does not exist"):
        uc.open(folder)
    (folder / "latest").write_text("../elsewhere")
    with pytest.raises(uc.FormatError, match=r"got '\.\./elsewhere', expected a folder in"):
        uc.open(folder)


@pytest.mark.parametrize("case", ["2", "3"])
def test_excluded_frozen_parameters(two: Path, case: str) -> None:
    with uc.open(two / case) as full, uc.open(two / case / "unfrozen") as source:
        assert set(full["model"]) - set(source["model"]) == {"frozen.weight", "frozen.bias"}
        for part in full.parts:
            assert all(
                torch.equal(source[part][name][...], full[part][name][...]) for name in source[part]
            )


@pytest.mark.parametrize("case", ["2", "3"])
def test_save_before_first_step(two: Path, case: str) -> None:
    with uc.open(two / case / "fresh") as source:
        assert source.source.metadata().step == 0
        assert torch.equal(source["master_weights"]["gain"][...], torch.ones(1))
        assert source.parts == ("master_weights", "model", "optimizer")
        assert not list(source["optimizer"]), "it has hyperparameters alone"
    read_all(two / case / "fresh")


@pytest.mark.slow  # imports all of Lightning on each rank
def test_lightning_folder(tmp_path: Path) -> None:
    torchrun(2, "worker_deepspeed_lightning.py", tmp_path, timeout_seconds=240)
    expected = torch.load(tmp_path / "model.pt")
    with uc.open(tmp_path / "last.ckpt") as source:
        assert source.format == "deepspeed"
        metadata = source.source.metadata()
        assert metadata.step == 3
        assert metadata.extra["hyper_parameters"] == {"hidden": 6}
        assert {name for group in metadata.groups for name in group["names"]} == {
            "net.0.weight",
            "net.0.bias",
            "net.1.weight",
            "net.1.bias",
        }
        assert set(source["model"]) == set(expected)
        assert all(
            torch.equal(source["model"][name][...], tensor) for name, tensor in expected.items()
        )
        assert source["optimizer"]["net.0.weight/exp_avg"].shape == (6, 5)
    read_all(tmp_path / "last.ckpt")


@pytest.mark.slow  # imports all of the Trainer on each rank
def test_trainer_folder(tmp_path: Path) -> None:
    torchrun(2, "worker_deepspeed_trainer.py", tmp_path, timeout_seconds=240)
    path = tmp_path / "run" / "checkpoint-3"
    expected = load_file(path / "model.safetensors")
    with uc.open(path) as source:
        assert source.format == "deepspeed"
        assert source.source.metadata().step == 3
        assert source.source.metadata().left_out == []
        assert source.extra["trainer_state"]["global_step"] == 3
        assert source.extra["scheduler"]["last_epoch"] == 3
        assert len(source.rank_extra) == 2
        assert {"python", "numpy", "torch"} <= source.rank_extra[1].keys()
        assert {name: str(tensor.dtype) for name, tensor in expected.items()} == dict.fromkeys(
            source["model"], "torch.bfloat16"
        )
        for name, tensor in expected.items():
            assert torch.equal(source["model"][name][...], tensor)
            assert torch.equal(source["master_weights"][name][...].bfloat16(), tensor)
        assert torch.equal(
            source["model"]["lm_head.weight"][...], expected["model.embed_tokens.weight"]
        )
    torchrun(2, "worker_trainer_formats.py", tmp_path, "deepspeed", timeout_seconds=240)
    expected["model.norm.weight"][0] += 1
    save_file(expected, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        uc.IntegrityError,
        match=r"model.norm.weight: element 0 of the fp32 weights(.|\n)*model.safetensors;",
    ):
        read_all(path)
    (path / "model.safetensors").unlink()  # the weights are then derived from the fp32 ones
    expected["model.norm.weight"][0] -= 1
    with uc.open(path) as source:
        assert torch.equal(
            source["model"]["model.layers.1.mlp.up_proj.weight"][...],
            expected["model.layers.1.mlp.up_proj.weight"],
        )


# ---- folders of many ranks, of two saves, and with parts missing


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "global_step3").glob("*_optim_states.pt"))


def dealt(folder: Path, world: int) -> None:
    """Repartition the same flat groups over `world` ranks, as DeepSpeed does."""
    rank_states = [
        load_torch(str(path), placeholders=PLACEHOLDER_CLASSES)["optimizer_state_dict"]
        for path in shards(folder)
    ]
    plain = {
        key: value
        for key, value in rank_states[0].items()
        if key not in ("loss_scaler", "param_slice_mappings")
    } | {"zero_stage": 2}
    used = [
        sum(rank_state["single_partition_of_fp32_groups"][i].numel() for rank_state in rank_states)
        for i in range(3)
    ]
    sizes = [-(-count // (2 * world)) * 2 for count in used]
    for path in shards(folder):
        path.unlink()

    def cut(parts: list[torch.Tensor], group: int, rank: int) -> torch.Tensor:
        flat = torch.cat(parts)[: used[group]]
        flat = torch.cat([flat, flat.new_zeros(world * sizes[group] - used[group])])
        return flat[rank * sizes[group] : (rank + 1) * sizes[group]].clone()

    for rank in range(world):
        paddings = [
            min(max((rank + 1) * size - count, 0), size)
            for size, count in zip(sizes, used, strict=True)
        ]
        weights = [
            cut(
                [rank_state["single_partition_of_fp32_groups"][i] for rank_state in rank_states],
                i,
                rank,
            )
            for i in range(3)
        ]
        states = {
            i: {"step": torch.tensor(3.0)}
            | {
                key: cut(
                    [
                        rank_state["base_optimizer_state"]["state"][i][key]
                        for rank_state in rank_states
                    ],
                    i,
                    rank,
                )
                for key in ("exp_avg", "exp_avg_sq")
            }
            for i in range(3)
        }
        state = plain | {
            "base_optimizer_state": {
                "state": states,
                "param_groups": rank_states[0]["base_optimizer_state"]["param_groups"],
            },
            "single_partition_of_fp32_groups": [
                rank_state[: rank_state.numel() - gap]
                for rank_state, gap in zip(weights, paddings, strict=True)
            ],
            "group_paddings": paddings,
            "partition_count": [world] * 3,
        }
        torch.save(
            {"optimizer_state_dict": state},
            folder / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


@pytest.mark.parametrize("world", [1, 5, 12])
def test_more_than_ten_ranks_are_ordered_by_number(two: Path, folder: Path, world: int) -> None:
    dealt(folder, world)
    check_equal(folder, two / "2.pt")


def test_step_count_in_options(two: Path, folder: Path) -> None:
    """DeepSpeed's own optimizers keep an int, in the group or in the state."""
    dealt(folder, 2)
    for path in shards(folder):
        content = torch.load(path, weights_only=True)
        for number, state in content["optimizer_state_dict"]["base_optimizer_state"][
            "state"
        ].items():
            group = content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][number]
            if number == 0:
                del state["step"]
                group["step"] = 3
            else:
                state["step"] = 3
        torch.save(content, path)
    check_equal(folder, two / "2.pt")
    with uc.open(folder) as source:
        assert all("step" not in group["options"] for group in source.source.metadata().groups)


def test_only_needed_files_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides, only rank 0's file is opened: thousands of ranks may open one folder."""
    dealt(folder, 12)
    opened_paths = []

    def note(path: str) -> deepspeed_ranks.RankFile:
        opened_paths.append(int(Path(path).name.split("_")[3]))
        return read_shard(path)

    read_shard = deepspeed_ranks.read_rank_file
    monkeypatch.setattr(deepspeed_ranks, "read_rank_file", note)
    monkeypatch.setattr(deepspeed, "read_rank_file", note)
    with uc.open(folder) as source:
        assert opened_paths == [0]
        source["optimizer"]["embed.weight/exp_avg"][2:4]  # elements [14, 28) of partitions of 14
        source["optimizer"]["embed.weight/exp_avg_sq"][2:4]
    assert opened_paths == [0, 1]


def test_namespace_in_client_state(folder: Path) -> None:
    edit(MODEL, lambda content: content.update(args=argparse.Namespace(lr=0.1)))(folder)
    with uc.open(folder) as source:
        assert source.source.metadata().extra["args"] == {"lr": 0.1}


def read_all(folder: Path) -> None:
    with uc.open(folder) as source:
        for part in sorted(source.parts, reverse=True):  # the optimizer first
            for name in source[part]:
                source[part][name][...]


# ---- damage

Damage = Callable[[Path], object]


def edit(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the content of a file of the step."""

    def act(folder: Path) -> None:
        path = folder / "global_step3" / file
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)

    return act


def of_five(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the optimizer's state of rank 1 of five."""

    def act(folder: Path) -> None:
        dealt(folder, 5)
        edit(SHARD.format(1), lambda content: change(content["optimizer_state_dict"]))(folder)

    return act


def exchange(pattern: str, *, swapped: bool) -> Damage:
    """Swap the files of two ranks, or put a copy of the first in place of the second."""

    def act(folder: Path) -> None:
        first, second = sorted((folder / "global_step3").glob(pattern))
        data = second.read_bytes()
        second.write_bytes(first.read_bytes())
        if swapped:
            first.write_bytes(data)

    return act


def copy(file: str, target: str) -> Damage:
    return lambda folder: shutil.copy(folder / file, folder / target)


def lose_ranks(folder: Path) -> None:
    dealt(folder, 12)
    for rank in (3, 10, 11):
        (folder / "global_step3" / SHARD.format(rank)).unlink()


def masters(content: dict[str, Any]) -> list[torch.Tensor]:
    return content["optimizer_state_dict"]["single_partition_of_fp32_groups"]


SHARD = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
SECOND, THIRD = (f"global_step3/bf16_{SHARD.format(rank)}" for rank in (1, 2))
STEP_6 = f"global_step6/bf16_{SHARD.format(1)}"
STATES, MODELS = "*_optim_states.pt", "zero_pp_rank_*_model_states.pt"
SWAPPED = r"was written as \S*zero_pp_rank_\d_\S*.pt, so files were swapped or copied"
FILE = "expected a model file of DeepSpeed"
DAMAGE: dict[str, tuple[str, Damage, type[uc.CheckpointError], str]] = {
    "ranks are missing": (
        "2",
        lose_ranks,
        uc.IncompleteError,
        r"rank_3_mp(.|\n)*rank_10_mp(.|\n)*rank_11_mp",
    ),
    # ZeRO 3 offers no other check: all parts have one size, and model files have no weights
    "swapped states": ("3", exchange(STATES, swapped=True), uc.FormatError, SWAPPED),
    "copied states": ("3", exchange(STATES, swapped=False), uc.FormatError, SWAPPED),
    "swapped models": ("3", exchange(MODELS, swapped=True), uc.FormatError, SWAPPED),
    "copied models": ("3", exchange(MODELS, swapped=False), uc.FormatError, SWAPPED),
    # a job died while it overwrote its last checkpoint
    "a file of another save": (
        "2",
        copy(STEP_6, SECOND),
        uc.FormatError,
        r"rank_1_\S*.pt: got step \[6.0(.|\n)*expected \[3.0(.|\n)*rank_0",
    ),
    "all states of another save": (
        "2",
        lambda folder: [
            shutil.copy(folder / "global_step6" / path.name, path) for path in shards(folder)
        ],
        uc.IntegrityError,
        "these are files of two saves",
    ),
    "a third rank": (
        "2",
        copy(SECOND, THIRD),
        uc.FormatError,
        r"got files of ranks \[2\], expected 2 ranks",
    ),
    "a second file of a rank": (
        "2",
        copy(SECOND, f"global_step3/{SHARD.format(1)}"),
        uc.FormatError,
        r"got files of two saves(.|\n)*zero_pp_rank_1",
    ),
    "a short partition": (
        "2",
        of_five(
            lambda state: operator.setitem(
                state["single_partition_of_fp32_groups"], 0, torch.ones(27)
            )
        ),
        uc.FormatError,
        r"rank_1\S*.pt: flat group 0: fp32: got shape \(27,\) of torch.float32, expected 30 to 30",
    ),
    "another dtype": (
        "2",
        of_five(
            lambda state: state["base_optimizer_state"]["state"][0].update(
                exp_avg=torch.zeros(30, dtype=torch.bfloat16)
            )
        ),
        uc.FormatError,
        r"rank_1\S*.pt: flat group 0: exp_avg: got shape \(30,\) of torch.bfloat16",
    ),
    "a missing state": (
        "2",
        of_five(lambda state: state["base_optimizer_state"]["state"][0].pop("exp_avg_sq")),
        uc.FormatError,
        r"rank_1\S*.pt: got other flat groups or states than \S*rank_0",
    ),
    "two counts of partitions": (
        "2",
        of_five(lambda state: state.update(partition_count=[5, 5, 1])),
        uc.FormatError,
        r"rank_1\S*.pt: got groups partitioned over \[1, 5\] ranks",
    ),
    "another count of ranks": (
        "2",
        of_five(lambda state: state.update(partition_count=[4, 4, 4])),
        uc.FormatError,
        r"rank_1\S*.pt: got ZeRO stage 2 on 4 ranks, expected stage 2 on 5 as in \S*rank_0",
    ),
    "no optimizer": (
        "2",
        of_five(lambda state: state.pop("base_optimizer_state")),
        uc.FormatError,
        r"rank_1\S*.pt: expected an optimizer file of ZeRO: KeyError",
    ),
    "universal: no weights of a parameter": (
        "2-universal",
        lambda folder: (folder / "zero/embed.weight/fp32.pt").unlink(),
        uc.IncompleteError,
        r"fp32.pt is missing for(.|\n)*embed.weight",
    ),
    "universal: no moment": (
        "2-universal",
        lambda folder: (folder / "zero/gain/exp_avg.pt").unlink(),
        uc.IncompleteError,
        r"optimizer states are missing(.|\n)*gain/exp_avg",
    ),
    "universal: no state of the optimizer": (
        "2-universal",
        lambda folder: (folder / "zero/optimizer_state.pt").unlink(),
        uc.IncompleteError,
        r"optimizer_state.pt",
    ),
    "universal: a moment of another parameter": (
        "2-universal",
        copy("zero/up.weight/exp_avg.pt", "zero/embed.weight/exp_avg.pt"),
        uc.FormatError,
        r"embed.weight/exp_avg.pt: got shape \(5, 7\), expected \(11, 7\)",
    ),
    "parameters in another order": (  # norm.weight after norm.bias, which has its shape
        "2",
        edit(MODEL, lambda content: content["param_shapes"][1].move_to_end("norm.weight")),
        uc.IntegrityError,
        "norm.(weight|bias): element 0 of the fp32 weights",
    ),
    "a parameter less": (
        "2",
        edit(MODEL, lambda content: content["param_shapes"][0].pop("up.weight")),
        uc.FormatError,
        "flat group 0: got 3 paddings for 2 parameters",
    ),
    "a parameter more": (
        "2",
        edit(MODEL, lambda content: content["param_shapes"][1].update(more=torch.Size([1000]))),
        uc.FormatError,
        "more",
    ),
    "another shape": (
        "2",
        edit(
            MODEL,
            lambda content: content["param_shapes"][0].update({"up.weight": torch.Size([7, 5])}),
        ),
        uc.FormatError,
        r"up.weight: got shape \(5, 7\), expected \(7, 5\)",
    ),
    "a group less": (
        "2",
        edit(MODEL, lambda content: content["param_shapes"].pop()),
        uc.FormatError,
        "got 3 flat groups, expected 2",
    ),
    "no weights": (
        "2",
        edit(MODEL, lambda content: content.update(module=None)),
        uc.FormatError,
        "got no weights",
    ),
    "no module": ("2", edit(MODEL, lambda content: content.pop("module")), uc.FormatError, FILE),
    "shapes of another form": (
        "2",
        edit(MODEL, lambda content: content.update(param_shapes=[3])),
        uc.FormatError,
        FILE,
    ),
    **{
        f"parallelism: {name}": (
            "2",
            copy(f"global_step3/{MODEL}", f"global_step3/{name}"),
            uc.FormatError,
            rf"is not read(.|\n)*{name}",
        )
        for name in (
            "layer_03-model_00-model_states.pt",
            "layer_0_expert_1_mp_rank_00_model_states.pt",
            "mp_rank_01_model_states.pt",
        )
    },
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folder_is_refused(two: Path, tmp_path: Path, name: str) -> None:
    case, damage, error, text = DAMAGE[name]
    folder = Path(shutil.copytree(two / case, tmp_path / "ds"))
    damage(folder)
    with pytest.raises(error, match=text):
        read_all(folder)

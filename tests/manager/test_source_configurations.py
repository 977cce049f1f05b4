"""The configurations on the checkpoint pages of PaddleNLP and MaxText, each run and resumed.

An uninterrupted run is the oracle: a resumed one must reach the same weights, bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.manager.managers import folders, steps_in

STEPS, RESUMED_STEPS = 4, 6
BFLOAT16 = uc.SaveOptions(model_dtype="bfloat16")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def uninterrupted(steps: int) -> dict[str, torch.Tensor]:
    model, optimizer = build()
    for step in range(1, steps + 1):
        train_step(model, optimizer, step)
    return weights(model)


def run(options: uc.RunOptions, last_step: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Train to `last_step`; return the first step and the final weights."""
    model, optimizer = build()
    with uc.CheckpointManager(options=options) as manager:
        report = manager.restore(model=model, optimizer=optimizer)
        first = report.step + 1 if report else 1  # as in the guide
        for step in range(first, last_step + 1):
            train_step(model, optimizer, step)
            manager.save(step, model=model, optimizer=optimizer)
        manager.finish(last_step, model=model, optimizer=optimizer)
    return first, weights(model)


def check_run(options: uc.RunOptions) -> Path:
    """Run, resume, and compare with an uninterrupted run. Return the root."""
    run(options, STEPS)
    first, resumed = run(options, RESUMED_STEPS)
    assert first == STEPS + 1
    assert same(resumed, uninterrupted(RESUMED_STEPS))
    return Path(str(options.root))


def parts_of(checkpoint: Path) -> set[str]:
    with uc.open(checkpoint) as opened:
        return set(opened.parts)


def parse(command: str) -> dict[str, str]:
    """Return the `name=value` arguments of a command line."""
    return dict(argument.split("=", 1) for argument in command.split() if "=" in argument)


# PaddleNLP: Unified Checkpoint


def test_paddle_command_with_all_options(tmp_path: Path) -> None:
    options = uc.from_paddle(
        unified_checkpoint=1,
        unified_checkpoint_config="enable_all_options",
        output_dir=str(tmp_path / "run"),
        save_steps=2,
        save=BFLOAT16,
    )
    assert parts_of(check_run(options) / "checkpoint-4") == {"master_weights", "optimizer"}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("skip_save_model_weight", {"master_weights", "optimizer"}),
        ("master_weight_compatible", {"model", "master_weights", "optimizer"}),
        ("async_save", {"model", "master_weights", "optimizer"}),
    ],
)
def test_paddle_option(tmp_path: Path, config: str, parts: set[str]) -> None:
    options = uc.from_paddle(config, output_dir=str(tmp_path), save_steps=2, save=BFLOAT16)
    assert parts_of(check_run(options) / "checkpoint-4") == parts


def test_paddle_command_with_compression(tmp_path: Path) -> None:
    """The page promises 78.5 % without the scales: 3 bytes of 14 per parameter."""
    plain = uc.from_paddle("", output_dir=str(tmp_path / "plain"), save_steps=2, save=BFLOAT16)
    options = uc.from_paddle(
        unified_checkpoint=1,
        unified_checkpoint_config="enable_all_options remove_master_weight",
        ckpt_quant_stage="O2",
        output_dir=str(tmp_path / "compressed"),
        save_steps=2,
        save=BFLOAT16,
    )
    nbytes = []
    for each in (plain, options):
        run(each, STEPS)
        files = (Path(str(each.root)) / "checkpoint-4").glob("*.safetensors")
        nbytes.append(sum(file.stat().st_size for file in files))
    assert parts_of(tmp_path / "compressed/checkpoint-4") == {"model", "optimizer"}
    assert nbytes[1] / nbytes[0] < 0.30
    first, resumed = run(options, RESUMED_STEPS)
    assert first == STEPS + 1
    for name, expected in uninterrupted(RESUMED_STEPS).items():
        torch.testing.assert_close(resumed[name], expected, rtol=0.1, atol=0.01)


# MaxText: checkpoints


def test_maxtext_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = uc.from_maxtext(
        base_output_directory="out",
        run_name="first",
        enable_checkpointing=True,
        async_checkpoint=True,
        checkpoint_period=2,
        enable_emergency_checkpoint=True,
        local_checkpoint_directory="local",
        local_checkpoint_period=1,
    )
    root = check_run(options)
    assert root == tmp_path / "out/first/checkpoints"
    assert steps_in(root) == [2, 4, 6]
    assert steps_in(tmp_path / "local") == [6]


# MaxText: GCS bucket-based checkpointing


def test_maxtext_gcs_checkpointing(tmp_path: Path) -> None:
    """Every flag of the page, away from its default where it has a meaning here."""
    options = uc.from_maxtext(
        {
            "base_output_directory": str(tmp_path),
            "run_name": "run",
            "enable_checkpointing": True,
            "async_checkpointing": False,
            "checkpoint_period": 1,
            "max_num_checkpoints_to_keep": 1,
            "enable_single_replica_ckpt_restoring": True,
            "checkpoint_todelete_subdir": ".todelete",
            "checkpoint_todelete_full_path": "",
            "load_parameters_path": "",
            "load_full_state_path": "",
            "force_unroll": False,
            "checkpoint_storage_target_data_file_size_bytes": 10_000,
            "checkpoint_storage_use_ocdbt": True,
            "checkpoint_storage_use_zarr3": True,
            "checkpoint_storage_concurrent_gb": 1,
            "enable_orbax_v1": False,
            "source_checkpoint_layout": "orbax",
            "checkpoint_conversion_fn": "none",
        }
    )
    root = check_run(options)
    assert steps_in(root) == [6]
    assert len(list((root / "checkpoint-6").glob("model-*.safetensors"))) > 1
    assert steps_in(root / ".todelete") == [1, 2, 3, 4, 5]
    assert uc.verify(root / ".todelete/checkpoint-3", deep=True).problems == ()
    assert options.load.share_reads == "always"
    assert options.save.host_bytes == 10**9


@pytest.mark.parametrize("flag", ["load_parameters_path", "load_full_state_path"])
def test_maxtext_gcs_checkpointing_load(
    tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(uc.from_maxtext(base_output_directory="a", checkpoint_period=2), STEPS)
    options = uc.from_maxtext(
        {
            "base_output_directory": "b",
            "checkpoint_period": 2,
            flag: "a/checkpoints/checkpoint-4",
            "checkpoint_todelete_full_path": "todelete",
            "max_num_checkpoints_to_keep": 5,
        }
    )
    first, _ = run(options, RESUMED_STEPS)
    assert first == (1 if flag == "load_parameters_path" else STEPS + 1)
    assert run(options, RESUMED_STEPS + 1)[0] == RESUMED_STEPS + 1, "its own steps come first"


def to_our_names(tree: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A `checkpoint_conversion_fn`."""
    return {
        part: {name.removeprefix("module."): tensors[name] for name in tensors}
        for part, tensors in tree.items()
    }


def test_maxtext_gcs_checkpointing_conversion_fn(tmp_path: Path) -> None:
    """The function changes the path of the configuration, not the steps of the run itself."""
    source = uninterrupted(STEPS)
    (tmp_path / "hf").mkdir()
    save_file(
        {f"module.{name}": tensor for name, tensor in source.items()},
        tmp_path / "hf/model.safetensors",
    )
    options = uc.from_maxtext(
        base_output_directory=str(tmp_path),
        checkpoint_period=2,
        load_parameters_path=str(tmp_path / "hf"),
        source_checkpoint_layout="safetensors",
        checkpoint_conversion_fn=f"{__name__}.to_our_names",
    )
    model, _ = build()
    with uc.CheckpointManager(options=options) as manager:
        assert manager.restore(model=model) is not None
    assert same(weights(model), source)
    assert run(options, STEPS)[0] == 1
    assert run(options, RESUMED_STEPS)[0] == STEPS + 1


@pytest.mark.parametrize("with_base", [True, False])
def test_maxtext_gcs_checkpointing_adapters(tmp_path: Path, *, with_base: bool) -> None:
    """A fresh run starts from the base and its adapters, and a later one from its own step."""
    adapters = {}
    for number, name in enumerate(("first", "second"), 1):
        (tmp_path / "lora" / name).mkdir(parents=True)
        (tmp_path / "lora" / name / "adapter_config.json").write_text("{}")
        adapters[f"adapter_model_{name}"] = {"w": torch.full((3,), float(number))}
        save_file(
            adapters[f"adapter_model_{name}"], tmp_path / f"lora/{name}/adapter_model.safetensors"
        )
    uc.save(tmp_path / "base", model={"m": torch.full((2,), 7.0)})
    options = uc.from_maxtext(
        base_output_directory=str(tmp_path),
        checkpoint_period=2,
        load_parameters_path=str(tmp_path / "base") if with_base else "",
        lora_input_adapters_path=str(tmp_path / "lora"),
    )

    def targets() -> dict[str, Any]:
        parts = {part: {"w": torch.zeros(3)} for part in adapters}
        return {"model": {"m": torch.zeros(2)}, "parts": parts}

    with uc.CheckpointManager(options=options) as manager:
        state = targets()
        report = manager.restore(**state)
        assert report.step == 0  # the run begins
        assert float(state["model"]["m"][0]) == (7.0 if with_base else 0.0)
        for part, tensors in adapters.items():
            assert torch.equal(state["parts"][part]["w"], tensors["w"])
        state["parts"]["adapter_model_first"]["w"].fill_(9)
        manager.finish(2, **state)
    with uc.CheckpointManager(options=options) as manager:
        state = targets()
        report = manager.restore(**state)
        assert report.step == 2
        assert float(state["parts"]["adapter_model_first"]["w"][0]) == 9.0
        with pytest.raises(uc.LayoutError, match=r"load_adapters_path .* expected a part adapter_"):
            uc.CheckpointManager(
                tmp_path / "empty", uc.ManagerOptions(load_adapters_path=str(tmp_path / "lora"))
            ).restore(model={"m": torch.zeros(2)})


@pytest.mark.parametrize("stacked", [True, False])
def test_maxtext_gcs_checkpointing_force_unroll(tmp_path: Path, *, stacked: bool) -> None:
    layers = [torch.randn(4, 3) for _ in range(5)]
    names = {f"decoder.layers.{number}.wi.kernel": layer for number, layer in enumerate(layers)}
    model = {"decoder.layers.wi.kernel": torch.stack(layers, dim=1)} if stacked else names
    uc.save(tmp_path / "stacked", model=model)
    options = uc.from_maxtext(force_unroll=True)
    uc.convert(tmp_path / "stacked", tmp_path / "params", parts=("model",), source=options.source)
    with uc.open(tmp_path / "params") as opened:
        assert sorted(opened["model"]) == sorted(names)
        for name, expected in names.items():
            assert torch.equal(opened["model"][name][...], expected)


# MaxText: emergency checkpointing


def test_maxtext_emergency_checkpointing(tmp_path: Path) -> None:
    command = (
        "python3 -m maxtext.trainers.pre_train.train src/maxtext/configs/base.yml run_name=run "
        f"base_output_directory={tmp_path}/out model_name=default dataset_type=synthetic steps=6 "
        "per_device_batch_size=6 checkpoint_period=3 enable_emergency_checkpoint=True "
        f"local_checkpoint_period=1 local_checkpoint_directory={tmp_path}/ramdisk num_slices=1"
    )
    assert steps_in(check_run(uc.from_maxtext(parse(command)))) == [3, 4, 6]
    assert steps_in(tmp_path / "ramdisk") == [6]


def test_maxtext_persistent_checkpoint_period(tmp_path: Path) -> None:
    options = uc.from_maxtext(
        base_output_directory=str(tmp_path / "out"),
        enable_emergency_checkpoint=True,
        local_checkpoint_directory=str(tmp_path / "local"),
        local_checkpoint_period=1,
        persistent_checkpoint_period=2,
    )
    assert steps_in(check_run(options)) == [2, 4, 6]


# MaxText: multi-tier checkpointing


@pytest.mark.parametrize(
    ("intervals", "seconds", "steps"),
    [
        ("{backup}_minutes=2 checkpoint_period=3", 120, [3, 4, 6]),
        ("{backup}_minutes=2 checkpoint_period=10000", 120, [4, 6]),
        ("{backup}_steps=4 checkpoint_period=2", None, [2, 4, 6]),
        ("{backup}_steps=2", None, [2, 4, 6]),
        ("checkpoint_period=3", None, [3, 4, 6]),
    ],
)
def test_maxtext_multi_tier_checkpointing(
    tmp_path: Path, intervals: str, seconds: int | None, steps: list[int]
) -> None:
    """Saves reach the root at the backup interval and at `checkpoint_period`."""
    command = (
        f"run_name=run base_output_directory={tmp_path}/out model_name=default "
        "dataset_type=synthetic steps=6 per_device_batch_size=6 num_slices=1 "
        "enable_checkpoint_cloud_logger=True enable_multi_tier_checkpointing=True "
        f"local_checkpoint_period=1 local_checkpoint_directory={tmp_path}/ramdisk "
        + intervals.format(backup="multi_tier_checkpointing_backup_interval")
    )
    options = uc.from_maxtext(parse(command))
    assert options.manager.interval_seconds == seconds
    assert steps_in(check_run(options)) == steps


# what goes with it


def test_trash_of_another_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(uc.StorageError, match="expected a folder on the file system of"):
        uc.CheckpointManager(
            tmp_path, uc.ManagerOptions(keep_latest=1, trash_directory="/proc/trash")
        )
    with pytest.raises(uc.StorageError, match="the root; expected another folder"):
        uc.CheckpointManager(tmp_path, uc.ManagerOptions(keep_latest=1, trash_directory="."))
    with pytest.raises(uc.OptionError, match="has no effect without a limit of checkpoints"):
        uc.CheckpointManager(tmp_path, uc.ManagerOptions(trash_directory="old"))
    assert folders(tmp_path) == []


def test_trash_keeps_two_checkpoints_of_one_name(tmp_path: Path) -> None:
    """A run that went back saves a step again."""
    model, optimizer = build()
    options = uc.ManagerOptions(
        interval_steps=1, keep_latest=1, trash_directory="old", asynchronous=False
    )
    for last_step in (2, 3):
        with uc.CheckpointManager(tmp_path, options) as manager:
            for step in range(1, last_step + 1):
                if step != 2 or last_step == 2:
                    manager.save(step, model=model, optimizer=optimizer)
    names = folders(tmp_path / "old")
    assert [name[:12] for name in names] == ["checkpoint-1", "checkpoint-2", "checkpoint-1"]
    for name in names:
        assert uc.verify(tmp_path / "old" / name, deep=True).problems == ()


def test_options_of_a_run_are_given_once(tmp_path: Path) -> None:
    options = uc.from_maxtext(base_output_directory=str(tmp_path))
    with pytest.raises(uc.FormatError, match="save_options: got it beside the options of a whole"):
        uc.CheckpointManager(options=options, save_options=uc.SaveOptions())
    with pytest.raises(uc.FormatError, match="root: got other, expected"):
        uc.CheckpointManager("other", options)
    with pytest.raises(uc.FormatError, match="root: got none, expected the folder"):
        uc.CheckpointManager(options=uc.from_paddle("async_save"))
    no_root = uc.from_maxtext(base_output_directory="")
    with pytest.raises(uc.FormatError, match="root: got none, expected the folder"):
        uc.CheckpointManager(options=no_root)
    with pytest.raises(uc.OptionError, match="root: got an empty path"):
        uc.CheckpointManager("", options=no_root)
    with uc.CheckpointManager(tmp_path / "run", uc.from_paddle("async_save")) as manager:
        assert manager.root == os.path.realpath(tmp_path / "run")

"""Options that limit each other, and their names in other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.manager.option_aliases import from_maxtext, from_paddle


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"load_parameters_path": "a", "load_full_state_path": "b"},
            "set load_parameters_path or load_full_state_path, not both",
        ),
        (
            {"load_parameters_path": "a", "enabled": False},
            "a path to load from requires enabled=True",
        ),
        ({"keep_best": 2}, "keep_best requires best_metric"),
        ({"lazy": True, "asynchronous": False}, "set asynchronous=True"),
        ({"interval_steps": 0}, "greater than or equal to 1"),
        ({"keep_latest": 0}, "greater than or equal to 1"),
        ({"interval_seconds": float("nan")}, "finite"),
        ({"step_prefix": ".unified-"}, "pattern"),
        ({"step_prefix": "a/b"}, "pattern"),
        ({"local_directory": "", "local_interval_steps": 3}, "got an empty path, expected a path"),
        ({"local_directory": "d"}, "set both or neither"),
        ({"local_interval_steps": 3}, "set both or neither"),
        ({"save_interval": 3}, "ManagerOptions has no option 'save_interval'"),
        ({"keep_lastest": 3}, "no option 'keep_lastest'; did you mean 'keep_latest'"),
    ],
)
def test_manager_options_refuse(options: dict[str, Any], text: str) -> None:
    with pytest.raises(uc.OptionError, match=text.replace("(", r"\(")):
        uc.ManagerOptions(**options)


def test_save_and_load_options_refuse() -> None:
    for kind, name, value in (
        (uc.SaveOptions, "model_dtype", "int8"),
        (uc.SaveOptions, "if_exists", "maybe"),
        (uc.SaveOptions, "max_file_bytes", 0),
        (uc.SaveOptions, "timeout_seconds", 0),
        (uc.SaveOptions, "typo", 1),
        (uc.SaveOptions, "compression", "O3"),
        (uc.LoadOptions, "verify", "some"),
        (uc.LoadOptions, "max_over_read", 0.9),
        (uc.LoadOptions, "typo", 1),
    ):
        with pytest.raises(uc.OptionError, match=name):
            kind(**{name: value})
    assert uc.SaveOptions(model_dtype=torch.float16) == uc.SaveOptions(model_dtype="float16")


def test_misspelt_options_and_values_are_named() -> None:
    with pytest.raises(ValueError, match="no option 'modle_dtype'; did you mean 'model_dtype'"):
        uc.SaveOptions(modle_dtype="bfloat16")  # type: ignore[call-arg]
    with pytest.raises(uc.CheckpointError) as wrong:
        uc.SaveOptions(compression="losless", max_file_bytes=0)  # type: ignore[arg-type]
    assert str(wrong.value) == (
        "SaveOptions(max_file_bytes): got 0, but it should be greater than or equal to 1; "
        "SaveOptions(compression): got 'losless', expected 'none', 'lossless', 'O1' or 'O2'; "
        "did you mean 'lossless'?"
    )
    with pytest.raises(uc.OptionError, match=r"\(parts\): got \(\), expected at least one"):
        uc.LoadOptions(parts=())  # would load nothing
    with pytest.raises(uc.OptionError, match="SourceOptions has no option 'fromat'; did you mean"):
        uc.LoadOptions(source={"fromat": "dcp"})  # type: ignore[arg-type]
    with pytest.raises(uc.OptionError, match="has no option 'zzz'; it has to, source"):
        uc.convert("a", "b", zzz="dcp")


def test_maxtext_names() -> None:
    options = from_maxtext(
        {
            "enable_checkpointing": True,
            "async_checkpointing": False,
            "checkpoint_period": 500,
            "max_num_checkpoints_to_keep": 3,
            "save_checkpoint_on_start": True,
            "save_checkpoint_on_completion": False,
            "enable_autocheckpoint": False,
            "enable_continuous_checkpointing": True,
            "load_parameters_path": "",
            "load_full_state_path": "runs/a/checkpoint-1",
            "checkpoint_storage_target_data_file_size_bytes": 2147483648,
            "enable_emergency_checkpoint": False,
            "local_checkpoint_directory": "",
            "local_checkpoint_period": 0,
            "checkpoint_todelete_subdir": None,
        },
        manager=uc.ManagerOptions(keep_every_steps=7),
    )
    assert options.manager == uc.ManagerOptions(
        asynchronous=False,
        interval_steps=500,
        keep_latest=3,
        on_start=True,
        on_completion=False,
        on_preemption=False,
        continuous=True,
        load_full_state_path="runs/a/checkpoint-1",
        keep_every_steps=7,
    )
    assert options.save == uc.SaveOptions(max_file_bytes=2147483648)
    assert from_maxtext({}).manager == uc.ManagerOptions()
    tiers = {
        "enable_emergency_checkpoint": True,
        "local_checkpoint_directory": "local",
        "local_checkpoint_period": 20,
    }
    assert from_maxtext(tiers).manager == uc.ManagerOptions(
        local_directory="local", local_interval_steps=20
    )


LOCAL = {"local_checkpoint_directory": "d", "local_checkpoint_period": 5}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"source_checkpoint_layout": "pickle"},
            "source_checkpoint_layout: got 'pickle', expected one of orbax, safetensors",
        ),
        (
            {"local_checkpoint_directory": "d"},
            "local_checkpoint_directory='d': got neither enable_emergency_checkpoint nor",
        ),
        (
            {"local_checkpoint_period": 5},
            "local_checkpoint_period=5: got neither enable_emergency_checkpoint nor",
        ),
        (
            {"enable_multi_tier_checkpointing": True},
            "`local_checkpoint_directory` must be set for multi-tier checkpointing.",
        ),
        (
            {"enable_multi_tier_checkpointing": True, **LOCAL},
            "got none, expected one of multi_tier_checkpointing_backup_interval_minutes and",
        ),
        (
            {
                "enable_multi_tier_checkpointing": True,
                **LOCAL,
                "multi_tier_checkpointing_backup_interval_minutes": 1,
                "multi_tier_checkpointing_backup_interval_steps": 20,
            },
            "got two intervals, expected one of",
        ),
        (
            {
                "enable_multi_tier_checkpointing": True,
                **LOCAL,
                "multi_tier_checkpointing_backup_interval_steps": 4,
            },
            "got 4, expected at least local_checkpoint_period",
        ),
        (
            {"enable_multi_tier_checkpointing": 1, "enable_emergency_checkpoint": "True", **LOCAL},
            "enable_emergency_checkpoint: got it beside enable_multi_tier_checkpointing",
        ),
        (
            {"enable_emergency_checkpoint": True, **LOCAL, "local_checkpoint_period": "often"},
            "local_checkpoint_period: got 'often', expected a number",
        ),
        (
            {"checkpoint_todelete_subdir": "a", "checkpoint_todelete_full_path": "/b"},
            "checkpoint_todelete_full_path: got it beside checkpoint_todelete_subdir",
        ),
        (
            {"async_checkpoint": True, "async_checkpointing": False},
            "async_checkpointing: got two values",
        ),
        ({"enable_orbax_v1": True}, "enable_orbax_v1=True: not supported: it selects a storage"),
        ({"save_dtype": "bfloat16"}, "not supported: .*unified-ckpt convert"),
        (
            {"enable_emergency_checkpoint": True, "local_checkpoint_period": 5},
            "`local_checkpoint_directory` must be set for emergency checkpointing.",
        ),
        (
            {
                "enable_emergency_checkpoint": True,
                "local_checkpoint_directory": "d",
                "local_checkpoint_period": 0,
            },
            "`local_checkpoint_period` must be > 0 for emergency checkpointing.",
        ),
        (
            {"checkpoint_perod": 3},
            "checkpoint_perod: got an unknown checkpoint flag, .*did you mean 'checkpoint_period'",
        ),
    ],
)
def test_maxtext_names_without_a_meaning_are_refused(flags: dict[str, object], text: str) -> None:
    with pytest.raises(uc.FormatError, match=text):
        from_maxtext(flags)


def test_maxtext_default_section() -> None:
    flags = {
        "load_parameters_path": "",
        "load_full_state_path": "",
        "enable_checkpointing": True,
        "save_checkpoint_on_completion": True,
        "async_checkpointing": True,
        "checkpoint_period": 10_000,
        "max_num_checkpoints_to_keep": "None",  # YAML has no None
        "enable_continuous_checkpointing": False,
        "enable_single_replica_ckpt_restoring": False,
        "force_unroll": False,
        "checkpoint_storage_target_data_file_size_bytes": 2147483648,
        "checkpoint_storage_use_ocdbt": True,
        "checkpoint_storage_use_zarr3": True,
        "checkpoint_storage_concurrent_gb": 96,
        "enable_orbax_v1": False,
        "checkpoint_conversion_fn": "none",
        "source_checkpoint_layout": "orbax",
        "colocated_python_checkpointing": False,
    }
    options = from_maxtext(flags)
    assert options.manager == uc.ManagerOptions(interval_steps=10_000)
    assert options.save == uc.SaveOptions(max_file_bytes=2147483648, host_bytes=96_000_000_000)


def test_synchronous_maxtext_config_disables_lazy() -> None:
    lazy = uc.ManagerOptions(lazy=True)
    assert not from_paddle("master_weight_compatible", manager=lazy).manager.lazy
    assert not from_maxtext({"async_checkpointing": False}, manager=lazy).manager.lazy
    assert from_paddle("async_save", manager=lazy).manager.lazy
    assert from_maxtext({}, manager=lazy).manager.lazy


@pytest.mark.parametrize(
    ("config", "asynchronous", "omit"),
    [
        ("", False, ()),
        ("async_save", True, ()),
        ("async_save skip_save_model_weight master_weight_compatible", True, ("model",)),
        ("async_save,remove_master_weight,async_save", True, ("master_weights",)),
        ("enable_all_options", False, ("model",)),
        ("enable_all_options remove_master_weight", False, ("master_weights",)),
        ("master_weight_compatible", False, ()),
    ],
)
def test_paddle_config(config: str, asynchronous: bool, omit: tuple[str, ...]) -> None:
    options = from_paddle(config, manager=uc.ManagerOptions(interval_steps=3))
    assert options.manager == uc.ManagerOptions(interval_steps=3, asynchronous=asynchronous)
    assert options.save == uc.SaveOptions(omit=omit)


def test_paddle_config_adds_to_omitted_parts() -> None:
    options = from_paddle("remove_master_weight", save=uc.SaveOptions(omit=("ema",)))
    assert options.save.omit == ("ema", "master_weights")
    with pytest.raises(uc.OptionError, match=r"got parts=.'model',. and omit=.'master_weights'"):
        from_paddle("remove_master_weight", save=uc.SaveOptions(parts=("model",)))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("async", "got unknown flag 'async', expected one of async_save, .*mean 'async_save'"),
        (
            "ignore_merge_optimizer",
            "ignore_merge_optimizer is not supported: the optimizer is always merged",
        ),
        ("skip_save_model_weight remove_master_weight", "leave no weights"),
    ],
)
def test_paddle_config_is_refused(config: str, text: str) -> None:
    with pytest.raises(uc.FormatError, match=text):
        from_paddle(config)


@pytest.mark.parametrize(
    ("stage", "compression"), [(None, "lossless"), ("O0", "none"), ("O1", "O1"), ("O2", "O2")]
)
def test_paddle_quant_stage(stage: str | None, compression: str) -> None:
    save = uc.SaveOptions(compression="lossless")
    options = from_paddle("remove_master_weight", ckpt_quant_stage=stage, save=save)
    assert options.save.compression == compression
    assert options.save.omit == ("master_weights",)


def test_paddle_quant_stage_o3_is_refused() -> None:
    with pytest.raises(uc.FormatError, match="got 'O3', expected one of O0, O1, O2; PaddleNLP"):
        from_paddle("", ckpt_quant_stage="O3")


def test_wrong_values_under_other_names_are_option_errors() -> None:
    for convert, arguments in (
        (from_maxtext, {"checkpoint_period": 0}),
        (from_maxtext, {"async_checkpointing": "maybe"}),
        (from_paddle, {"save_steps": "often"}),
    ):
        with pytest.raises(uc.OptionError, match=r"^ManagerOptions\(\w+\): got "):
            convert(**arguments)

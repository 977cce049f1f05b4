"""Options that limit each other, and their names in other libraries."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.foreign.orbax.options import from_maxtext
from unified_ckpt.foreign.paddle.options import from_paddle

MANAGER, SAVE, LOAD, SOURCE = uc.ManagerOptions, uc.SaveOptions, uc.LoadOptions, uc.SourceOptions


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"load_parameters_path": "a", "load_full_state_path": "b"},
            "set load_parameters_path or load_full_state_path, not both",
        ),
        ({"interval_steps": 0}, "greater than or equal to 1"),
        ({"keep_latest": 0}, "greater than or equal to 1"),
        ({"interval_seconds": float("nan")}, "finite"),
        ({"step_prefix": ".unified-"}, "pattern"),
        ({"step_prefix": "a/b"}, "pattern"),
        ({"local_directory": "", "local_interval_steps": 3}, "got an empty path, expected a path"),
        ({"step_prefix": "run1"}, "pattern"),  # run15 would be step 5 or 15
        ({"step_prefix": "7"}, "pattern"),
        ({"save_interval": 3}, "ManagerOptions has no option 'save_interval'"),
        ({"keep_lastest": 3}, "no option 'keep_lastest'; did you mean 'keep_latest'"),
    ],
)
def test_manager_options_refuse(options: dict[str, Any], text: str) -> None:
    with pytest.raises(uc.OptionError, match=re.escape(text)):
        uc.ManagerOptions(**options)


def test_default_values_are_effective_anywhere() -> None:
    """A configuration that names every default is as good as an empty one."""
    for kind in (MANAGER, SAVE, LOAD, SOURCE):
        assert kind(**kind().model_dump()) == kind()
    assert uc.ManagerOptions(asynchronous=False, lazy=False, in_flight="wait")
    assert uc.ManagerOptions(step_prefix="").step_prefix == ""


def test_help_explains_every_option() -> None:
    for kind in (MANAGER, SAVE, LOAD, SOURCE, uc.ConvertOptions):
        for name, field in kind.model_fields.items():
            assert f"\n`{name}`: {field.description}" in (kind.__doc__ or ""), name


@pytest.mark.parametrize(
    ("kind", "options", "required"),
    [
        (MANAGER, {"load_parameters_path": "a", "enabled": False}, "enabled"),
        (MANAGER, {"load_full_state_path": "a", "enabled": False}, "enabled"),
        (MANAGER, {"load_adapters_path": "a", "enabled": False}, "enabled"),
        (MANAGER, {"keep_best": 2}, "best_metric"),
        (MANAGER, {"best_mode": "max"}, "best_metric"),
        (MANAGER, {"lazy": True, "asynchronous": False}, "asynchronous"),
        (MANAGER, {"in_flight": "skip", "asynchronous": False}, "asynchronous"),
        (MANAGER, {"retry_seconds": 5, "retries": 0}, "retries"),
        (MANAGER, {"local_directory": "d"}, "local_interval_steps"),
        (MANAGER, {"local_interval_steps": 3}, "local_directory"),
        (MANAGER, {"keep_latest_local": 2}, "local_directory"),
        (SOURCE, {"layer_dim": 1}, "layers"),
    ],
)
def test_options_without_effect_name_what_they_require(
    kind: type[Any], options: dict[str, Any], required: str
) -> None:
    name, text = next(iter(options)), kind.__name__
    expected = f"{text}({name}) has no effect without {text}({required}=...); set it too"
    with pytest.raises(uc.OptionError, match=f"^{re.escape(expected)}$"):
        kind(**options)


def test_removed_options_name_what_replaces_them() -> None:
    text = "SourceOptions has no option 'layer_lists': layers= detects the lists; stack others by"
    with pytest.raises(uc.OptionError, match=re.escape(text)):
        uc.SourceOptions(layers="stacked", layer_lists=("h",))


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (SAVE, {"compression": "O1", "parts": ("model", "ema")}, "compression='O1' requires"),
        (
            SAVE,
            {"compression": "lossless", "omit": ("master_weights", "optimizer")},
            "compression='lossless' requires master_weights or optimizer",
        ),
        (uc.ConvertOptions, {"adapter": "lora", "compression": "O1"}, "compression='O1' requires"),
        (uc.ConvertOptions, {"parts": ("model",), "compression": "O1"}, "compression='O1' req"),
        (
            LOAD,
            {"hyperparameters": "current", "parts": ("model",)},
            "hyperparameters requires optimizer in parts",
        ),
    ],
)
def test_options_of_parts_that_are_left_out_are_refused(
    kind: type[Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(uc.OptionError, match=text):
        kind(**options)


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
            "got no interval of the saves to base_output_directory, expected one; add "
            "multi_tier_checkpointing_backup_interval_steps",
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
            {
                "enable_multi_tier_checkpointing": True,
                **LOCAL,
                "multi_tier_checkpointing_backup_interval_steps": 20,
                "checkpoint_period": 30,
            },
            "checkpoint_period: got 30 beside .*=20, expected a multiple or a divisor of it",
        ),
        (
            {"checkpoint_todelete_subdir": "old"},
            "checkpoint_todelete_subdir: got no limit .*; add max_num_checkpoints_to_keep",
        ),
        ({"enable_single_replica_ckpt_restoring": "maybe"}, "'maybe', expected True or False"),
        ({"enable_emergency_checkpoint": 2}, "got 2, expected True or False"),
        (
            {"convert_checkpoint_if_possible": True},
            "convert_checkpoint_if_possible=True: not supported: set load_parameters_path",
        ),
        ({"hf_lora_adapter_path": "user/adapter"}, "set lora_input_adapters_path"),
        (
            {"lora": {"lora_rank": 8, "lora_restore_path": "adapter"}},
            "lora.lora_restore_path: got a checkpoint flag inside lora, expected none",
        ),
        (
            {"student_overrides": {"load_parameters_path": "gs://bucket/0/items"}},
            "student_overrides.load_parameters_path: got a checkpoint flag inside student_",
        ),
        ({"base_output_directry": "out"}, "did you mean 'base_output_directory'"),
        ({"enable_ckpt_compression": True}, "enable_ckpt_compression: got an unknown checkpoint"),
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
        "save_checkpoint_on_start": True,
        "enable_autocheckpoint": False,
        "checkpoint_todelete_subdir": "None",
        "checkpoint_todelete_full_path": "None",
        "lora_input_adapters_path": "",
        "hf_lora_adapter_path": "",
        "checkpoint_is_quantized": False,
        "save_quantized_params_path": "",
        "enable_checkpoint_cloud_logger": False,
        "enable_emergency_checkpoint": False,
        "enable_multi_tier_checkpointing": False,
        "local_checkpoint_directory": "",
        "local_checkpoint_period": 0,
        "multi_tier_checkpointing_backup_interval_minutes": None,
        "multi_tier_checkpointing_backup_interval_steps": None,
        "use_replicator_service": False,
        "replicator_backup_interval_minutes": 0,
        "mtc_data_parallelism": 0,
        "base_output_directory": "",
        "run_name": "",
        "param_scan_axis": 1,
    }
    # flags of the model, the data and the hardware, some of them similar to those of checkpoints
    others = {
        "model_name": "default",
        "weight_dtype": "float32",
        "steps": 150_001,
        "ici_data_parallelism": 1,
        "load_from_prefill_dir": False,
        "save_config_to_gcs": False,
        "mesh_axes": ["data", "fsdp"],
        "vllm_hf_overrides": {},
        "wandb": {"run_name": "first", "output_dir": "logs"},
        "lora": {"enable_lora": False, "lora_restore_path": ""},
    }
    options = from_maxtext({**flags, **others})
    assert options.root is None
    assert options.load == uc.LoadOptions()
    assert options.manager == uc.ManagerOptions(
        interval_steps=10_000, on_start=True, on_preemption=False
    )
    assert options.save == uc.SaveOptions(max_file_bytes=2147483648, host_bytes=96_000_000_000)
    for name, value in flags.items():  # each alone, as YAML and as a command line have it
        from_maxtext({name: value})
        from_maxtext({name: str(value)})
        from_maxtext({name: str(value).lower()})
    tiers = {"enable_multi_tier_checkpointing": True, **LOCAL}
    assert from_maxtext({**flags, **tiers}).manager == uc.ManagerOptions(
        interval_steps=10_000,
        on_start=True,
        on_preemption=False,
        local_directory="d",
        local_interval_steps=5,
    )


def test_synchronous_config_disables_background_options() -> None:
    lazy = uc.ManagerOptions(lazy=True, in_flight="skip")
    assert from_paddle("", manager=lazy).manager == uc.ManagerOptions(asynchronous=False)
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
    assert options.load == uc.LoadOptions(cast=True), "weights become masters"
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


TRAINING = {  # of PaddleNLP, not about checkpoints
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "per_device_train_batch_size": 1,
    "evaluation_strategy": "steps",
    "eval_steps": 100,
    "logging_dir": "vdl_log",
    "ignore_data_skip": False,
    "sharding": "stage2",
    "recompute": 1,
    "bf16": True,
    "skip_memory_metrics": True,
}


@pytest.mark.parametrize(
    ("arguments", "manager", "save"),
    [
        ({}, {}, {}),
        (
            {
                "load_best_model_at_end": True,
                "metric_for_best_model": "accuracy",
                "save_strategy": "steps",
                "save_steps": 20,
                "save_total_limit": 1,
            },
            {
                "interval_steps": 20,
                "keep_latest": 1,
                "best_metric": "accuracy",
                "best_mode": "max",
            },
            {},
        ),
        ({"load_best_model_at_end": 1}, {"best_metric": "loss", "best_mode": "min"}, {}),
        (
            {"metric_for_best_model": "f1", "greater_is_better": "false"},
            {"best_metric": "f1", "best_mode": "min"},
            {},
        ),
        (
            {"ignore_save_lr_and_optim": 1, "save_total_limit": 0},
            {},
            {"omit": ("master_weights", "optimizer")},
        ),
        ({"save_strategy": "no", "save_steps": 500}, {}, {}),
        ({"save_strategy": False}, {}, {}),  # how YAML reads `no`
        ({"use_async_save": True}, {"asynchronous": True}, {}),
        (
            {"unified_checkpoint_config": ["async_save", "skip_save_model_weight"]},
            {"asynchronous": True},
            {"omit": ("model",)},
        ),
        ({"enable_zero_cost_checkpoint": True}, {"asynchronous": True, "lazy": True}, {}),
    ],
)
def test_paddle_training_arguments(
    arguments: dict[str, Any], manager: dict[str, Any], save: dict[str, Any]
) -> None:
    options = from_paddle(**TRAINING, **arguments)
    assert options.manager == uc.ManagerOptions(**{"asynchronous": False, **manager})
    assert options.save == uc.SaveOptions(**save)
    assert options.load == uc.LoadOptions()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"save_strategy": "epoch"}, "save_strategy: got 'epoch', expected steps or no; set save_"),
        ({"save_step": 5}, "save_step: got an unknown .*; did you mean 'save_steps'"),
        ({"unified_ckpt": True}, "unified_ckpt: got an unknown checkpoint flag"),
        ({"overwrite_output_dir": True}, "a run starts afresh in an empty folder"),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, "load_full_state_path=...\\) continues"),
        ({"ignore_load_lr_and_optim": True}, "leave the optimizer out of restore"),
        ({"flash_device_save_steps": 5}, "pass manager=ManagerOptions.local_directory="),
        ({"greater_is_better": True}, "greater_is_better: got no metric, .* add metric_for_best"),
        (
            {"unified_checkpoint": 0, "unified_checkpoint_config": "async_save"},
            "got flags, which need unified_checkpoint; add unified_checkpoint=True",
        ),
        (
            {
                "ignore_save_lr_and_optim": True,
                "unified_checkpoint_config": "skip_save_model_weight",
            },
            "ignore_save_lr_and_optim: got it beside .* leaves no weights",
        ),
    ],
)
def test_paddle_training_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(uc.FormatError, match=text):
        from_paddle(**TRAINING, **arguments)


@pytest.mark.parametrize(
    ("stage", "compression"), [(None, "lossless"), ("O0", "none"), ("O1", "O1"), ("O2", "O2")]
)
def test_paddle_quant_stage(stage: str | None, compression: str) -> None:
    save = uc.SaveOptions(compression="lossless")
    options = from_paddle("remove_master_weight", ckpt_quant_stage=stage, save=save)
    assert options.save.compression == compression
    assert options.save.omit == ("master_weights",)


@pytest.mark.parametrize("stage", ["O3", ["O1"]])
def test_other_paddle_quant_stages_are_refused(stage: object) -> None:
    expected = f"got {stage!r}, expected one of O0, O1, O2; PaddleNLP"
    with pytest.raises(uc.FormatError, match=re.escape(expected)):
        from_paddle("", ckpt_quant_stage=stage)


def test_wrong_values_under_other_names_are_option_errors() -> None:
    for convert, arguments in (
        (from_maxtext, {"checkpoint_period": 0}),
        (from_maxtext, {"async_checkpointing": "maybe"}),
        (from_paddle, {"save_steps": "often"}),
    ):
        with pytest.raises(uc.OptionError, match=r"^ManagerOptions\(\w+\): got "):
            convert(**arguments)

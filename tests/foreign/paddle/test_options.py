"""Every training argument of PaddleFormers and PaddleNLP that is about checkpoints.

`fixtures/paddle-arguments.json` has the fields of `TrainingArguments` with their defaults, read
from the packages: all of the newest version, and where older ones differ.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path

import pytest

import unified_ckpt as uc
from unified_ckpt.foreign.paddle.options import from_paddle

FIELDS = json.loads((Path(__file__).parents[2] / "fixtures" / "paddle-arguments.json").read_text())
NEWEST = FIELDS["PaddleFormers 1.2.0"]
ABOUT_CHECKPOINTS = re.compile(
    "save|load(?!er)|ckpt|checkpoint|hf|zcc|flash_device|signal|resume|reshard|rng|best_model"
    "|metric_for|greater|ema|aoa|replic|output_dir|optim_shard|pdc"
)
TRAINING = {  # their names match, but they are about memory
    *("offload_fp8_expert_master_weight", "offload_queue", "offload_optim"),
    *("sharding_offload_opt_buffersize_GB", "tensorwise_offload_optimizer"),
}
EFFECTS = {
    "output_dir": "elsewhere",
    "save_strategy": "no",
    "save_steps": 7,
    "save_total_limit": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "unified_checkpoint_config": "async_save",
    "ckpt_quant_stage": "O1",
    "ignore_save_lr_and_optim": True,
    "use_async_save": True,
    "enable_zero_cost_checkpoint": True,
    "save_last_step": True,
    "resume_from_huggingface_ckpt": "weights",
}
REFUSED = {
    "overwrite_output_dir": True,
    "greater_is_better": True,
    "output_signal_dir": "signals",
    "resume_from_checkpoint": "out/checkpoint-5",
    "ignore_load_lr_and_optim": True,
    "ordered_save_group_size": 2,
    "optim_shard_num": 4,
    "save_checkpoint_format": "hdf5",
    "load_checkpoint_format": "hdf5",
    "aoa_config": {"aoa_statements": ["a -> b"]},
    "flex_ckpt_comm_method": "parallel_broadcast",
    "replicate_saved_into_local": True,
    "save_rng_states": False,
    "save_hf_steps": 100,
    "save_hf_total_limit": 2,
    "save_hf_memory_growth_threshold": 16,
    "sharded_model_from_ema": True,
    "flash_device_save_steps": 5,
    "zcc_workers_num": 1,
    "zcc_pipeline_hooks_capacity_usage": 0.5,
    "zcc_save_ema_coef": 0.999,
    "zcc_ema_interval": 10,
    "zcc_ema_loss_threshold": 2.0,
    "pdc_download_ckpt": True,
    "pdc_download_timeout": 60,
}
ALWAYS = {
    *("unified_checkpoint", "save_on_each_node", "save_sharded_model", "load_sharded_model"),
    *("load_sharded_model_remap_parameter_name", "force_reshard_pp", "load_via_cpu"),
    *("auto_parallel_resume_form_hybrid_parallel", "convert_from_hf", "save_to_hf"),
    *("load_from_hf", "save_sharding_stage1_model_include_freeze_params", "save_tokenizer"),
    "online_merge_ema",
}
MANAGER = uc.ManagerOptions(on_completion=False)  # an option that one argument turns on


@pytest.mark.parametrize("version", FIELDS)
def test_defaults_request_nothing(version: str) -> None:
    options = from_paddle(**{**NEWEST, **FIELDS[version]})
    assert options.manager == uc.ManagerOptions(interval_steps=500, asynchronous=False)
    assert (options.save, options.load) == (uc.SaveOptions(), uc.LoadOptions())
    assert options.root is not None
    assert options.root.endswith("/out")


def test_checkpoint_arguments_are_known() -> None:
    names = {name for fields in FIELDS.values() for name in fields}
    about = {name for name in names if ABOUT_CHECKPOINTS.search(name)} - TRAINING
    assert about == EFFECTS.keys() | REFUSED.keys() | ALWAYS


@pytest.mark.parametrize("name", EFFECTS)
def test_argument_has_an_effect(name: str) -> None:
    assert EFFECTS[name] != NEWEST[name]
    plain = from_paddle(**NEWEST | {"unified_checkpoint": True}, manager=MANAGER)
    changes = {name: EFFECTS[name], "unified_checkpoint": True}
    assert from_paddle(**{**NEWEST, **changes}, manager=MANAGER) != plain


@pytest.mark.parametrize("name", REFUSED)
def test_argument_is_refused_by_name(name: str) -> None:
    assert REFUSED[name] != NEWEST[name]
    with pytest.raises(uc.FormatError, match=rf"^{name}\b.*; "):
        from_paddle(**{**NEWEST, name: REFUSED[name]})


@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_argument_changes_nothing(name: str) -> None:
    changes = {name: not NEWEST[name]}
    assert from_paddle(**{**NEWEST, **changes}) == from_paddle(**NEWEST)


class Interval(Enum):
    NO = "no"


def test_values_of_an_object_are_accepted() -> None:
    """What `TrainingArguments` itself makes of its values."""
    flags = {"unified_checkpoint_config": ["async_save"], "output_signal_dir": "out"}
    unified = {"save_checkpoint_format": "unified_checkpoint", "save_strategy": Interval.NO}
    options = from_paddle(**{**NEWEST, **flags, **unified})
    assert options.manager == uc.ManagerOptions()
    for name in ("save_checkpoint_format", "load_checkpoint_format"):
        assert from_paddle(**{**NEWEST, name: "sharding_io"}) == from_paddle(**NEWEST)


@pytest.mark.parametrize("number", [0, -1])
def test_no_steps_and_no_limit(number: int) -> None:
    limits = {"save_steps": number, "save_total_limit": number, "save_hf_total_limit": number}
    options = from_paddle(**{**NEWEST, **limits}).manager
    assert (options.interval_steps, options.keep_latest) == (None, None)


def test_weights_of_hugging_face_start_a_run() -> None:
    options = from_paddle(resume_from_huggingface_ckpt="weights").manager
    assert options.load_parameters_path == "weights"

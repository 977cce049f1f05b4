"""Translates checkpoint options of MaxText and PaddleNLP. An option without a meaning here is
refused by name, with the reason.

Only names are translated: an option that is not set keeps the default of this library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict, TypeVar, Unpack

from unified_ckpt.core.keywords import check_type, checked_path, suggestion
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MASTER, MODEL
from unified_ckpt.options import (
    LoadOptions,
    ManagerOptions,
    RunOptions,
    SaveOptions,
    SourceOptions,
)
from unified_ckpt.runtime.storage.storage import absolute_path

_Options = TypeVar("_Options", ManagerOptions, SaveOptions, LoadOptions, SourceOptions)

# MaxText's name -> our name
_MANAGER = {
    "enable_checkpointing": "enabled",
    "async_checkpointing": "asynchronous",
    "checkpoint_period": "interval_steps",
    "max_num_checkpoints_to_keep": "keep_latest",
    "save_checkpoint_on_start": "on_start",
    "save_checkpoint_on_completion": "on_completion",
    "enable_autocheckpoint": "on_preemption",
    "enable_continuous_checkpointing": "continuous",
    "load_parameters_path": "load_parameters_path",
    "load_full_state_path": "load_full_state_path",
    "lora_input_adapters_path": "load_adapters_path",
    "checkpoint_todelete_subdir": "trash_directory",
}
_SAVE = {"checkpoint_storage_target_data_file_size_bytes": "max_file_bytes"}
_HOST_GIGABYTES = "checkpoint_storage_concurrent_gb"
_TIERS = {
    "local_checkpoint_directory": "local_directory",
    "local_checkpoint_period": "local_interval_steps",
}
_EMERGENCY, _MULTI_TIER = "enable_emergency_checkpoint", "enable_multi_tier_checkpointing"
_BACKUP_MINUTES = "multi_tier_checkpointing_backup_interval_minutes"
_BACKUP_STEPS = "multi_tier_checkpointing_backup_interval_steps"
_ROOT, _RUN_NAME = "base_output_directory", "run_name"
_TRASH_PATH = "checkpoint_todelete_full_path"
_SHARE_READS = "enable_single_replica_ckpt_restoring"
_LAYOUT, _CONVERSION = "source_checkpoint_layout", "checkpoint_conversion_fn"
_UNROLL, _LAYER_DIM = "force_unroll", "param_scan_axis"
# A layout that is loaded -> our name of the format; Orbax is MaxText's default: it is detected.
_LAYOUTS = {"orbax": None, "safetensors": "huggingface", "safetensors_dynamic": "huggingface"}
# other names of an option, of MaxText's pages and earlier versions
_SAME = {
    "async_checkpoint": "async_checkpointing",
    "persistent_checkpoint_period": "checkpoint_period",
    "use_replicator_service": _MULTI_TIER,
    "replicator_backup_interval_minutes": _BACKUP_MINUTES,
}
# They configure the model and its hardware, which a PyTorch job configures itself.
_NOT_OF_CHECKPOINTS = {
    "model_name",
    "dataset_type",
    "steps",
    "per_device_batch_size",
    "num_slices",
    "scan_layers",
    "enable_single_controller",
    "hardware",
    "skip_jax_distributed_system",
    "use_multimodal",
}
_SPECIAL = (
    _HOST_GIGABYTES,
    _EMERGENCY,
    _MULTI_TIER,
    *_TIERS,
    _BACKUP_MINUTES,
    _BACKUP_STEPS,
    _ROOT,
    _RUN_NAME,
    _TRASH_PATH,
    _SHARE_READS,
    _LAYOUT,
    _CONVERSION,
    _UNROLL,
    _LAYER_DIM,
)
_ORBAX_ONLY = "it selects a storage driver of Orbax; files here are safetensors"
_CONVERT = "it is an option of a conversion; use `unified-ckpt convert SOURCE TARGET --dtype DTYPE`"
# MaxText's name -> why it is refused, unless it is off or has MaxText's default.
_REFUSED = {
    "checkpoint_storage_use_ocdbt": _ORBAX_ONLY,
    "checkpoint_storage_use_zarr3": _ORBAX_ONLY,
    "enable_orbax_v1": _ORBAX_ONLY,
    "mtc_data_parallelism": "replicas are recognised; see SaveOptions(node_copies=...)",
    "enable_checkpoint_cloud_logger": "saves and loads are logged under the name unified_ckpt",
    "colocated_python_checkpointing": "it is specific to Pathways",
    "save_dtype": _CONVERT,
    "weight_dtype": _CONVERT,
    "hf_model_path": _CONVERT,
}
# Defaults of MaxText's base.yml: these request nothing.
_DEFAULTS: dict[str, object] = {
    "checkpoint_storage_use_ocdbt": True,
    "checkpoint_storage_use_zarr3": True,
}


def from_maxtext(
    flags: Mapping[str, object] | None = None,
    *,
    manager: ManagerOptions | None = None,
    save: SaveOptions | None = None,
    load: LoadOptions | None = None,
    **more_flags: object,
) -> RunOptions:
    """Translate MaxText's checkpoint flags. They override the given options.

    Values may be text, as on a command line. Relative paths start from the working directory.
    `source_checkpoint_layout`, `checkpoint_conversion_fn` and `force_unroll` become the `source` of
    the result; the function is called as `SourceOptions(conversion_fn=...)` says. Raises
    FormatError for a flag that is unknown or has no meaning here.
    """
    check_type(flags, Mapping, "flags")
    values = _known_values({**(flags or {}), **more_flags})
    manager_changes = {_MANAGER[name]: value for name, value in values.items() if name in _MANAGER}
    manager_changes |= _tier_options(values) | _trash_options(values)
    manager = manager or ManagerOptions()
    source_changes = _source_options(values)
    if source_changes:
        manager_changes["load_source"] = _changed(
            manager.load_source or SourceOptions(), source_changes
        )
    save_changes = {_SAVE[name]: value for name, value in values.items() if name in _SAVE}
    if values.get(_HOST_GIGABYTES) is not None:
        save_changes["host_bytes"] = _number(values, _HOST_GIGABYTES) * 10**9
    load_changes = {"share_reads": "always"} if _is_on(values, _SHARE_READS) else {}
    return RunOptions(
        _changed_rules(manager, manager_changes),
        _changed(save or SaveOptions(), save_changes),
        _changed(load or LoadOptions(), load_changes),
        _maxtext_root(values),
    )


def _known_values(flags: Mapping[str, object]) -> dict[str, object]:
    """Return the flags that have a meaning, under their current names; None for an empty one."""
    values: dict[str, object] = {}
    for name, given in flags.items():
        value = None if given in ("", "None", "none", "null") else given
        known_name = _SAME.get(name, name)
        if name in _REFUSED:
            off = value in (None, False, 0) or str(value).lower() in ("false", "0")
            if not off and str(value) != str(_DEFAULTS.get(name)):
                raise FormatError(f"{name}={value!r}: not supported: {_REFUSED[name]}; remove it")
        elif known_name in _MANAGER or known_name in _SAVE or known_name in _SPECIAL:
            if known_name in values and values[known_name] != value:
                raise FormatError(f"{name}: got two values, also as {known_name}; remove one")
            values[known_name] = value
        elif name not in _NOT_OF_CHECKPOINTS:
            known_names = (*_MANAGER, *_SAVE, *_SPECIAL)
            raise FormatError(
                f"{name}: got an unknown checkpoint flag, expected one of "
                f"{', '.join(known_names)}{suggestion(name, known_names)}"
            )
    return values


def _is_on(values: Mapping[str, object], name: str) -> bool:
    return str(values.get(name)).lower() in ("true", "1")


def _number(values: Mapping[str, object], name: str) -> int:
    """Return a flag's number; 0 if it is not set."""
    value = values.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not str(value).isdecimal():
        raise FormatError(f"{name}: got {value!r}, expected a number that is not negative")
    return int(str(value))


def _maxtext_root(values: Mapping[str, object]) -> str | None:
    """Return `<base_output_directory>/<run_name>/checkpoints`, MaxText's folder of steps."""
    if not values.get(_ROOT):
        return None
    run_name = str(values.get(_RUN_NAME) or "")
    return absolute_path(os.path.join(str(values[_ROOT]), run_name, "checkpoints"))


def _trash_options(values: Mapping[str, object]) -> dict[str, object]:
    """Translate the full path of the trash folder; the name below the root needs no change."""
    if values.get(_TRASH_PATH) is None:
        return {}
    if values.get("checkpoint_todelete_subdir") is not None:
        raise FormatError(
            f"{_TRASH_PATH}: got it beside checkpoint_todelete_subdir, expected one of them"
        )
    return {"trash_directory": absolute_path(str(values[_TRASH_PATH]))}


def _source_options(values: Mapping[str, object]) -> dict[str, object]:
    """Translate how the source of a fresh run is read."""
    changes: dict[str, object] = {}
    layout = values.get(_LAYOUT)
    if layout is not None:
        if layout not in _LAYOUTS:
            raise FormatError(f"{_LAYOUT}: got {layout!r}, expected one of {', '.join(_LAYOUTS)}")
        if _LAYOUTS[str(layout)] is not None:
            changes["format"] = _LAYOUTS[str(layout)]
    function = values.get(_CONVERSION)
    if function is not None:
        module, _, name = str(function).replace(":", ".").rpartition(".")
        changes["conversion_fn"] = f"{module}:{name}"
    if _is_on(values, _UNROLL):
        layer_dim = 1 if values.get(_LAYER_DIM) is None else _number(values, _LAYER_DIM)
        changes |= {"layers": "unstacked", "layer_dim": layer_dim}
    return changes


def _tier_options(values: Mapping[str, object]) -> dict[str, object]:
    """Translate the flags of the local tier. Both are required if the tier is on, and refused if it
    is off.
    """
    switches = [name for name in (_EMERGENCY, _MULTI_TIER) if _is_on(values, name)]
    if len(switches) > 1:
        raise FormatError(f"{_EMERGENCY}: got it beside {_MULTI_TIER}, expected one of them")
    if not switches:
        for name in (*_TIERS, _BACKUP_MINUTES, _BACKUP_STEPS):
            if values.get(name) not in (None, 0, "0"):
                raise FormatError(
                    f"{name}={values[name]!r}: got neither {_EMERGENCY} nor {_MULTI_TIER}; set "
                    f"one, or remove {name}"
                )
        return {}
    kind = "emergency" if switches == [_EMERGENCY] else "multi-tier"
    directory, period = values.get("local_checkpoint_directory"), "local_checkpoint_period"
    if not directory:
        raise FormatError(f"`local_checkpoint_directory` must be set for {kind} checkpointing.")
    if not _number(values, period):
        raise FormatError(f"`{period}` must be > 0 for {kind} checkpointing.")
    changes: dict[str, object] = {
        "local_directory": str(directory),
        "local_interval_steps": _number(values, period),
    }
    return changes if kind == "emergency" else changes | _backup_options(values)


def _backup_options(values: Mapping[str, object]) -> dict[str, object]:
    """Translate the interval of copies to the root, which replaces `checkpoint_period`."""
    minutes, steps = _number(values, _BACKUP_MINUTES), _number(values, _BACKUP_STEPS)
    if bool(minutes) == bool(steps):
        count = "two intervals" if minutes else "none"
        raise FormatError(
            f"{_MULTI_TIER}: got {count}, expected one of {_BACKUP_MINUTES} and {_BACKUP_STEPS}"
        )
    if steps and steps < _number(values, "local_checkpoint_period"):
        raise FormatError(
            f"{_BACKUP_STEPS}: got {steps}, expected at least local_checkpoint_period"
        )
    return {
        "interval_steps": steps or None,
        "interval_seconds": minutes * 60.0 if minutes else None,
    }


# A flag -> what it leaves out; the first one decides.
_PADDLE_OMITTED = {
    "remove_master_weight": MASTER,
    "skip_save_model_weight": MODEL,
    "enable_all_options": MODEL,
}
_PADDLE_FLAGS = ("async_save", "master_weight_compatible", *_PADDLE_OMITTED)
_PADDLE_STAGES = {"O0": "none", "O1": "O1", "O2": "O2"}  # our name of each `ckpt_quant_stage`
_PADDLE_MANAGER = {"save_steps": "interval_steps", "save_total_limit": "keep_latest"}
_PADDLE_REFUSED = {
    "ignore_merge_optimizer": "the optimizer is always merged while it is written",
    "gather_split_param": "split parameters are always gathered",
}


class PaddleArguments(TypedDict, total=False):
    """Training arguments of PaddleNLP."""

    unified_checkpoint: object
    unified_checkpoint_config: str
    ckpt_quant_stage: str | None
    output_dir: str
    save_steps: int
    save_total_limit: int | None


def from_paddle(
    config: str | None = None,
    *,
    manager: ManagerOptions | None = None,
    save: SaveOptions | None = None,
    load: LoadOptions | None = None,
    **arguments: Unpack[PaddleArguments],
) -> RunOptions:
    """Translate PaddleNLP's arguments for Unified Checkpoint. They override the given options.

    `config` or `unified_checkpoint_config`: flags separated by spaces or commas.
    `ckpt_quant_stage`: "O0", "O1" or "O2", as `SaveOptions(compression=...)`. `output_dir`: the
    root; a relative path starts from the working directory.

    `master_weight_compatible` is always on here: weights are filled from master weights and the
    reverse. Raises FormatError for an unknown argument, flag or stage.
    """
    check_type(config, str, "config")
    _check_paddle_arguments(config, arguments)
    stage, output_dir = arguments.get("ckpt_quant_stage"), arguments.get("output_dir")
    flags = _paddle_flags(config or arguments.get("unified_checkpoint_config") or "")
    changes: dict[str, object] = {}
    load_changes: dict[str, object] = {}
    omitted = next((part for flag, part in _PADDLE_OMITTED.items() if flag in flags), None)
    if omitted is not None:
        changes["omit"] = tuple(sorted({*(save.omit if save else ()), omitted}))
    if omitted == MASTER:
        load_changes["cast"] = True  # the stored model becomes the master weights
    if stage is not None:
        changes["compression"] = _PADDLE_STAGES[stage]
    manager_changes: dict[str, object] = {"asynchronous": "async_save" in flags}
    for name, our_name in _PADDLE_MANAGER.items():
        if name in arguments:
            manager_changes[our_name] = arguments.get(name)
    return RunOptions(
        _changed_rules(manager or ManagerOptions(), manager_changes),
        _changed(save or SaveOptions(), changes),
        _changed(load or LoadOptions(), load_changes),
        None if output_dir is None else absolute_path(checked_path(output_dir, "output_dir")),
    )


def _check_paddle_arguments(config: str | None, arguments: PaddleArguments) -> None:
    unknown = sorted(arguments.keys() - PaddleArguments.__annotations__.keys())
    if unknown:
        raise FormatError(
            f"{unknown[0]}: got an unknown argument, expected one of "
            f"{', '.join(PaddleArguments.__annotations__)}"
            f"{suggestion(unknown[0], PaddleArguments.__annotations__)}"
        )
    if str(arguments.get("unified_checkpoint", True)).lower() in ("false", "0"):
        raise FormatError(
            "unified_checkpoint: got it off, expected on; every checkpoint is a unified one"
        )
    if config is not None and "unified_checkpoint_config" in arguments:
        raise FormatError("unified_checkpoint_config: got it twice, expected it once")
    stage = arguments.get("ckpt_quant_stage")
    if stage is not None and stage not in _PADDLE_STAGES:
        raise FormatError(
            f"ckpt_quant_stage: got {stage!r}, expected one of {', '.join(_PADDLE_STAGES)}; "
            "PaddleNLP calls O3 experimental"
        )


def _paddle_flags(config: str) -> frozenset[str]:
    """Return the flags of a configuration that go together.

    `remove_master_weight` beside `enable_all_options` keeps the model and leaves out its masters,
    as the page of PaddleNLP has it.
    """
    flags = dict.fromkeys(config.replace(",", " ").split())
    for flag in flags:
        if flag in _PADDLE_REFUSED:
            raise FormatError(
                f"unified_checkpoint_config: {flag} is not supported: "
                f"{_PADDLE_REFUSED[flag]}; remove it"
            )
        if flag not in _PADDLE_FLAGS:
            raise FormatError(
                f"unified_checkpoint_config: got unknown flag {flag!r}, "
                f"expected one of {', '.join(_PADDLE_FLAGS)}{suggestion(flag, _PADDLE_FLAGS)}"
            )
    if flags.keys() >= {"skip_save_model_weight", "remove_master_weight"}:
        raise FormatError(
            "unified_checkpoint_config: skip_save_model_weight and remove_master_weight together "
            "leave no weights; remove one"
        )
    return frozenset(flags)


def _changed_rules(options: ManagerOptions, changes: Mapping[str, object]) -> ManagerOptions:
    """Return changed options, validated as a whole. `lazy` is turned off with `asynchronous`."""
    changed = _changed(options.model_copy(update={"lazy": False}), changes)
    return _changed(options, changes) if changed.asynchronous else changed


def _changed(options: _Options, changes: Mapping[str, object]) -> _Options:
    return type(options)(**{**options.model_dump(exclude_unset=True), **changes})

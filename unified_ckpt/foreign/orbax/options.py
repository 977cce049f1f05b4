"""MaxText's flags for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unified_ckpt.core.keywords import check_type
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.option_flags import (
    KnownFlags,
    Refusal,
    changed,
    changed_rules,
    is_on,
    number,
    translated,
)
from unified_ckpt.options import (
    LoadOptions,
    ManagerOptions,
    RunOptions,
    SaveOptions,
    SourceOptions,
)
from unified_ckpt.runtime.storage.paths import absolute_path

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
_PERIOD, _DEFAULT_PERIOD = "checkpoint_period", 10_000
_HOST_GIGABYTES = "checkpoint_storage_concurrent_gb"
_TIERS = {
    "local_checkpoint_directory": "local_directory",
    "local_checkpoint_period": "local_interval_steps",
}
_EMERGENCY, _MULTI_TIER = "enable_emergency_checkpoint", "enable_multi_tier_checkpointing"
_BACKUP_MINUTES = "multi_tier_checkpointing_backup_interval_minutes"
_BACKUP_STEPS = "multi_tier_checkpointing_backup_interval_steps"
_LIMITS = (  # of the number of checkpoints in a root
    "keep_latest",
    "keep_latest_model_only",
    "keep_every_steps",
    "keep_every_steps_model_only",
    "keep_every_seconds",
    "keep_best",
)
_ROOT, _RUN_NAME = "base_output_directory", "run_name"
_TRASH_PATH, _TRASH_SUBDIR = "checkpoint_todelete_full_path", "checkpoint_todelete_subdir"
_SHARE_READS = "enable_single_replica_ckpt_restoring"
_LAYOUT, _CONVERSION = "source_checkpoint_layout", "checkpoint_conversion_fn"
_UNROLL, _LAYER_DIM = "force_unroll", "param_scan_axis"
# A layout that is loaded -> our name of the format; Orbax is MaxText's default: it is detected.
_LAYOUTS = {"orbax": None, "safetensors": "huggingface", "safetensors_dynamic": "huggingface"}
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
_CONVERT = "it is an option of a conversion, which `unified-ckpt convert` has"
_ADAPTERS = "set lora_input_adapters_path to a local PEFT folder"
_QUANTIZED = "quantized parameters for serving are not written or read"
_KNOWN = KnownFlags(
    accepted=frozenset((*_MANAGER, *_SAVE, *_SPECIAL)),
    # Events and the log have what the cloud logger records.
    always=frozenset({"enable_checkpoint_cloud_logger"}),
    refused={
        "checkpoint_storage_use_ocdbt": Refusal(_ORBAX_ONLY, (True, 1)),
        "checkpoint_storage_use_zarr3": Refusal(_ORBAX_ONLY, (True, 1)),
        "enable_orbax_v1": Refusal(_ORBAX_ONLY),
        "mtc_data_parallelism": Refusal(
            "replicas are recognised; see SaveOptions(node_copies=...)"
        ),
        "colocated_python_checkpointing": Refusal("it is specific to Pathways"),
        "save_dtype": Refusal(_CONVERT),
        "hf_model_path": Refusal(_CONVERT),
        "hf_lora_adapter_path": Refusal(_ADAPTERS),
        "lora_restore_path": Refusal(_ADAPTERS),
        "convert_checkpoint_if_possible": Refusal(
            "set load_parameters_path to the Hugging Face folder, which is read as it is"
        ),
        "load_checkpoint_only_once": Refusal("load the model once and copy the module"),
        "checkpoint_is_quantized": Refusal(_QUANTIZED),
        "save_quantized_params_path": Refusal(_QUANTIZED),
    },
    synonyms={  # of MaxText's pages
        "async_checkpoint": "async_checkpointing",
        "persistent_checkpoint_period": _PERIOD,
    },
    earlier={
        "use_replicator_service": _MULTI_TIER,
        "replicator_backup_interval_minutes": _BACKUP_MINUTES,
    },
)


def from_maxtext(
    flags: Mapping[str, object] | None = None,
    *,
    manager: ManagerOptions | None = None,
    save: SaveOptions | None = None,
    load: LoadOptions | None = None,
    **more_flags: object,
) -> RunOptions:
    """Translate MaxText's flags, such as the whole of its YAML file. They override the options.

    Values may be text, as on a command line. Relative paths start from the working directory.
    `source_checkpoint_layout`, `checkpoint_conversion_fn` and `force_unroll` become the `source` of
    the result; the function is called as `SourceOptions(conversion_fn=...)` says. Flags that are
    not about checkpoints have no effect.

    Raises FormatError for a checkpoint flag that is unknown, or asks for what is not supported.
    """
    check_type(flags, Mapping, "flags")
    values = _KNOWN.select({**(flags or {}), **more_flags})
    manager = manager or ManagerOptions()
    manager_changes = translated(values, _MANAGER)
    manager_changes |= _tier_options(values, manager) | _trash_options(values, manager)
    source_changes = _source_options(values)
    if source_changes:
        manager_changes["load_source"] = changed(
            manager.load_source or SourceOptions(), source_changes
        )
    save_changes = translated(values, _SAVE)
    if values.get(_HOST_GIGABYTES) is not None:
        save_changes["host_bytes"] = number(values, _HOST_GIGABYTES) * 10**9
    load_changes = {"share_reads": "always"} if is_on(values, _SHARE_READS) else {}
    return RunOptions(
        changed_rules(manager, manager_changes),
        changed(save or SaveOptions(), save_changes),
        changed(load or LoadOptions(), load_changes),
        _root(values),
    )


def _root(values: Mapping[str, object]) -> str | None:
    """Return `<base_output_directory>/<run_name>/checkpoints`, MaxText's folder of steps."""
    if not values.get(_ROOT):
        return None
    run_name = str(values.get(_RUN_NAME) or "")
    return absolute_path(os.path.join(str(values[_ROOT]), run_name, "checkpoints"))


def _trash_options(values: Mapping[str, object], manager: ManagerOptions) -> dict[str, object]:
    """Translate the full path of the trash folder; the name below the root needs no change."""
    set_names = [name for name in (_TRASH_PATH, _TRASH_SUBDIR) if values.get(name) is not None]
    if len(set_names) > 1:
        raise FormatError(f"{_TRASH_PATH}: got it beside {_TRASH_SUBDIR}, expected one of them")
    has_limit = values.get("max_num_checkpoints_to_keep") or any(
        getattr(manager, name) is not None for name in _LIMITS
    )
    if set_names and not has_limit:
        raise FormatError(
            f"{set_names[0]}: got no limit of checkpoints, expected one; "
            "add max_num_checkpoints_to_keep"
        )
    if values.get(_TRASH_PATH) is None:
        return {}
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
    if is_on(values, _UNROLL):
        layer_dim = 1 if values.get(_LAYER_DIM) is None else number(values, _LAYER_DIM)
        changes |= {"layers": "unstacked", "layer_dim": layer_dim}
    return changes


def _tier_options(values: Mapping[str, object], manager: ManagerOptions) -> dict[str, object]:
    """Translate the flags of the local tier. Both are required if the tier is on, and refused if it
    is off.
    """
    switches = [name for name in (_EMERGENCY, _MULTI_TIER) if is_on(values, name)]
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
    if not number(values, period):
        raise FormatError(f"`{period}` must be > 0 for {kind} checkpointing.")
    changes: dict[str, object] = {
        "local_directory": str(directory),
        "local_interval_steps": number(values, period),
    }
    return changes if kind == "emergency" else changes | _root_intervals(values, manager)


def _root_intervals(values: Mapping[str, object], manager: ManagerOptions) -> dict[str, object]:
    """Translate when saves are copied to the root: at the backup interval and at
    `checkpoint_period`.

    At MaxText's default, `checkpoint_period` asks for nothing beside a backup interval.
    """
    minutes, steps = number(values, _BACKUP_MINUTES), number(values, _BACKUP_STEPS)
    period = number(values, _PERIOD)
    if minutes and steps:
        raise FormatError(
            f"{_MULTI_TIER}: got two intervals, expected one of {_BACKUP_MINUTES} and "
            f"{_BACKUP_STEPS}; remove one"
        )
    if steps and steps < number(values, "local_checkpoint_period"):
        raise FormatError(
            f"{_BACKUP_STEPS}: got {steps}, expected at least local_checkpoint_period"
        )
    if not minutes and not steps:
        has_interval = manager.interval_steps or manager.interval_seconds or manager.continuous
        if not period and not has_interval and not is_on(values, "enable_continuous_checkpointing"):
            raise FormatError(
                f"{_MULTI_TIER}: got no interval of the saves to {_ROOT}, expected one; add "
                f"{_BACKUP_STEPS}"
            )
        return {}
    if period == _DEFAULT_PERIOD:
        period = 0
    if steps and period and period % steps and steps % period:
        raise FormatError(
            f"{_PERIOD}: got {period} beside {_BACKUP_STEPS}={steps}, expected a multiple or a "
            f"divisor of it; remove {_PERIOD}"
        )
    return {
        "interval_steps": min((each for each in (steps, period) if each), default=None),
        "interval_seconds": minutes * 60.0 if minutes else None,
    }

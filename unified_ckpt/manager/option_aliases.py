"""Translates checkpoint options of MaxText and PaddleNLP. An option without a meaning here is
refused by name, with the reason.

Only names are translated: an option that is not set keeps the default of this library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unified_ckpt.errors import FormatError
from unified_ckpt.options import ManagerOptions, SaveOptions

# MaxText's name -> our name
_MAXTEXT = {
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
}
_MAXTEXT_SAVE = {"checkpoint_storage_target_data_file_size_bytes": "max_file_bytes"}
_MAXTEXT_TIERS = {
    "local_checkpoint_directory": "local_directory",
    "local_checkpoint_period": "local_interval_steps",
}
_TIER_SWITCH = "enable_emergency_checkpoint"
_USE_LOCAL_TIER = (
    "use enable_emergency_checkpoint, local_checkpoint_directory and local_checkpoint_period"
)
_ORBAX_ONLY = "it selects a storage driver of Orbax; files here are safetensors"
# Defaults of MaxText's base.yml: these request nothing.
_MAXTEXT_DEFAULTS: dict[str, object] = {
    "checkpoint_storage_concurrent_gb": 96,
    "checkpoint_storage_use_ocdbt": True,
    "checkpoint_storage_use_zarr3": True,
    "source_checkpoint_layout": "orbax",
    "checkpoint_conversion_fn": "none",
}
# MaxText's name -> why it is refused, unless it is off or has MaxText's default.
_MAXTEXT_REFUSED = {
    "checkpoint_storage_concurrent_gb": "saves hold one snapshot, and loads bound their memory",
    "checkpoint_storage_use_ocdbt": _ORBAX_ONLY,
    "checkpoint_storage_use_zarr3": _ORBAX_ONLY,
    "enable_orbax_v1": _ORBAX_ONLY,
    "checkpoint_todelete_subdir": "old checkpoints are removed, not moved",
    "checkpoint_todelete_full_path": "old checkpoints are removed, not moved",
    "source_checkpoint_layout": "the format of a path is detected",
    "checkpoint_conversion_fn": "change the state after `restore`",
    "enable_single_replica_ckpt_restoring": "each rank reads only its slices",
    "use_replicator_service": _USE_LOCAL_TIER,
    "replicator_backup_interval_minutes": _USE_LOCAL_TIER,
    "enable_multi_tier_checkpointing": _USE_LOCAL_TIER,
    "multi_tier_checkpointing_backup_interval_minutes": _USE_LOCAL_TIER,
    "multi_tier_checkpointing_backup_interval_steps": _USE_LOCAL_TIER,
    "mtc_data_parallelism": _USE_LOCAL_TIER,
    "enable_checkpoint_cloud_logger": "saves and loads are logged under the name unified_ckpt",
    "colocated_python_checkpointing": "it is specific to Pathways",
    "force_unroll": "tensors are stored with the model's names and shapes",
}
_PADDLE_FLAGS = (
    "async_save",
    "skip_save_model_weight",
    "master_weight_compatible",
    "remove_master_weight",
    "enable_all_options",
)
_PADDLE_STAGES = {"O0": "none", "O1": "O1", "O2": "O2"}  # our name of each `ckpt_quant_stage`
_PADDLE_REFUSED = {
    "ignore_merge_optimizer": "the optimizer is always merged while it is written",
    "gather_split_param": "split parameters are always gathered",
}


@dataclass(frozen=True, slots=True)
class TranslatedOptions:
    """The options that a configuration of another library stands for."""

    manager: ManagerOptions
    save: SaveOptions


def from_maxtext(
    flags: Mapping[str, object],
    *,
    manager: ManagerOptions | None = None,
    save: SaveOptions | None = None,
) -> TranslatedOptions:
    """Translate MaxText's checkpoint flags, on top of the given options. Raises FormatError for a
    flag that is unknown or has no meaning here.
    """
    changes: dict[str, object] = {}
    save_changes: dict[str, object] = {}
    for name, value in flags.items():
        if name in _MAXTEXT:
            changes[_MAXTEXT[name]] = None if value in ("", "None") else value
        elif name in _MAXTEXT_SAVE:
            save_changes[_MAXTEXT_SAVE[name]] = value
        elif name in _MAXTEXT_TIERS or name == _TIER_SWITCH:
            continue  # see `_tier_options`
        elif name not in _MAXTEXT_REFUSED:
            known_names = ", ".join(_MAXTEXT | _MAXTEXT_SAVE | _MAXTEXT_TIERS)
            raise FormatError(
                f"{name}: got an unknown checkpoint flag, "
                f"expected one of {_TIER_SWITCH}, {known_names}"
            )
        elif value not in (None, "", False, 0) and value != _MAXTEXT_DEFAULTS.get(name):
            raise FormatError(
                f"{name}={value!r}: not supported: {_MAXTEXT_REFUSED[name]}; remove it"
            )
    changes |= _tier_options(flags)
    return TranslatedOptions(
        _with_changes(manager or ManagerOptions(), changes),
        _with_save_changes(save or SaveOptions(), save_changes),
    )


def _tier_options(flags: Mapping[str, object]) -> dict[str, object]:
    """Translate the flags of the local tier. Both are required if the tier is on, and refused if it
    is off.
    """
    values = {name: flags.get(name) for name in _MAXTEXT_TIERS}
    if not flags.get(_TIER_SWITCH):
        for name, value in values.items():
            if value not in (None, "", 0):
                raise FormatError(
                    f"{name}={value!r}: got no {_TIER_SWITCH}; set it, or remove {name}"
                )
        return {}
    directory, period = values.values()
    if not directory:
        raise FormatError("`local_checkpoint_directory` must be set for emergency checkpointing.")
    if not isinstance(period, int) or period <= 0:
        raise FormatError("`local_checkpoint_period` must be > 0 for emergency checkpointing.")
    return {_MAXTEXT_TIERS[name]: value for name, value in values.items()}


def from_paddle(
    config: str,
    *,
    ckpt_quant_stage: str | None = None,
    manager: ManagerOptions | None = None,
    save: SaveOptions | None = None,
) -> TranslatedOptions:
    """Translate PaddleNLP's `unified_checkpoint_config`, flags separated by spaces or commas, on
    top of the given options.

    `ckpt_quant_stage`: its other option, "O0", "O1" or "O2", as `SaveOptions(compression=...)`.

    `master_weight_compatible` is always on here: weights and master weights stand in for each
    other. Raises FormatError for an unknown flag or stage.
    """
    flags = list(dict.fromkeys(config.replace(",", " ").split()))
    for flag in flags:
        if flag in _PADDLE_REFUSED:
            raise FormatError(
                f"unified_checkpoint_config: {flag} is not supported: "
                f"{_PADDLE_REFUSED[flag]}; remove it"
            )
        if flag not in _PADDLE_FLAGS:
            raise FormatError(
                f"unified_checkpoint_config: got unknown flag {flag!r}, "
                f"expected one of {', '.join(_PADDLE_FLAGS)}"
            )
    if "enable_all_options" in flags and len(flags) > 1:
        others = ", ".join(flag for flag in flags if flag != "enable_all_options")
        raise FormatError(
            f"unified_checkpoint_config: got enable_all_options and {others}, "
            "which PaddleNLP then ignores; remove one"
        )
    without_model = not {"skip_save_model_weight", "enable_all_options"}.isdisjoint(flags)
    without_masters = "remove_master_weight" in flags
    if without_model and without_masters:
        raise FormatError(
            "unified_checkpoint_config: skip_save_model_weight and remove_master_weight together "
            "leave no weights; remove one"
        )
    changes: dict[str, object] = {}
    if without_model or without_masters:
        changes["parts"] = ("master_weights" if without_model else "model", "optimizer")
    if ckpt_quant_stage is not None:
        if ckpt_quant_stage not in _PADDLE_STAGES:
            raise FormatError(
                f"ckpt_quant_stage: got {ckpt_quant_stage!r}, expected one of "
                f"{', '.join(_PADDLE_STAGES)}; PaddleNLP calls O3 experimental"
            )
        changes["compression"] = _PADDLE_STAGES[ckpt_quant_stage]
    asynchronous = {"asynchronous": "async_save" in flags}
    return TranslatedOptions(
        _with_changes(manager or ManagerOptions(), asynchronous),
        _with_save_changes(save or SaveOptions(), changes),
    )


def _with_changes(options: ManagerOptions, changes: Mapping[str, object]) -> ManagerOptions:
    """Return changed options, validated as a whole. `lazy` is turned off with `asynchronous`."""
    overrides = {"lazy": False} if options.lazy and changes.get("asynchronous") is False else {}
    return ManagerOptions.model_validate(
        {**options.model_dump(exclude_unset=True), **changes, **overrides}
    )


def _with_save_changes(options: SaveOptions, changes: Mapping[str, object]) -> SaveOptions:
    return SaveOptions.model_validate({**options.model_dump(exclude_unset=True), **changes})

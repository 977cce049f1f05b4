"""Options under the names that MaxText and PaddleNLP have for them. What has no meaning here is
refused by its name, with the reason.

Only names are taken over: what a configuration does not mention keeps this library's default, not
theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unified_ckpt.errors import FormatError
from unified_ckpt.options import ManagerOptions, SaveOptions

# MaxText's name -> ours
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
_USE_LOCAL_TIER = "two tiers are what enable_emergency_checkpoint, local_checkpoint_directory and local_checkpoint_period give"
_ORBAX_ONLY = "it chooses between storage drivers of Orbax; files are safetensors here"
# What MaxText's base.yml says of them, which asks for nothing.
_MAXTEXT_DEFAULTS: dict[str, object] = {
    "checkpoint_storage_concurrent_gb": 96,
    "checkpoint_storage_use_ocdbt": True,
    "checkpoint_storage_use_zarr3": True,
    "source_checkpoint_layout": "orbax",
    "checkpoint_conversion_fn": "none",
}
# MaxText's name -> why it has no meaning here. Refused where it is set to anything but off, or
# MaxText's own default.
_MAXTEXT_REFUSED = {
    "checkpoint_storage_concurrent_gb": "a save holds one snapshot of what the rank owns, and loads are bounded by themselves",
    "checkpoint_storage_use_ocdbt": _ORBAX_ONLY,
    "checkpoint_storage_use_zarr3": _ORBAX_ONLY,
    "enable_orbax_v1": _ORBAX_ONLY,
    "checkpoint_todelete_subdir": "what the rules do not keep is removed, not moved",
    "checkpoint_todelete_full_path": "what the rules do not keep is removed, not moved",
    "source_checkpoint_layout": "the format of a path is found by looking at it",
    "checkpoint_conversion_fn": "change the state after `restore`",
    "enable_single_replica_ckpt_restoring": "each rank reads the slices that it needs, each byte once per machine",
    "use_replicator_service": _USE_LOCAL_TIER,
    "replicator_backup_interval_minutes": _USE_LOCAL_TIER,
    "enable_multi_tier_checkpointing": _USE_LOCAL_TIER,
    "multi_tier_checkpointing_backup_interval_minutes": _USE_LOCAL_TIER,
    "multi_tier_checkpointing_backup_interval_steps": _USE_LOCAL_TIER,
    "mtc_data_parallelism": _USE_LOCAL_TIER,
    "enable_checkpoint_cloud_logger": "saves and loads are logged under the name unified_ckpt",
    "colocated_python_checkpointing": "it is of Pathways",
    "force_unroll": "tensors are stored as the model holds them",
}
_PADDLE_FLAGS = (
    "async_save",
    "skip_save_model_weight",
    "master_weight_compatible",
    "remove_master_weight",
    "enable_all_options",
)
_PADDLE_REFUSED = {
    "ignore_merge_optimizer": "the optimizer is merged as it is written, which costs nothing",
    "gather_split_param": "split parameters are always gathered",
}


@dataclass(frozen=True, slots=True)
class TranslatedOptions:
    """The options that a foreign configuration means."""

    manager: ManagerOptions
    save: SaveOptions


def from_maxtext(
    flags: Mapping[str, object],
    *,
    manager: ManagerOptions | None = None,
    save: SaveOptions | None = None,
) -> TranslatedOptions:
    """MaxText's checkpoint flags by name, on top of the options given. FormatError for one that is
    unknown or has no meaning here.
    """
    changes: dict[str, object] = {}
    save_changes: dict[str, object] = {}
    for name, value in flags.items():
        if name in _MAXTEXT:
            changes[_MAXTEXT[name]] = None if value in ("", "None") else value
        elif name in _MAXTEXT_SAVE:
            save_changes[_MAXTEXT_SAVE[name]] = value
        elif name in _MAXTEXT_TIERS or name == _TIER_SWITCH:
            continue  # together, below
        elif name not in _MAXTEXT_REFUSED:
            known_names = ", ".join(_MAXTEXT | _MAXTEXT_SAVE | _MAXTEXT_TIERS)
            raise FormatError(
                f"{name}: is no checkpoint flag of MaxText that is known here; known are {_TIER_SWITCH}, {known_names}"
            )
        elif value not in (None, "", False, 0) and value != _MAXTEXT_DEFAULTS.get(name):
            raise FormatError(
                f"{name}={value!r}: has no meaning here: {_MAXTEXT_REFUSED[name]}; leave it out"
            )
    changes |= _tier_options(flags)
    return TranslatedOptions(
        _with_changes(manager or ManagerOptions(), changes),
        _with_save_changes(save or SaveOptions(), save_changes),
    )


def _tier_options(flags: Mapping[str, object]) -> dict[str, object]:
    """Both flags of the local tier are needed where it is on, in MaxText's words; where it is off
    they say nothing, and are refused.
    """
    values = {name: flags.get(name) for name in _MAXTEXT_TIERS}
    if not flags.get(_TIER_SWITCH):
        for name, value in values.items():
            if value not in (None, "", 0):
                raise FormatError(
                    f"{name}={value!r}: has no meaning without {_TIER_SWITCH}; set it, or leave {name} out"
                )
        return {}
    directory, period = values.values()
    if not directory:
        raise FormatError("`local_checkpoint_directory` must be set for emergency checkpointing.")
    if not isinstance(period, int) or period <= 0:
        raise FormatError("`local_checkpoint_period` must be > 0 for emergency checkpointing.")
    return {_MAXTEXT_TIERS[name]: value for name, value in values.items()}


def from_paddle(
    config: str, *, manager: ManagerOptions | None = None, save: SaveOptions | None = None
) -> TranslatedOptions:
    """PaddleNLP's `unified_checkpoint_config`, words between spaces or commas, on top of the
    options given.

    `master_weight_compatible` is how loads always are: weights and masters stand in for each other.
    FormatError for an unknown word.
    """
    flags = list(dict.fromkeys(config.replace(",", " ").split()))
    for flag in flags:
        if flag in _PADDLE_REFUSED:
            raise FormatError(
                f"unified_checkpoint_config: {flag} has no meaning here: {_PADDLE_REFUSED[flag]}; leave it out"
            )
        if flag not in _PADDLE_FLAGS:
            raise FormatError(
                f"unified_checkpoint_config: {flag!r} is unknown; known are {', '.join(_PADDLE_FLAGS)}"
            )
    if "enable_all_options" in flags and len(flags) > 1:
        others = ", ".join(flag for flag in flags if flag != "enable_all_options")
        raise FormatError(
            f"unified_checkpoint_config: enable_all_options makes PaddleNLP drop {others}; needed one or the other"
        )
    without_model = not {"skip_save_model_weight", "enable_all_options"}.isdisjoint(flags)
    without_masters = "remove_master_weight" in flags
    if without_model and without_masters:
        raise FormatError(
            "unified_checkpoint_config: skip_save_model_weight and remove_master_weight together leave no weights"
        )
    changes: dict[str, object] = {}
    if without_model or without_masters:
        changes["parts"] = ("master_weights" if without_model else "model", "optimizer")
    asynchronous = {"asynchronous": "async_save" in flags}
    return TranslatedOptions(
        _with_changes(manager or ManagerOptions(), asynchronous),
        _with_save_changes(save or SaveOptions(), changes),
    )


def _with_changes(options: ManagerOptions, changes: Mapping[str, object]) -> ManagerOptions:
    """Checked again as a whole, since options limit each other. `lazy` is a way to save in the
    background: without that it is off.
    """
    overrides = {"lazy": False} if options.lazy and changes.get("asynchronous") is False else {}
    return ManagerOptions.model_validate(
        {**options.model_dump(exclude_unset=True), **changes, **overrides}
    )


def _with_save_changes(options: SaveOptions, changes: Mapping[str, object]) -> SaveOptions:
    return SaveOptions.model_validate({**options.model_dump(exclude_unset=True), **changes})

"""Combines ManagerOptions with the settings of a trainer, which decides when to save and how many
checkpoints to keep.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.options import ManagerOptions, RunOptions, with_root
from unified_ckpt.runtime.objects.registry import is_bucket_url, use_storage_options
from unified_ckpt.runtime.storage.paths import absolute_path

# What a run without ManagerOptions did not ask for: the first error ends it, signals do too.
_WITHOUT_OPTIONS = ManagerOptions(asynchronous=False, on_preemption=False, retries=0, raise_after=1)
# When to save. Where a trainer decides it, the manager of its run has none of these.
_TRIGGERS: dict[str, object] = {
    "interval_steps": None,
    "interval_seconds": None,
    "steps": frozenset(),
    "on_start": False,
    "continuous": False,
}
RETENTION = (
    "keep_latest",
    "keep_every_steps",
    "keep_every_seconds",
    "keep_best",
    "best_metric",
    "keep_latest_model_only",
    "keep_every_steps_model_only",
    "trash_directory",
)
LOCAL_TIER = ("local_directory", "local_interval_steps")
START_PATHS = ("load_parameters_path", "load_full_state_path", "load_adapters_path")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that the trainer decides, and the user's words for it."""

    value: object
    text: str


def settings_of_trigger(text: str, **values: object) -> dict[str, Setting]:
    """Return the settings of a trainer whose `text` decides when to save. `values`: the fields of
    ManagerOptions that it implies; the others are off.
    """
    return {name: Setting(value, text) for name, value in (_TRIGGERS | values).items()}


def settings_without(fields: Sequence[str], text: str) -> dict[str, Setting]:
    """Return the settings of a trainer that leaves these fields unset, because of `text`."""
    return {name: Setting(None, text) for name in fields}


def _bucket_url(root: str | os.PathLike[str]) -> str:
    """Return the URL of a prefix in a bucket. FormatError for another path."""
    url = absolute_path(os.fspath(root)).rstrip("/")
    if not is_bucket_url(url):
        raise FormatError(
            f"root: got {os.fspath(root)}, expected the URL of a bucket, such as s3://bucket/run; "
            "a local folder is the trainer's setting"
        )
    return url


def with_bucket_root(
    options: RunOptions, root: str | os.PathLike[str] | None
) -> tuple[RunOptions, str | None]:
    """Return the options with a trainer's argument `root`, and the URL if they name a bucket.

    The bucket is reached by the options. FormatError for two roots, or a local one as argument.
    """
    if root is not None:
        options = with_root(options, _bucket_url(root))
    if options.root is None or not is_bucket_url(options.root):
        return options, None
    url = _bucket_url(options.root)
    use_storage_options([url], options.storage)
    return replace(options, root=url), url


def run_options(
    options: ManagerOptions | None,
    settings: Mapping[str, Setting],
    *,
    async_save: bool | None = None,
) -> ManagerOptions:
    """Return the options of the manager of a trainer's run.

    `settings`: what the trainer decides, by field. `async_save`: the same setting as
    `asynchronous`. Raises CheckpointError if `options` sets a field to another value.
    """
    if async_save is not None:
        text = f"async_save={async_save}"
        settings = {**settings, "asynchronous": Setting(async_save, text)}
    for name in sorted(options.model_fields_set & settings.keys()) if options is not None else ():
        value, setting = getattr(options, name), settings[name]
        if value != setting.value:
            raise CheckpointError(
                f"ManagerOptions({name}={value!r}) contradicts {setting.text}; remove one of them"
            )
    decided = {name: _TRIGGERS.get(name, setting.value) for name, setting in settings.items()}
    return (options or _WITHOUT_OPTIONS).model_copy(update=decided)

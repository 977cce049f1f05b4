"""Reads the path and the options from the arguments of torch.distributed.checkpoint's calls.

What a caller passes must have its effect, or be harmless here. Everything else is refused by name,
before any rank waits for another.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)

from unified_ckpt.errors import OptionError
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.storage.paths import is_url

_INSTEAD = "pass checkpoint_id=, a path or an s3:// or gs:// URL"
_PLANNER_HOOKS = (
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "lookup_object",
    "lookup_tensor",
    "resolve_data",
    "resolve_tensor",
    "transform_object",
    "transform_tensor",
    "load_bytes",
    "commit_tensor",
    "set_up_planner",
)
_STORAGE_HOOKS = (
    "set_up_storage_writer",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "read_data",
    "finish",
    "read_metadata",
    "storage_meta",
)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where and how a save writes. `flattens`: whether nested dicts are keys of their own."""

    path: str
    options: SaveOptions
    flattens: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and how a load reads. `is_partial`: keys that are not stored keep their values.

    `is_new`: the state dict is created, with `keys` and what is below them; None for all.
    """

    path: str
    flattens: bool
    is_partial: bool
    is_new: bool = False
    keys: Collection[str] | None = None


def save_destination(checkpoint_id: Any, storage_writer: Any, planner: Any) -> Destination:
    """Return where a save writes. NotImplementedError for what only DCP can do."""
    path = _path(checkpoint_id, storage_writer, "storage_writer", filesystem.FileSystemWriter)
    if not is_url(path):
        path = os.path.realpath(path)  # DCP writes into the folder that a link names
    transforms = getattr(storage_writer, "transforms", None)
    if getattr(transforms, "extensions", ()):
        raise NotImplementedError(
            "storage_writer: got _extensions, which transform files of torch.distributed."
            "checkpoint; omit them, and compress with uc.save(options=uc.SaveOptions(compression=))"
        )
    _check_planner(planner, DefaultSavePlanner)
    overwrites = getattr(storage_writer, "overwrite", True)
    options = SaveOptions(
        if_exists="replace" if overwrites else "error",
        fsync=bool(getattr(storage_writer, "sync_files", True)),
        check_replicas="warn",
    )
    return Destination(path, options, getattr(planner, "flatten_state_dict", True))


def load_origin(checkpoint_id: Any, storage_reader: Any, planner: Any) -> Origin:
    """Return where a load reads. NotImplementedError for what only DCP can do."""
    path = _path(checkpoint_id, storage_reader, "storage_reader", filesystem.FileSystemReader)
    _check_planner(planner, DefaultLoadPlanner)
    flattens = getattr(planner, "flatten_state_dict", True)
    is_partial = getattr(planner, "allow_partial_load", False)
    if not isinstance(planner, _EmptyStateDictLoadPlanner):
        return Origin(path, flattens, is_partial)
    keys = planner.keys
    return Origin(
        path, flattens, is_partial, is_new=True, keys=[keys] if isinstance(keys, str) else keys
    )


def check_collectives(use_collectives: bool) -> None:
    """NotImplementedError for a save whose ranks do not meet."""
    if not use_collectives:
        raise NotImplementedError(
            "use_collectives: got False, which stores a folder that no other number of ranks "
            "loads; omit it"
        )


def _path(checkpoint_id: Any, storage: Any, argument: str, kind: type) -> str:
    if storage is not None:
        _check_storage(storage, argument, kind)
    given = checkpoint_id or getattr(storage, "path", None)
    if not given:
        raise OptionError(f"checkpoint_id: got none, and no {argument}; pass one of them")
    return str(os.fspath(given))


def _check_storage(storage: Any, argument: str, kind: type[Any]) -> None:
    """NotImplementedError unless torch's own file system class does all the work."""
    name = type(storage).__name__
    family = tuple(base for base in kind.__mro__ if base.__module__ == filesystem.__name__)
    file_system = getattr(storage, "fs", None)
    if not isinstance(storage, family):
        raise NotImplementedError(f"{argument}: got a {name}, expected {kind.__name__}; {_INSTEAD}")
    if type(file_system) is not filesystem.FileSystem:
        raise NotImplementedError(
            f"{argument}: got a {name} of another file system, expected {kind.__name__}; {_INSTEAD}"
        )
    _check_hooks(storage, argument, _STORAGE_HOOKS, filesystem.__name__)


def _check_planner(planner: Any, kind: type) -> None:
    if planner is None:
        return
    if not isinstance(planner, kind):
        raise NotImplementedError(
            f"planner: got a {type(planner).__name__}, expected {kind.__name__}; omit it"
        )
    _check_hooks(planner, "planner", _PLANNER_HOOKS, default_planner.__name__)


def _check_hooks(value: Any, argument: str, hooks: Sequence[str], module: str) -> None:
    """NotImplementedError if a subclass changes what one of torch's methods does."""
    methods = ((name, getattr(type(value), name, None)) for name in hooks)
    changed = [name for name, method in methods if method and method.__module__ != module]
    if changed:
        raise NotImplementedError(
            f"{argument}: got {type(value).__name__}, which overrides {', '.join(changed)}; "
            "expected a class without hooks; omit it, and transform the state dict instead"
        )

"""What a restore needs of a step, by its load targets, and what it selects."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.errors import (
    FormatError,
    IncompleteError,
    IntegrityError,
    LayoutError,
    NotFoundError,
    OptionError,
    StorageError,
)
from unified_ckpt.foreign.huggingface.adapters import ADAPTER_PART
from unified_ckpt.manager.rules.when import retention_rules
from unified_ckpt.manager.steps.remove import check_trash_directory
from unified_ckpt.options import LoadOptions, ManagerOptions, SourceOptions
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.paths import absolute_path, writable_path

# Errors after which an older step is tried. The headers of a unified step were checked before, so
# its FormatError is the caller's mistake.
_UNIFIED_STEP_ERRORS = (IntegrityError, IncompleteError, StorageError, NotFoundError)
_FOREIGN_STEP_ERRORS = (IntegrityError, IncompleteError, FormatError)
_WEIGHTS = frozenset({"model", "master_weights"})  # interchangeable


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """What a restore loads.

    `kind`: a step of this run, a step of another engine under the root, weights only, adapters
    only, a whole state, or nothing. `later_steps`: complete steps of this run after it. `damaged`:
    save id -> step of unusable steps in the root. `local`: `path` is a name in the local directory
    of each node. `in_root`: that save is in the root. `name`: of another engine's step, relative to
    the root.
    """

    kind: Literal["unified", "foreign", "parameters", "adapters", "full", "none"]
    path: str = ""
    step: int | None = None
    later_steps: Sequence[int] = ()
    damaged: Mapping[str, int] = field(default_factory=dict)
    local: bool = False
    in_root: bool = False
    name: str = ""


def recoverable_errors(point: RestorePoint, step: int | None) -> tuple[type[Exception], ...]:
    """Return the errors after which a restore of `step` tries the next restore point."""
    if point.kind == "unified":
        return _UNIFIED_STEP_ERRORS
    return _FOREIGN_STEP_ERRORS if point.kind == "foreign" and step is None else ()


def required_parts(targets: LoadArguments, options: LoadOptions) -> list[frozenset[str]]:
    """Return the parts that a step must have for these load targets: at least one part of each
    set.
    """
    requested = {part for part in (*_WEIGHTS, "optimizer") if targets.get(part) is not None} | set(
        targets.get("parts") or ()
    )
    selected = filter(options.loads, requested)
    return sorted(
        {_WEIGHTS if part in _WEIGHTS else frozenset({part}) for part in selected}, key=sorted
    )


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What a restore asks for: `step`, or the latest step with the `required` parts. `strict` and
    `options` are those of a load.
    """

    step: int | None
    required: Sequence[frozenset[str]]
    strict: bool
    allow_fresh: bool
    options: LoadOptions


def load_arguments(
    point: RestorePoint, targets: LoadArguments, options: LoadOptions, start: ManagerOptions
) -> LoadArguments:
    """Return the arguments of the load. `start` says how to read a path that it names."""
    if start.load_source is not None and point.kind in ("parameters", "full"):
        options = options.model_copy(update={"source": start.load_source})
    if point.kind not in ("parameters", "adapters"):
        return {**targets, "options": options}
    if point.kind == "adapters":
        options = options.model_copy(update={"source": SourceOptions()})
    parts = _starting_parts(point, targets, options, start)
    options = options.model_copy(update={"parts": parts})
    return {**targets, "extra": None, "rank_extra": None, "options": options}


def _starting_parts(
    point: RestorePoint, targets: LoadArguments, options: LoadOptions, start: ManagerOptions
) -> tuple[str, ...]:
    """Return the parts that a path fills: adapters, or all but them and the optimizer. The latter
    is a target still, for its master weights. Raises LayoutError if no target is one of them.
    """
    from_adapters = point.kind == "adapters"
    weights = [
        part
        for part in ("model", "master_weights")
        if targets.get(part) is not None and not from_adapters
    ]
    others = [
        part
        for part in targets.get("parts") or ()
        if part.startswith(ADAPTER_PART) == from_adapters
        or (not from_adapters and not start.load_adapters_path)
    ]
    selected = tuple(filter(options.loads, (*weights, *others)))
    if not selected:
        expected = f"a part {ADAPTER_PART}" if from_adapters else "one of them; pass `model`"
        raise LayoutError(
            f"load_{point.kind}_path {point.path}: got no model and no parts to fill, "
            f"expected {expected}"
        )
    return selected


def list_missing_parts(parts: Collection[str], required: Sequence[frozenset[str]]) -> list[str]:
    """Describe each required part that a step with these parts lacks."""
    return [
        " or ".join(sorted(alternatives, reverse=True))
        for alternatives in required
        if alternatives.isdisjoint(parts)
    ]


def missing_text(missing: Sequence[str]) -> str:
    """Say what to do about missing parts; "" if none is missing."""
    return (
        f"it has no {', '.join(missing)}; leave these targets out, or pass strict=False, to load it"
        if missing
        else ""
    )


def resolve_paths(options: ManagerOptions, *, root: str) -> ManagerOptions:
    """Return the options with absolute paths, so that a later `chdir` has no effect. Raises
    StorageError if the local tier or the trash folder is a URL, or if a rename cannot move folders
    to the latter; OptionError for a trash folder without a limit of checkpoints, or of a bucket.
    """
    paths = {
        name: absolute_path(path)
        for name in ("load_parameters_path", "load_full_state_path", "load_adapters_path")
        if (path := getattr(options, name))
    }
    if options.local_directory is not None:
        paths["local_directory"] = writable_path(options.local_directory)
    if options.trash_directory is not None and is_bucket_url(root):
        raise OptionError(
            f"ManagerOptions(trash_directory): got {options.trash_directory} for the root {root}, "
            "but a bucket cannot rename checkpoints; omit it"
        )
    if options.trash_directory is not None:
        rules = retention_rules(options)
        if not rules.full and not rules.model_only:
            raise OptionError(
                "ManagerOptions(trash_directory) has no effect without a limit of checkpoints, "
                "such as ManagerOptions(keep_latest=...); set it too"
            )
        paths["trash_directory"] = writable_path(os.path.join(root, options.trash_directory))
        check_trash_directory(root, paths["trash_directory"])
    return options.model_copy(update=paths)

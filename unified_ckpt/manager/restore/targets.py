"""What a restore needs of a step, by its load targets, and what it selects."""

from __future__ import annotations

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
    StorageError,
)
from unified_ckpt.options import LoadOptions, ManagerOptions
from unified_ckpt.runtime.storage.storage import absolute_path, writable_path

# Errors after which an older step is tried. The headers of a unified step were checked before, so
# its FormatError is the caller's mistake.
_UNIFIED_STEP_ERRORS = (IntegrityError, IncompleteError, StorageError, NotFoundError)
_FOREIGN_STEP_ERRORS = (IntegrityError, IncompleteError, FormatError)
_WEIGHTS = frozenset({"model", "master_weights"})  # interchangeable


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """What a restore loads.

    `kind`: a step of this run, a step of another engine under the root, weights only, a whole
    state, or nothing. `later_steps`: complete steps of this run after it. `damaged`: save id ->
    step of unusable steps in the root. `local`: `path` is a name in the local directory of each
    node. `in_root`: that save is in the root. `name`: of another engine's step, relative to the
    root.
    """

    kind: Literal["unified", "foreign", "parameters", "full", "none"]
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
    selected = requested if options.parts is None else requested & set(options.parts)
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


def weight_parts(path: str, targets: LoadArguments, options: LoadOptions) -> tuple[str, ...]:
    """Return the parts that `load_parameters_path` fills: all but the optimizer. Raises LayoutError
    if no target is one of them.
    """
    requested = [
        part for part in ("model", "master_weights") if targets.get(part) is not None
    ] + list(targets.get("parts") or ())
    selected = tuple(part for part in requested if options.parts is None or part in options.parts)
    if not selected:
        raise LayoutError(
            f"load_parameters_path {path}: got no model and no parts to fill, "
            "expected one of them; pass `model`"
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


def resolve_paths(options: ManagerOptions) -> ManagerOptions:
    """Return the options with absolute paths, so that a later `chdir` has no effect. Raises
    StorageError if the local tier is a URL.
    """
    load_paths = {
        name: absolute_path(path)
        for name in ("load_parameters_path", "load_full_state_path")
        if (path := getattr(options, name))
    }
    local = (
        {}
        if options.local_directory is None
        else {"local_directory": writable_path(options.local_directory)}
    )
    return options.model_copy(update={**load_paths, **local})

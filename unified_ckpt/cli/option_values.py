"""Converts the arguments of a verb to options of the library."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable
from typing import TypeVar

from unified_ckpt.core.keywords import suggestion
from unified_ckpt.core.retention import Rules
from unified_ckpt.errors import NotFoundError
from unified_ckpt.foreign.open import open_error
from unified_ckpt.foreign.step_names import detect_prefix
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.steps.scan import StepRecord
from unified_ckpt.options import ConvertOptions, ManagerOptions, SourceOptions
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.regular_files import is_folder
from unified_ckpt.runtime.storage.roots import root_path

UNFINISHED = 3  # the exit code of readers that meet an unfinished commit

Options = TypeVar("Options", ManagerOptions, SourceOptions, ConvertOptions)


def options_from(kind: type[Options], arguments: Namespace) -> Options:
    """Return the options of a class whose names are destinations of the arguments."""
    given = vars(arguments)
    return kind(**{name: given[name] for name in kind.model_fields if name in given})


def retention_rules(arguments: Namespace) -> Rules:
    """Return the retention rules in the arguments."""
    return when.retention_rules(options_from(ManagerOptions, arguments))


def check_metric(arguments: Namespace, records: Iterable[StepRecord]) -> bool:
    """Raise NotFoundError if no complete checkpoint has the metric that --metric names.

    A mistyped name would select no best checkpoint, and `prune` would remove it. Returns False if
    there is no complete checkpoint to check it with.
    """
    metric = arguments.best_metric
    if metric is None:
        return True
    complete = [record for record in records if record.status == "complete"]
    known = sorted({name for record in complete for name in record.metrics or ()})
    if complete and metric not in known:
        raise NotFoundError(
            f"--metric {metric}: no checkpoint has this metric, expected one of "
            f"{', '.join(known) or 'none'}{suggestion(metric, known)}"
        )
    return bool(complete)


def existing_root(arguments: Namespace) -> str:
    """Return the path or URL of ROOT. NotFoundError if there is no such folder."""
    root = root_path(arguments.root)
    if not is_bucket_url(root) and not is_folder(root):
        raise NotFoundError(f"{root}: no such folder")
    return root


def step_prefix(arguments: Namespace, root: str) -> str:
    """Return the prefix of the step names in a run's folder: `--prefix`, or what they have."""
    return detect_prefix(root) if arguments.prefix is None else str(arguments.prefix)


def check_not_a_step(root: str) -> None:
    """Raise NotFoundError if a folder without steps is a checkpoint itself."""
    if not open_error(root):
        run = os.path.dirname(root)
        raise NotFoundError(
            f"{root}: is a checkpoint, expected the folder of a run; did you mean {run}?"
        )


def source_options(arguments: Namespace) -> SourceOptions:
    """Return the source options in the arguments."""
    return options_from(SourceOptions, arguments)

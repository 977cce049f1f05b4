"""Checkpoints in formats of others: which one a path holds, and it as a Source.

A folder with our manifest, or of Hugging Face's weights alone, is none of these: the engine reads it itself.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from typing import cast

from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.gc_pause import paused
from unified_ckpt.runtime.storage.storage import absolute, is_url, local
from unified_ckpt.sources.detect.names import Format, find_format, find_refused


def format_of(path: str, options: SourceOptions) -> Format | None:
    """The format of a path that somebody else wrote; None for ours, for Hugging Face's safetensors, and for what is not known.

    Where nothing there is read, a format that is refused by its name.
    """
    if is_url(path):
        return None
    return find_format(local(path), told=options.format) or (
        find_refused(local(path)) if options.format is None else None
    )


def open_any(path: str, options: SourceOptions = SourceOptions()) -> Source:  # noqa: B008  # it is frozen
    """The checkpoint at a path, in any format. NotFoundError, FormatError or IncompleteError where there is none that can be read."""
    found = format_of(path, options)
    with ExitStack() as owned, paused:
        opened = open_path(path, hold=True) if found is None else _open(found, path, options)
        owned.callback(opened.close)
        source = changed(opened, options)
        owned.pop_all()
    return source


def problem_of(path: str) -> str:
    """Why a checkpoint cannot be opened; empty where it can."""
    try:
        open_any(path).close()
    except CheckpointError as error:
        return str(error)
    return ""


def _open(found: Format, path: str, options: SourceOptions) -> Source:
    module, function = found.opener.split(":")
    opener = getattr(
        import_module(f"{__name__}.{module}"), function
    )  # only now: what needs torch is not imported for our own folders
    try:
        return cast("Source", opener(absolute(path), options))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        OSError,
    ) as error:  # RecursionError too
        raise FormatError(
            f"{path}: is damaged, or not what {found.title} writes: {type(error).__name__}: {error}"
        ) from error


def changed(source: Source, options: SourceOptions) -> Source:
    """The source under the names that the options ask for; itself where they ask for none."""
    if options.rename is None and options.layers is None and options.conversion_fn is None:
        return source
    return cast(
        "Source", import_module("unified_ckpt.views.apply_options").view(source, options)
    )  # only now: it needs torch

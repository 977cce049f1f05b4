"""Checkpoints in formats of others: which one a path holds, and it as a Source.

A folder with our manifest, or of Hugging Face's weights alone, is none of these: the engine reads
it itself.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from typing import cast

from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.storage.storage import absolute_path, is_url, strip_file_scheme
from unified_ckpt.sources.detect.names import Format, detect_format, detect_unsupported


def resolve_format(path: str, options: SourceOptions) -> Format | None:
    """The format of a path that somebody else wrote; None for ours, for Hugging Face's safetensors,
    and for what is not known.

    Where nothing there is read, a format that is refused by its name.
    """
    if is_url(path):
        return None
    return detect_format(strip_file_scheme(path), format_name=options.format) or (
        detect_unsupported(strip_file_scheme(path)) if options.format is None else None
    )


# it is frozen
def open_source(path: str, options: SourceOptions = SourceOptions()) -> Source:  # noqa: B008
    """The checkpoint at a path, in any format. NotFoundError, FormatError or IncompleteError where
    there is none that can be read.
    """
    detected = resolve_format(path, options)
    with ExitStack() as stack, gc_paused:
        opened = (
            open_path(path, lock=True)
            if detected is None
            else _open_format(detected, path, options)
        )
        stack.callback(opened.close)
        source = apply_options(opened, options)
        stack.pop_all()
    return source


def open_error(path: str) -> str:
    """Why a checkpoint cannot be opened; empty where it can."""
    try:
        open_source(path).close()
    except CheckpointError as error:
        return str(error)
    return ""


def _open_format(detected: Format, path: str, options: SourceOptions) -> Source:
    module, function = detected.open_function.split(":")
    open_function = getattr(
        import_module(f"{__name__}.{module}"), function
    )  # only now: what needs torch is not imported for our own folders
    try:
        return cast("Source", open_function(absolute_path(path), options))
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
            f"{path}: is damaged, or not what {detected.title} writes: {type(error).__name__}: {error}"
        ) from error


def apply_options(source: Source, options: SourceOptions) -> Source:
    """The source under the names that the options ask for; itself where they ask for none."""
    if options.rename is None and options.layers is None and options.conversion_fn is None:
        return source
    return cast(
        "Source", import_module("unified_ckpt.views.apply_options").apply_options(source, options)
    )  # only now: it needs torch

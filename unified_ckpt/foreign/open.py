"""Opens checkpoints of any format as Sources.

Unified checkpoints and plain Hugging Face safetensors folders have no `Format` here: the engine
reads them.
"""

from __future__ import annotations

from contextlib import ExitStack

from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.source.decoded import decode_source
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import CheckpointError, FormatError, describe_error
from unified_ckpt.foreign.files.listing import list_path
from unified_ckpt.foreign.files.parsing import DAMAGE_ERRORS
from unified_ckpt.foreign.formats import (
    Format,
    check_format_supported,
    detect_format,
    import_function,
    match_format,
)
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.storage.paths import absolute_path, is_url, strip_file_scheme
from unified_ckpt.runtime.storage.regular_files import is_shortage


def resolve_format(path: str, options: SourceOptions) -> Format | None:
    """Return the foreign format at a path, or None for unified, safetensors and unknown files.

    FormatError for a recognized but unsupported format, and for a foreign format at a URL.
    """
    if is_url(path):
        if options.format is not None and detect_format(path, format_name=options.format):
            raise FormatError(
                f"{path}: got a URL, expected a local folder to read the format {options.format}, "
                "which takes a listing of its files; copy the folder to a disk"
            )
        return None
    path = strip_file_scheme(path)
    if options.format is not None:
        return detect_format(path, format_name=options.format)
    listing = list_path(path)
    detected = match_format(listing)
    if detected is None:
        check_format_supported(listing)
    return detected


def open_source(
    path: str,
    options: SourceOptions = SourceOptions(),  # noqa: B008  # frozen
) -> Source:
    """Open the checkpoint at a path, in any format; the caller closes it.

    Raises NotFoundError, FormatError or IncompleteError if no readable checkpoint is there.
    """
    detected = resolve_format(path, options)
    with ExitStack() as stack, gc_paused:
        if detected is None:
            opened: Source = decode_source(open_path(path, lock=True), label=path)
        else:
            opener = import_function(detected.opener)
            try:
                opened = opener(absolute_path(path), options)
            except CheckpointError:  # also a NotFoundError, which is a ValueError
                raise
            except DAMAGE_ERRORS as error:
                if is_shortage(error):
                    raise
                raise FormatError(
                    f"{path}: is damaged, or was not written by {detected.title}: "
                    f"{describe_error(error)}"
                ) from error
        stack.callback(opened.close)
        source = wrap_in_views(opened, options)
        stack.pop_all()
    return source


def open_error(path: str) -> str:
    """Return why a checkpoint cannot be opened, or an empty string if it can."""
    try:
        open_source(path).close()
    except CheckpointError as error:
        return str(error)
    return ""


def wrap_in_views(source: Source, options: SourceOptions) -> Source:
    """Wrap a source in the views that the options ask for, if any."""
    if options.rename is None and options.layers is None and options.conversion_fn is None:
        return source
    from unified_ckpt.views.apply_options import apply_options  # imports torch

    return apply_options(source, options)

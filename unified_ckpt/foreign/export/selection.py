"""The source as the target format has it: parts, dtype and names. Reads no tensor."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.foreign.export.adapters import adapter_part_of
from unified_ckpt.foreign.export.unwritten import WEIGHTS_ONLY
from unified_ckpt.foreign.files.json import CONFIG, config_path, read_config
from unified_ckpt.foreign.orbax.export_maxtext import maxtext_view
from unified_ckpt.foreign.orbax.maxtext import UNKNOWN_MODEL, is_maxtext
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import ConvertOptions
from unified_ckpt.runtime.storage.regular_files import is_file
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES
from unified_ckpt.views.model import part_as_model, without_model
from unified_ckpt.views.select import SelectedSource


def model_config(options: ConvertOptions, main_path: str) -> str | None:
    """Return the path of the model's config: from the options, or beside the source."""
    has_config = is_file(os.path.join(main_path, CONFIG))
    return options.source.config or (main_path if has_config else None)


def with_state_names(source: Source, options: ConvertOptions) -> Source:
    """Return the source with the optimizer state by name, if it is to be written."""
    parts, indexed = options.parts, source.indexed
    is_written = options.to not in WEIGHTS_ONLY and (parts is None or OPTIMIZER in parts)
    return indexed.with_stored_order if indexed is not None and is_written else source


def written_parts(source: Source, selected: Source, options: ConvertOptions) -> set[str]:
    """Return the parts of the source that are written, if only as another part.

    `selected`: the result of `select_parts`.
    """
    if options.to == "peft":
        return {adapter_part_of(source, options.parts)}
    parts = {*selected.parts}
    if options.to == "huggingface":
        parts |= {*(options.parts or ())} if MODEL in source.parts else {MASTER}
    return parts


def select_parts(source: Source, options: ConvertOptions, main_path: str) -> Source:
    """Return the source as it is to be written.

    NotFoundError if the config does not exist, FormatError if the format needs one.
    """
    config = options.source.config
    if config is not None and not is_file(config_path(config)):
        raise NotFoundError(
            f"{config}: does not exist; pass a config.json, or a folder that has one"
        )
    parts: Collection[str] | None = options.parts
    if options.to == "huggingface":
        if parts is not None and MODEL not in parts:
            source = part_as_model(source, *parts)
        parts = (MODEL,)
    if source.metadata().paddable_dims:
        raise FormatError(
            "rename: `pad` has no effect in a conversion, which has no existing target; use the "
            "rule when loading"
        )
    if options.to == "unified" and parts is not None:
        source, parts = without_model(source, parts)
    if options.to == "orbax" and parts is None and options.model_dtype is not None:
        parts = [part for part in source.parts if part != MASTER]  # the model is what was asked for
    if parts is not None or options.model_dtype is not None:
        dtype = options.model_dtype
        model_dtype = DTYPE_NAMES[getattr(torch, dtype)] if dtype else None
        source = SelectedSource(source, parts=parts, model_dtype=model_dtype)
    config = model_config(options, main_path)
    own_names = config is None or options.source.names == "own"
    if options.to not in ("maxtext", "orbax") or (options.to == "orbax" and own_names):
        return source
    if config is None:
        raise FormatError(
            "MaxText's names and shapes depend on the model's config.json; pass "
            "SourceOptions(config=...), or put it into the source"
        )
    return maxtext_view(source, read_config(config))


def check_maxtext_names(source: Source, options: ConvertOptions, path: str) -> None:
    """Refuse to write MaxText's own names, which other tools cannot use, unless asked for."""
    names = (
        source.names(MODEL)
        if source.format == "orbax" and options.source.names == "auto" and MODEL in source.parts
        else ()
    )
    if is_maxtext(names) and options.to not in ("maxtext", "orbax"):
        raise FormatError(f"{path}: {UNKNOWN_MODEL}")

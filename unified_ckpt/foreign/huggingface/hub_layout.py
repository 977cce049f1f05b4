"""Checks that transformers fills a model with the tensors that a Hugging Face folder will have.

How a model could be random without an error: `from_pretrained` creates weights anew whose names the
folder lacks. So transformers itself opens the model on the meta device, from names and shapes,
before anything is written. Layers that were stacked are unstacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.core.text import first_items, format_list
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, MissingPackageError, NotFoundError
from unified_ckpt.foreign.files.json import read_config
from unified_ckpt.foreign.transformers_models import pretrained_class
from unified_ckpt.format.names import MODEL
from unified_ckpt.runtime.torch_state.tensors import torch_dtype
from unified_ckpt.views.stack_layers import unstack_layers

_MAX_NAMES = 5  # in a note
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_NUMBERED = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class _Opening:
    """What opening a folder would do: weights that it creates anew, and notes for the user."""

    problems: Sequence[str] = ()
    notes: Sequence[str] = ()


def in_hub_layout(
    source: Source, config: str | None, *, is_model_folder: bool
) -> tuple[Source, list[str]]:
    """Return a model as `from_pretrained` opens it, with notes on what it does not do.

    `config`: the path of the model's config.json, or of its folder. `is_model_folder`: the source
    was one already; weights that it lacks are noted. FormatError for a model that would be random.
    """
    if config is None:
        note = (
            "there is no config.json, so names were not checked, and from_pretrained cannot open "
            "the folder; add the model's, or pass SourceOptions(config=...)"
        )
        return source, [note]
    opening = _open(source, config, is_model_folder=is_model_folder)
    if not opening.problems:
        return source, list(opening.notes)
    try:
        unstacked = unstack_layers(source)
    except FormatError:
        unstacked = None
    if unstacked is not None:
        unstacked_opening = _open(unstacked, config, is_model_folder=False)
        if not unstacked_opening.problems:
            note = "layers were unstacked along dim 0, as from_pretrained has them"
            return unstacked, [*unstacked_opening.notes, note]
    names = first_items(sorted(source.names(MODEL)), _MAX_NAMES)
    title = f"{config}: from_pretrained would start with random values for"
    raise FormatError(
        f"{format_list(title, opening.problems)}\n  got a model with {names}; pass the config of "
        "this model, SourceOptions(rename=...) or SourceOptions(layers='unstacked', layer_dim=...),"
        " or convert to another format"
    )


def _open(source: Source, config: str, *, is_model_folder: bool) -> _Opening:
    """Open the model on the meta device. Without transformers' model, go by numbers of layers."""
    try:
        model_class, model_config = pretrained_class(config)
    except (NotFoundError, FormatError, MissingPackageError) as error:
        return _open_unknown(source, config, str(error))
    if getattr(model_config, "quantization_config", None) is not None:
        return _Opening(notes=["the model is quantized, so its names were not checked"])
    specs = source.specs(MODEL, source.names(MODEL))
    tensors = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for name, spec in specs.items()
    }
    try:
        info = _loading_info(model_class, model_config, tensors)
    except Exception as error:  # its conversions may raise anything
        return _unopened(model_class, model_config, error)
    return _opening(model_class, info, is_model_folder=is_model_folder)


def _opening(model_class: Any, info: dict[str, Any], *, is_model_folder: bool) -> _Opening:
    missing, unread = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    problems = [
        f"{name}: got shape {tuple(stored)}, expected {tuple(expected)}"
        for name, stored, expected in sorted(info["mismatched_keys"])
    ]
    notes, name = [], model_class.__name__
    prefix = f"{model_class.base_model_prefix}."
    has_head = any(key.startswith(prefix) for key in info["names"])
    in_base = [key for key in missing if key.startswith(prefix) or not has_head]
    if not (is_model_folder and not unread):
        problems += in_base
        missing = [key for key in missing if key not in in_base]
    if missing:
        notes.append(f"from_pretrained creates anew for {name}: {first_items(missing, _MAX_NAMES)}")
    if unread:
        notes.append(f"from_pretrained does not read for {name}: {first_items(unread, _MAX_NAMES)}")
    return _Opening(problems, notes)


def _unopened(model_class: Any, model_config: Any, error: Exception) -> _Opening:
    """Return the error as a problem, unless transformers cannot open the model's own tensors."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        with torch.device("meta"):
            model_tensors = model_class(model_config).state_dict()
        _loading_info(model_class, model_config, model_tensors)
    except Exception:  # nothing to do with the source
        return _Opening(notes=[f"names were not checked: {text}"])
    return _Opening([f"{model_class.__name__}: {text}"])


def _loading_info(
    model_class: Any, config: Any, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Let transformers load tensors without values; return its report, with the model's names."""
    with _silent_transformers():
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    return {**info, "names": list(model.state_dict())}


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Silence the report and the progress bar of a load that only checks."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging  # some of its functions have no types
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _open_unknown(source: Source, config: str, reason: str) -> _Opening:
    """Go by the numbers of layers in names, which models of transformers have."""
    fields = read_config(config)
    count = next((fields[key] for key in _LAYER_COUNTS if isinstance(fields.get(key), int)), 0)
    if count and not any(map(_NUMBERED.search, source.names(MODEL))):
        problem = f"the {count} layers of its model: no name has the number of a layer"
        return _Opening([problem])
    return _Opening(notes=[f"names were not checked: {' '.join(reason.split())}"])

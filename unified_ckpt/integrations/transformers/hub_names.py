"""Opens checkpoints under hub names, or under those of a transformers model in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from unified_ckpt.api import open as open_source
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.foreign.huggingface.hub_names import (
    fused_error,
    hub_names,
    in_model_names,
    state_shapes,
)
from unified_ckpt.foreign.transformers_models import meta_model
from unified_ckpt.format.names import WEIGHTS
from unified_ckpt.views.derived import RangesTensor, derive


def open_hub_names(
    path: str | os.PathLike[str], *, model: torch.nn.Module | None = None
) -> SourceView:
    """Open a unified checkpoint with the names and shapes of the hub, for vLLM and transformers 4.
    Lazy; weights only.

    `model`: the saved model; None builds it without memory from the folder's config.json. Raises
    FormatError for a tensor whose bytes are ordered differently on the hub.
    """

    def with_hub_names(source: Source) -> Source:
        tensors = hub_tensors(model if model is not None else meta_model(path))
        return derive(source, tensors, parts=WEIGHTS)

    return _open_view(path, with_hub_names)


def open_model_names(path: str | os.PathLike[str], *, model: torch.nn.Module) -> SourceView:
    """Open a checkpoint with hub names, or the model's own names, under the names in memory.

    `uc.load` does the same for its `model`.
    """
    return _open_view(path, lambda source: in_model_names(source, model))


def _open_view(path: str | os.PathLike[str], transform: Callable[[Source], Source]) -> SourceView:
    view = open_source(path)
    try:
        return SourceView(transform(view.source))
    except BaseException:
        view.close()
        raise


def hub_tensors(model: torch.nn.Module) -> Mapping[str, RangesTensor]:
    """Return the hub tensors that differ from those in memory in name or shape, each as a slice of
    a tensor in memory. FormatError if one is not a slice.
    """
    pretrained = cast("Any", model)
    names = hub_names(pretrained, state_shapes(pretrained))
    for name in sorted(names.fused):
        raise fused_error(pretrained, name)
    return names.tensors

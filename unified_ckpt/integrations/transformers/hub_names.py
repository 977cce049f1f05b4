"""Maps the two sets of names of a transformers model: names in memory, which checkpoints have, and
names on the hub.

transformers 5 merges and renames tensors of some models at load (the experts of Mixtral), and
reverses it in `save_pretrained`. This module runs that conversion on tensors without bytes, and
derives from the strides where each result lies in its base tensor. So it follows any version of
transformers, and refuses results that are not slices: transposed or fused tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, cast

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from unified_ckpt.api import open as open_source
from unified_ckpt.engine.source.protocol import IndexedOptimizerSource, Order, Source
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import WEIGHTS
from unified_ckpt.sources.pytorch.parameter_order import meta_model
from unified_ckpt.views.derived import ElementRange, RangesTensor, derive


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

    `uc.load` accepts the result, with the model, its optimizer and everything else in the
    checkpoint.
    """
    return _open_view(path, lambda source: _in_model_names(source, model_tensors(model)))


def _open_view(path: str | os.PathLike[str], transform: Callable[[Source], Source]) -> SourceView:
    view = open_source(path)
    try:
        return SourceView(transform(view.source))
    except BaseException:
        view.close()
        raise


def _in_model_names(source: Source, recipes: Mapping[str, RangesTensor]) -> Source:
    """Rename the weights. Optimizer state belongs to the model in memory and has its names
    already.
    """
    indexed = source.indexed
    if indexed is None:
        return derive(source, recipes, parts=WEIGHTS, unchanged=set(source.parts) - set(WEIGHTS))

    def for_order(order: Order | None) -> Source:
        return _in_model_names(
            indexed.with_stored_order if order is None else indexed.with_order(order), recipes
        )

    return IndexedOptimizerSource(_in_model_names(indexed.without_optimizer, recipes), for_order)


def hub_tensors(model: torch.nn.Module) -> dict[str, RangesTensor]:
    """Return the hub tensors that differ from those in memory in name or shape, each as a slice of
    a tensor in memory.
    """
    memory_tensors = {
        name: torch.empty(tensor.shape, dtype=torch.uint8, device="meta")
        for name, tensor in model.state_dict().items()
    }
    with _without_conversion_record(model), _ContiguousAsView():
        hub: dict[str, torch.Tensor] = revert_weight_conversion(
            cast("Any", model), dict(memory_tensors)
        )
    names = {id(tensor): name for name, tensor in memory_tensors.items()}
    recipes = {}
    for name, tensor in hub.items():
        base = names.get(id(tensor)) or names.get(id(tensor._base))
        if base is None or not tensor.is_contiguous():
            raise FormatError(
                f"{name}: transformers {transformers.__version__} derives it from "
                f"{type(model).__name__}'s tensors by more than slicing and "
                "renaming, expected a slice; use save_pretrained"
            )
        if name != base or tensor.shape != memory_tensors[base].shape:
            recipes[name] = RangesTensor(
                tuple(tensor.shape),
                (ElementRange(base, int(tensor.storage_offset()), tensor.numel()),),
            )
    return recipes


def model_tensors(model: torch.nn.Module) -> dict[str, RangesTensor]:
    """Return the inverse of `hub_tensors`: the model's tensors, each as whole hub tensors in
    sequence.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ranges_by_name: dict[str, list[tuple[int, str, int]]] = {}
    for name, recipe in hub_tensors(model).items():
        (element_range,) = recipe.ranges
        ranges_by_name.setdefault(element_range.name, []).append(
            (element_range.first, name, element_range.count)
        )
    recipes = {}
    for name, ranges in ranges_by_name.items():
        ranges.sort()
        ends = [0]
        for start, _, count in ranges:
            if start != ends[-1]:
                break
            ends.append(start + count)
        if ends[-1] != prod(shapes[name]):
            raise FormatError(
                f"{name}: got hub tensors for {ends[-1]} elements, "
                f"expected {prod(shapes[name])}, each once"
            )
        recipes[name] = RangesTensor(
            shapes[name], tuple(ElementRange(hub_name, 0, count) for _, hub_name, count in ranges)
        )
    return recipes


@contextlib.contextmanager
def _without_conversion_record(model: torch.nn.Module) -> Iterator[None]:
    """Hide the model's record of its own load conversion, which is empty after a load from a
    unified checkpoint.
    """
    removed = {
        name: vars(model).pop(name) for name in ("_weight_conversions",) if name in vars(model)
    }
    try:
        yield
    finally:
        vars(model).update(removed)


class _ContiguousAsView(TorchFunctionMode):
    """Makes `contiguous` return the view itself, so that its strides show where it lies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))

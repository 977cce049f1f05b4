"""The two names of a transformers model's tensors: those in memory, which checkpoints have, and
those of the hub.

transformers 5 joins and renames tensors of some models as it loads them (the experts of Mixtral),
and undoes it in `save_pretrained`. Its own conversion is run here on tensors without bytes; where
each result lies in what it was cut from is read off its strides. So this follows whatever
transformers does, and refuses what is not a cut: a transposed or fused tensor.
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
from unified_ckpt.engine.source.by_position import IndexedOptimizerSource, Order
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.torch_state.flatten import WEIGHTS
from unified_ckpt.sources.pytorch.parameter_order import meta_model
from unified_ckpt.views.derived import ElementRange, RangesTensor, derive


def open_hub_names(
    path: str | os.PathLike[str], *, model: torch.nn.Module | None = None
) -> SourceView:
    """A checkpoint of ours with the names and shapes of the hub: what vLLM and transformers 4 read.
    Lazy; weights only.

    `model`: the one that was saved; None: made without memory from the folder's config.json.
    FormatError for a tensor that the hub has in another order of bytes, not only cut otherwise.
    """
    return _open_view(
        path,
        lambda source: derive(
            source, hub_tensors(model if model is not None else meta_model(path)), parts=WEIGHTS
        ),
    )


def open_model_names(path: str | os.PathLike[str], *, model: torch.nn.Module) -> SourceView:
    """A checkpoint in the hub's names, or in the model's own, with those that the model has in
    memory: `uc.load` takes it, with the model, its optimizer and all else that the checkpoint has.
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
    """The weights under the model's names; the optimizer's state is of the model in memory, and has
    these already.
    """
    if not isinstance(source, IndexedOptimizerSource):
        return derive(source, recipes, parts=WEIGHTS, unchanged=set(source.parts) - set(WEIGHTS))

    def for_order(order: Order | None) -> Source:
        return _in_model_names(
            source.with_stored_order if order is None else source.with_order(order), recipes
        )

    return IndexedOptimizerSource(_in_model_names(source.without_optimizer(), recipes), for_order)


def hub_tensors(model: torch.nn.Module) -> dict[str, RangesTensor]:
    """The hub's tensors of a model that is called otherwise in memory, or cut otherwise: each as
    elements of one of memory's.
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
                f"{name}: transformers {transformers.__version__} makes it from {type(model).__name__}'s tensors by more than cutting and "
                "renaming; needed a model whose hub tensors are parts of its own; save_pretrained writes any"
            )
        if name != base or tensor.shape != memory_tensors[base].shape:
            recipes[name] = RangesTensor(
                tuple(tensor.shape),
                (ElementRange(base, int(tensor.storage_offset()), tensor.numel()),),
            )
    return recipes


def model_tensors(model: torch.nn.Module) -> dict[str, RangesTensor]:
    """The other way: the model's tensors, each as whole tensors of the hub, one after another."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    pieces_by_name: dict[str, list[tuple[int, str, int]]] = {}
    for name, recipe in hub_tensors(model).items():
        (piece,) = recipe.ranges
        pieces_by_name.setdefault(piece.name, []).append((piece.first, name, piece.count))
    recipes = {}
    for name, pieces in pieces_by_name.items():
        pieces.sort()
        ends = [0]
        for start, _, count in pieces:
            if start != ends[-1]:
                break
            ends.append(start + count)
        if ends[-1] != prod(shapes[name]):
            raise FormatError(
                f"{name}: the hub's tensors of it end at element {ends[-1]} of {prod(shapes[name])}; needed all of it, once"
            )
        recipes[name] = RangesTensor(
            shapes[name], tuple(ElementRange(hub_name, 0, count) for _, hub_name, count in pieces)
        )
    return recipes


@contextlib.contextmanager
def _without_conversion_record(model: torch.nn.Module) -> Iterator[None]:
    """The model without its note of what its own loading has converted: nothing, if that was from a
    checkpoint of ours.
    """
    removed = {
        name: vars(model).pop(name) for name in ("_weight_conversions",) if name in vars(model)
    }
    try:
        yield
    finally:
        vars(model).update(removed)


class _ContiguousAsView(TorchFunctionMode):
    """Lets `contiguous` give back the view that it is called on, so that its strides tell where it
    lies.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))

"""The state that an estimate plans: what exists, and what the first step will create."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import nn

from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.save.request import SaveArguments
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import OptionError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.modules import FlatModel, ModelArgument, flatten_model
from unified_ckpt.runtime.torch_state.optimizers import OptimizerArgument
from unified_ckpt.runtime.torch_state.predicted_state import (
    materialized,
    memory_of,
    predict_masters,
    predict_optimizer,
    predict_optimizer_of,
    without_memory,
)
from unified_ckpt.runtime.torch_state.shards.shards import Shards
from unified_ckpt.runtime.torch_state.tensors import torch_dtype

PredictedOptimizer = OptimizerArgument | str


class EstimateArguments(TypedDict, total=False):
    """The keyword arguments of an estimate that describe the state; `uc.estimate` documents them.

    All but `master_weights=True` are those of a save.
    """

    master_weights: OptimizerArgument | bool | None
    parts: Mapping[str, ModelArgument] | None
    layout: Layout | None
    options: SaveOptions | None


def predict_arguments(
    model: ModelArgument | None,
    optimizer: PredictedOptimizer | None,
    arguments: EstimateArguments,
) -> SaveArguments:
    """Return the arguments of the save after the first step.

    OptionError for state that cannot be predicted; LayoutError as in a save.
    """
    parts = arguments.get("parts") or {}
    state = FlatState(
        model=flatten_model(model),
        extra_parts={name: flatten_model(part, f"parts[{name!r}]") for name, part in parts.items()},
    )
    trainable = _trainable(state.model, is_module=not isinstance(model, Mapping))
    masters = arguments.get("master_weights")
    if isinstance(masters, bool):
        masters = _predicted_masters(trainable) if masters else None
    if isinstance(optimizer, str):
        own = masters if isinstance(masters, Mapping) else {}
        flat: OptimizerArgument | None = predict_optimizer_of(optimizer, {**trainable, **own})
    else:
        names, slices = state.param_names(), state.slices()
        flat = predict_optimizer(optimizer, names, slices) if optimizer is not None else None
    return {
        "model": _without_meta(model, state.model) if model is not None else None,
        "optimizer": flat,
        "master_weights": masters,
        "parts": {
            name: _without_meta(part, state.extra_parts[name]) for name, part in parts.items()
        },
        "layout": arguments.get("layout"),
    }


def arguments_from_source(
    source: Source, optimizer: PredictedOptimizer | None, arguments: EstimateArguments
) -> tuple[ModelArgument | None, PredictedOptimizer | None, EstimateArguments]:
    """Return the state of a run that starts from a checkpoint or model folder, without memory.

    What the checkpoint lacks is as in `arguments`. OptionError for what both have.
    """
    stored = {part: _tensors_of(source, part) for part in source.parts}
    for part, given in (
        (OPTIMIZER, optimizer),
        (MASTER, arguments.get("master_weights")),
        ("parts", arguments.get("parts")),
        ("layout", arguments.get("layout")),
    ):
        if given and (part in stored or part in ("parts", "layout")):
            raise OptionError(f"{part}: got it beside a checkpoint, which has one; omit {part}=")
    model = stored.pop(MODEL, None)
    without_masters = stored.pop(WITHOUT_MASTERS, {})
    if model is None and MASTER in stored:  # a save without its model; a run saves one
        model = {**stored[MASTER], **without_masters}
    optimizer = stored.pop(OPTIMIZER, None) or optimizer
    masters = stored.pop(MASTER, None) or arguments.get("master_weights")
    return model, optimizer, {**arguments, "master_weights": masters, "parts": stored}


def _tensors_of(source: Source, part: str) -> dict[str, torch.Tensor]:
    return {
        name: without_memory(torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta"))
        for name, spec in source.specs(part, source.names(part)).items()
    }


def _without_meta(model: ModelArgument, flat: FlatModel) -> ModelArgument:
    """Return the model, or its tensors without memory if some are on the meta device."""
    tensors, shards = materialized(flat.tensors), materialized(flat.shards)
    same = (tensors[fqn] is tensor for fqn, tensor in flat.tensors.items())
    if all(same) and all(shards[fqn] is each for fqn, each in flat.shards.items()):
        return model
    stored = {fqn: t for fqn, t in tensors.items() if fqn not in flat.skipped_ddp_buffers}
    return {**stored, **shards}


def _predicted_masters(
    trainable: Mapping[str, torch.Tensor | Shards],
) -> dict[str, torch.Tensor | Shards]:
    masters = predict_masters(trainable)
    if not masters:
        raise OptionError(
            "master_weights: got True for a model without trainable 16-bit tensors; set "
            "SaveOptions(model_dtype=...) to store a float32 model rounded, beside its masters"
        )
    return masters


def _trainable(model: FlatModel, *, is_module: bool) -> dict[str, torch.Tensor | Shards]:
    """Return a module's parameters that require gradients, or a dict's floating-point tensors."""
    if not is_module:
        given: dict[str, torch.Tensor | Shards] = {
            **materialized(model.tensors),
            **materialized(model.shards),
        }
        return {fqn: each for fqn, each in given.items() if memory_of(each).is_floating_point()}
    tensors = materialized(model.tensors)
    return {
        fqn: tensors[fqn]
        for fqn, tensor in model.tensors.items()
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }

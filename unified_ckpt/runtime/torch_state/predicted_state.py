"""Predicts state that does not exist before the first step, as tensors without memory.

All elements of a tensor without memory are one zero, so it can be planned like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.errors import OptionError
from unified_ckpt.runtime.torch_state.optimizer_rules import (
    SCALAR_STATES,
    class_name,
    created_state,
    group_params,
)
from unified_ckpt.runtime.torch_state.optimizers import (
    FlatOptimizer,
    OptimizerArgument,
    as_optimizers,
    flatten_optimizer,
    with_views,
)
from unified_ckpt.runtime.torch_state.shards.optimizer_views import Slices, is_trained
from unified_ckpt.runtime.torch_state.shards.shards import Shards
from unified_ckpt.runtime.torch_state.tensors import local_tensor

_Tensor = TypeVar("_Tensor", bound=torch.Tensor | Shards)


def memory_of(tensor: torch.Tensor | Shards) -> torch.Tensor:
    """Return the tensor, or that which has the boxes."""
    return tensor.tensor if isinstance(tensor, Shards) else tensor


def without_memory(tensor: _Tensor, dtype: torch.dtype | None = None) -> _Tensor:
    """Return a tensor of the same shape and placements, or boxes, of this dtype or its own."""
    if isinstance(tensor, Shards):
        return cast("_Tensor", tensor.like(_without_memory(tensor.tensor, dtype)))
    return cast("_Tensor", _without_memory(tensor, dtype))


def _without_memory(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        mesh, placements = tensor.device_mesh, tensor.placements
        if local.device.type == "meta":
            local = torch.zeros((), dtype=local.dtype, device=mesh.device_type).expand(local.shape)
        return DTensor.from_local(
            _without_memory(local, dtype),
            mesh,
            placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    return torch.zeros((), dtype=dtype or tensor.dtype, device=device).expand(tensor.shape)


def materialized(tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Return the tensors; those on the meta device without memory on another one."""
    return {
        fqn: without_memory(tensor)
        if local_tensor(memory_of(tensor)).device.type == "meta"
        else tensor
        for fqn, tensor in tensors.items()
    }


def predict_masters(
    tensors: Mapping[str, torch.Tensor | Shards],
) -> dict[str, torch.Tensor | Shards]:
    """Return float32 master weights of the 16-bit floating-point tensors among these."""
    return {
        fqn: without_memory(tensor, torch.float32)
        for fqn, tensor in tensors.items()
        if memory_of(tensor).dtype in (torch.bfloat16, torch.float16)
    }


def predict_optimizer(
    optimizer: OptimizerArgument | None, names: Mapping[int, str], slices: Slices
) -> FlatOptimizer:
    """Return the state after the next step, in which every trainable parameter has a gradient.

    OptionError for an optimizer without state whose class is unknown. LayoutError as in
    `flatten_optimizer`, whose arguments these are.
    """
    flat = flatten_optimizer(optimizer, names, slices)
    optimizers = [] if isinstance(optimizer, FlatOptimizer) else as_optimizers(optimizer)
    for single, group, param in group_params(with_views(optimizers, slices)):
        if is_trained(single, param) and not single.state.get(param):
            flat.tensors |= _created_tensors(single, param, group, names[id(param)])
    tensors, shards = materialized(flat.tensors), materialized(flat.shards)
    return replace(flat, tensors=tensors, shards=shards)


def predict_optimizer_of(name: str, tensors: Mapping[str, torch.Tensor | Shards]) -> FlatOptimizer:
    """Return the state that an optimizer of torch.optim with default options keeps of tensors.

    `name`: of its class, in any case. OptionError for an unknown one.
    """
    classes: dict[str, Any] = {
        each.lower(): kind
        for each, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    kind = classes.get(name.lower())
    if kind is None:
        raise OptionError(
            f"optimizer: got {name!r}, expected the name of a class of torch.optim: "
            f"{', '.join(sorted(classes))}"
        )
    params = {fqn: nn.Parameter(memory_of(tensor)) for fqn, tensor in tensors.items()}
    if not params:
        raise OptionError(f"optimizer: got {name!r} for a model without trainable tensors")
    fqns = {id(param): fqn for fqn, param in params.items()}
    try:
        optimizer = kind(list(params.values()))
    except ValueError as error:  # Muon trains matrices only
        raise OptionError(f"optimizer: {name!r} cannot train this model: {error}") from error
    flat = predict_optimizer(optimizer, fqns, {})
    for key, state in list(flat.tensors.items()):
        param = tensors[key.rpartition("/")[0]]
        if isinstance(param, Shards) and state.dim():
            flat.shards[key] = param.like(flat.tensors.pop(key))
    return flat


def _created_tensors(
    optimizer: Optimizer, param: torch.Tensor, options: Mapping[str, object], fqn: str
) -> dict[str, torch.Tensor]:
    dtypes = created_state(optimizer, param, options)
    if dtypes is None:
        raise OptionError(
            f"optimizer: got {class_name(optimizer)} before its first step, whose state cannot be "
            "predicted; take one step first"
        )
    return {
        f"{fqn}/{state}": torch.zeros((), dtype=dtype)
        if state in SCALAR_STATES
        else without_memory(param.detach(), dtype)
        for state, dtype in dtypes.items()
    }

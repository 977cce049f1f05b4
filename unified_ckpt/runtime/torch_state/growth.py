"""What elements that a checkpoint lacks hold in optimizer state that grows with its parameter."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.distributed.tensor import DTensor

from unified_ckpt.errors import MismatchError
from unified_ckpt.runtime.torch_state.optimizer_rules import MASTER_KEYS
from unified_ckpt.runtime.torch_state.optimizer_target import OptimizerTarget

# State that the first step of torch's optimizers, and of those that are made after them, makes of
# zeros.
_ZERO_INITIALIZED = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "prev",
    "ax",
)


def init_grown_state(target: OptimizerTarget, grown: Collection[str]) -> None:
    """Gives the tensors that were made for `grown`, as "fqn/state", what the optimizer has, or what
    its first step would make.

    State of the optimizer itself stays as it is. MismatchError for state whose first value is not
    known.
    """
    unsupported = []
    params = {
        target.names[id(p)]: (owner, p)
        for owner in target.optimizers
        for group in owner.param_groups
        for p in group["params"]
    }
    for key in sorted(grown):
        fqn, _, name = key.rpartition("/")
        optimizer, param = params[fqn]
        tensor, existing = target.tensors[key], optimizer.state.get(param, {}).get(name)
        if existing is tensor:
            continue
        if isinstance(existing, torch.Tensor) and existing.shape == tensor.shape:
            _local(tensor).copy_(_local(existing))
        elif name in MASTER_KEYS and tensor.is_floating_point():
            _local(tensor).copy_(_local(param))
        elif (
            name in _ZERO_INITIALIZED or name in MASTER_KEYS
        ):  # which as integers are what the parameter's rounding took off
            _local(tensor).zero_()
        else:
            unsupported.append(key)
    if unsupported:
        raise MismatchError(
            f"optimizer:{', '.join(unsupported)}: grows with its parameter, and what new elements begin with is not known; "
            "needed an optimizer that has this state: step it once before the load"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()

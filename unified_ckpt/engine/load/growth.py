"""Initializes new elements of optimizer state that grows with its parameter."""

from __future__ import annotations

from collections.abc import Collection

from unified_ckpt.errors import MismatchError
from unified_ckpt.runtime.torch_state.optimizer_rules import MASTER_KEYS, group_params
from unified_ckpt.runtime.torch_state.optimizer_target import OptimizerTarget
from unified_ckpt.runtime.torch_state.tensors import local_tensor

# State that the first step of torch's optimizers, and of similar ones, initializes to zero.
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
    """Initialize new tensors for `grown` ("fqn/state") as the optimizer's first step would.

    Those that the optimizer has already stay. MismatchError if the initial value is unknown.
    """
    unsupported = []
    params = {
        target.names[id(param)]: (optimizer, param)
        for optimizer, _, param in group_params(target.optimizers)
    }
    for key in sorted(grown):
        fqn, _, name = key.rpartition("/")
        optimizer, param = params[fqn]
        tensor, existing = target.tensors[key], optimizer.state.get(param, {}).get(name)
        if existing is tensor:
            continue
        local = local_tensor(tensor).detach()
        if name in MASTER_KEYS and tensor.is_floating_point():
            local.copy_(local_tensor(param).detach())
        elif name in _ZERO_INITIALIZED or name in MASTER_KEYS:
            local.zero_()  # an integer master is the remainder of rounding: none
        else:
            unsupported.append(key)
    if unsupported:
        raise MismatchError(
            f"optimizer:{', '.join(unsupported)}: grows with its parameter, and the initial value "
            "of new elements is unknown; step the optimizer once before the load"
        )

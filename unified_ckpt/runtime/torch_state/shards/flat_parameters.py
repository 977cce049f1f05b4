"""Finds which elements of which parameters FSDP1 holds on this rank.

FSDP1 concatenates the parameters of a wrapped module into one flat parameter, and cuts that into
equal ranges, one for each rank. Source: `FlatParamHandle` of torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.names import FLAT_PARAMETER, FSDP1_WRAPPER, strip_wrappers
from unified_ckpt.runtime.torch_state.shards.shards import Shards


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """The elements of one parameter in a flat parameter on this rank.

    `name`: without wrappers, for errors. `elements`: a view of the rank's range, of one dim; in the
    parameter's shape if it is not sharded. `shards`: where they are in the parameter; None if it is
    not sharded. `param`: what optimizers have, the parameter itself with `use_orig_params=True`,
    else the flat one. State of `param` has `state_numel` elements, these from `offset` on.
    """

    name: str
    elements: torch.Tensor
    shards: Shards | None
    param: torch.Tensor
    offset: int
    state_numel: int

    @property
    def is_of_flat_param(self) -> bool:
        """Whether optimizers have the flat parameter, with the state of several parameters."""
        return getattr(self.param, "_is_flat_param", False)

    def is_elementwise(self, state: torch.Tensor) -> bool:
        """Whether state of `param` has its elements, as moments do, and step counts do not."""
        shape = (self.state_numel,) if self.is_of_flat_param else self.elements.shape
        return state.shape == shape

    def of(self, state: torch.Tensor) -> torch.Tensor:
        """Return the elements of elementwise state of `param`; an alias."""
        shape, numel = self.elements.shape, self.elements.numel()
        if state.shape == shape:
            return state
        return state.view(-1)[self.offset : self.offset + numel].view(shape)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 flattens this parameter, or has flattened others into it."""
    return getattr(tensor, "_fsdp_flattened", False)


def has_flat_parameters(module: object) -> TypeGuard[nn.Module]:
    """Whether it is a module in which FSDP1 wraps some module."""
    return isinstance(module, nn.Module) and any(True for _ in _units(module))


def flat_slices(module: nn.Module) -> dict[str, FlatSlice]:
    """Return this rank's elements of parameters that FSDP1 flattens, by name with wrappers.

    Names of a shared parameter have one value. Frees what a forward pass gathered and no backward
    pass freed. Without communication or copies. LayoutError for parameters that are gathered by
    `summon_full_params`, sharded in other ways too, or not in row-major memory.
    """
    slices, known = dict[str, FlatSlice](), dict[int, dict[str, FlatSlice]]()
    for name, unit in _units(module):
        prefix = f"{name}." if name else ""
        if id(unit) not in known:
            known[id(unit)] = dict(_slices(prefix, unit))
        slices |= {f"{prefix}{FSDP1_WRAPPER}{fqn}": each for fqn, each in known[id(unit)].items()}
    return slices


def flat_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return what `state_dict(keep_vars=True)` does, with a `FlatSlice` for each parameter that
    FSDP1 flattens. Its own `state_dict` would gather these.

    LayoutError as in `flat_slices`, and for a hook that would change the state dict.
    """
    slices = flat_slices(module)
    flattened = set(map(strip_wrappers, slices))
    state = dict[str, Any]()
    for name, inner in module.named_modules(remove_duplicate=False):
        prefix, own = f"{name}." if name else "", dict[str, Any]()
        _check_hooks(strip_wrappers(prefix), inner)
        inner._save_to_state_dict(own, prefix, True)
        for key, value in own.items():
            is_flat = key.rpartition(".")[2] == FLAT_PARAMETER
            if not is_flat and strip_wrappers(key) not in flattened:
                state[key] = value
    return state | slices


def _units(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that FSDP1 wraps with parameters of their own, under all names."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, inner in module.named_modules(remove_duplicate=False):
        is_unit = isinstance(inner, FullyShardedDataParallel)
        if is_unit and getattr(inner, "_handle", None) is not None:
            yield name, inner


def _slices(prefix: str, unit: nn.Module) -> Iterator[tuple[str, FlatSlice]]:
    """Yield the parameters of a unit by name in the wrapped module, then other names of these."""
    handle: Any = unit._handle
    _free_gathered(prefix, unit, handle)
    flat = handle.flat_param
    local = getattr(flat, "_local_shard", flat).detach()  # it has none before the first forward
    slices = dict[str, FlatSlice]()
    params = flat._params or [flat] * len(flat._fqns)
    infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, params, strict=True)
    for i, (fqn, shape, info, param) in enumerate(infos):
        name = strip_wrappers(prefix + fqn)
        if flat._param_extensions[i] is not None:
            raise LayoutError(
                f"{name}: got a DTensor that FSDP1 flattens, expected a plain parameter; use "
                "fully_shard (FSDP2) with tensor parallelism"
            )
        if not flat._contiguities[i] and shape.numel():
            raise LayoutError(
                f"{name}: got a parameter that FSDP1 flattens in another order than row-major, "
                "expected a contiguous one; call contiguous() before wrapping the module"
            )
        start, offset, numel = (
            (info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard)
            if info.in_shard
            else (0, 0, 0)
        )
        elements, shards = local[offset : offset + numel], None
        if handle.uses_sharded_strategy:
            shards = Shards.flat(elements, shape, start)
        else:
            elements = elements.view(shape)
        place = (offset, local.numel()) if param is flat else (0, numel)
        slices[fqn] = FlatSlice(name, elements, shards, param, *place)
    yield from slices.items()
    for info in flat._shared_param_infos:
        alias = ".".join(filter(None, (info.module_name, info.param_name)))
        yield alias, slices[".".join(filter(None, (info.prim_module_name, info.prim_param_name)))]


def _free_gathered(prefix: str, unit: Any, handle: Any) -> None:
    """Free gathered parameters, so that the next forward pass gathers what a load has changed.

    Takes over parameters whose memory the caller has replaced, as a forward pass does.
    """
    from torch.distributed.fsdp._common_utils import TrainingState
    from torch.distributed.fsdp._runtime_utils import _reshard

    if unit.training_state == TrainingState.SUMMON_FULL_PARAMS:
        raise LayoutError(
            f"{strip_wrappers(prefix) or 'model'}: got an FSDP module inside of "
            "summon_full_params, which changes its parameters at the end; leave the context first"
        )
    if unit.training_state != TrainingState.IDLE:
        return  # an exception ended a forward or a backward pass
    gathered = getattr(handle.flat_param, "_full_param_padded", None)
    if handle.uses_sharded_strategy and gathered is not None and gathered.untyped_storage().size():
        _reshard(unit, handle, True)
    if handle._use_orig_params:
        handle._writeback_orig_params()


def _check_hooks(prefix: str, module: nn.Module) -> None:
    for hook in (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()):
        function = getattr(hook, "func", hook)
        owner = str(getattr(function, "__module__", None) or type(function).__module__)
        if not owner.startswith("torch.distributed."):
            raise LayoutError(
                f"{prefix or 'model'}: got a state_dict hook of {owner} in a module with flat "
                "parameters of FSDP1, which it would see cut; use fully_shard (FSDP2), or remove "
                "the hook"
            )

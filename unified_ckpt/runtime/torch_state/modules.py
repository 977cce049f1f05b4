"""Modules by fully qualified name: wrappers' prefixes stripped, tied weights found, extra state
apart. Moves no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.tensors import check_tensors

Model = nn.Module | Sequence[nn.Module] | Mapping[str, torch.Tensor]
_WRAPPER_NAMES = (
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
)  # torch.compile, activation checkpointing
_FLAT_PARAM = "_flat_param"  # FSDP1
_EXTRA_STATE = "_extra_state"


@dataclass(slots=True)
class FlatModel:
    """`tensors`: the caller's own, by name, each stored tensor once. `aliases`: other name ->
    stored name. `rank0_buffers`: buffers of DistributedDataParallel on all ranks but the first of
    its group, from which they are overwritten before each forward pass.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra_state: dict[str, Any] = field(default_factory=dict)
    extra_owners: dict[str, nn.Module] = field(default_factory=dict)
    rank0_buffers: set[str] = field(default_factory=set)

    def param_names(self) -> dict[int, str]:
        """id of a parameter -> its stored name."""
        return {id(tensor): fqn for fqn, tensor in self.tensors.items()}


def flatten_model(model: Model | None, argument: str = "model") -> FlatModel:
    """Every tensor of the model. LayoutError naming what cannot be told. `argument`: the caller's
    name for it.
    """
    flat = FlatModel()
    if model is None:
        return flat
    names_by_memory: dict[object, str] = {}
    if isinstance(model, Mapping):
        check_tensors(model, argument)
        for fqn, tensor in model.items():
            _add(flat, names_by_memory, fqn, tensor)
        return flat
    modules: Sequence[object] = model if isinstance(model, Sequence) else [model]
    for module in modules:
        if not isinstance(module, nn.Module):
            type_name = type(module).__name__
            raise LayoutError(
                f"{argument}: got a {type_name}, expected an nn.Module, a list of them, or a dict of tensors"
            )
        _flatten_module(flat, names_by_memory, module)
    return flat


def _flatten_module(flat: FlatModel, names_by_memory: dict[object, str], module: nn.Module) -> None:
    # state_dict() first: it puts FSDP2's parameters back in shards after a forward pass without
    # backward.
    state = module.state_dict(keep_vars=True)
    wrapper_prefixes = _wrapper_prefixes(module)
    for raw, value in state.items():
        fqn = clean_name(raw, wrapper_prefixes)
        if _FLAT_PARAM in raw:
            raise LayoutError(f"{fqn}: is a flat parameter of FSDP1; needed fully_shard (FSDP2)")
        if is_extra_state(fqn):
            flat.extra_state[fqn] = value
        elif isinstance(value, torch.Tensor):
            _add(flat, names_by_memory, fqn, value)
        else:
            raise LayoutError(
                f"{fqn}: the module's state holds a {type(value).__name__}; needed a tensor, or get_extra_state"
            )
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            raw = f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE
            flat.extra_owners[clean_name(raw, wrapper_prefixes)] = inner
    flat.rank0_buffers |= {clean_name(raw, wrapper_prefixes) for raw in _rank0_buffers(module)}
    _rename_tied(flat, module)


def _rank0_buffers(module: nn.Module) -> Iterator[str]:
    """Source: DistributedDataParallel's `broadcast_buffers`, which sends them from rank 0 of its
    group.
    """
    for prefix, inner in module.named_modules():
        if (
            isinstance(inner, DistributedDataParallel)
            and inner.broadcast_buffers
            and inner.process_group.rank() != 0
        ):
            yield from (f"{prefix}.{name}" if prefix else name for name, _ in inner.named_buffers())


def _wrapper_prefixes(module: nn.Module) -> list[str]:
    """Raw name prefixes whose `module.` is that of a wrapper, longest first."""
    kinds = (DistributedDataParallel, DataParallel)
    names = [name for name, inner in module.named_modules() if isinstance(inner, kinds)]
    return sorted(
        (f"{name}.module." if name else "module." for name in names), key=len, reverse=True
    )


def clean_name(raw: str, wrapper_prefixes: Sequence[str]) -> str:
    """A name without the prefixes that wrappers add."""
    for prefix in wrapper_prefixes:
        if raw.startswith(prefix):
            raw = prefix.removesuffix("module.") + raw[len(prefix) :]
    return strip_wrappers(raw)


def is_extra_state(name: str) -> bool:
    """Whether what a module's `get_extra_state` gave stands under this name of a state dict; it may
    be a tensor.
    """
    return name.rpartition(".")[2] == _EXTRA_STATE


def strip_wrappers(name: str) -> str:
    """A name without what torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def _add(
    flat: FlatModel, names_by_memory: dict[object, str], fqn: str, tensor: torch.Tensor
) -> None:
    if is_lazy(tensor):
        raise LayoutError(f"{fqn}: has no shape before the model's first forward pass; needed one")
    if fqn in flat.tensors or fqn in flat.aliases:
        if flat.tensors.get(flat.aliases.get(fqn, fqn)) is tensor:
            return
        raise LayoutError(
            f"{fqn}: two modules of the model have this name for different tensors; needed one name for each"
        )
    stored_name = names_by_memory.setdefault(_memory_key(tensor), fqn)
    if stored_name == fqn:
        flat.tensors[fqn] = tensor
    else:
        flat.aliases[fqn] = stored_name


def _memory_key(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are one piece of memory seen in one way."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if (
        local.layout is not torch.strided
        or local.is_nested
        or local.numel() == 0
        or local.device.type == "meta"
        or type(local) not in (torch.Tensor, nn.Parameter)
    ):
        return id(tensor)
    signs = local.is_conj(), local.is_neg()
    return (
        local.device,
        local.data_ptr(),
        tuple(local.shape),
        local.stride(),
        local.dtype,
        signs,
        tuple(tensor.shape),
    )


def _rename_tied(flat: FlatModel, module: nn.Module) -> None:
    """A stage that holds only the second name of a weight that transformers ties stores it under
    the first, like the other stage.
    """
    tied = getattr(module, "_tied_weights_keys", None)
    if not isinstance(tied, Mapping) or not getattr(
        getattr(module, "config", None), "tie_word_embeddings", False
    ):
        return
    for alias, target in tied.items():
        if alias in flat.tensors and target not in flat.tensors and target not in flat.aliases:
            flat.tensors[target] = flat.tensors.pop(alias)
            flat.aliases[alias] = target

"""Flattens modules by fully qualified name, without wrappers; finds tied weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.names import (
    EXTRA_STATE,
    WRAPPER_NAMES,
    is_extra_state,
    strip_wrappers,
)
from unified_ckpt.runtime.torch_state.shards.carriers import (
    address_of,
    check_tensors,
    is_same_memory,
    named_shards,
)
from unified_ckpt.runtime.torch_state.shards.flat_parameters import (
    FlatSlice,
    flat_state_dict,
    has_flat_parameters,
)
from unified_ckpt.runtime.torch_state.shards.shards import Shards, capture_tensors
from unified_ckpt.runtime.torch_state.tensors import is_dense

_LOAD = nn.Module._load_from_state_dict


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """Modules with their `live_state_dict` of one time; None in place of one for a plain dict."""

    states: Sequence[tuple[nn.Module | None, dict[str, Any]]]


ModelArgument = (
    nn.Module | Sequence[nn.Module] | Mapping[str, torch.Tensor | Shards] | CapturedModel
)


@dataclass(slots=True)
class FlatModel:
    """A flattened model.

    `tensors`: the caller's own tensors by name, each stored tensor once. `shards`: boxes of others.
    `slices`: of parameters that FSDP1 flattens, by id of what optimizers have. `parameters`: dense
    ones that `state_dict` leaves out or copies. `aliases`: other name -> stored name.
    `skipped_ddp_buffers`: buffers of DistributedDataParallel that rank 0 of its group broadcasts
    before each forward pass, and saves for this rank. `ddp_world`: the ranks of its largest group.
    `extra_owners`: the modules that take extra state; None for a dict of tensors.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, Shards] = field(default_factory=dict)
    slices: dict[int, list[FlatSlice]] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra_state: dict[str, Any] = field(default_factory=dict)
    extra_owners: dict[str, nn.Module] | None = None
    skipped_ddp_buffers: set[str] = field(default_factory=set)
    ddp_world: int = 1

    @property
    def stored(self) -> dict[str, torch.Tensor | Shards]:
        """All that a checkpoint stores, by name: tensors, and boxes of others."""
        return {**self.tensors, **self.shards}

    def param_names(self) -> dict[int, str]:
        """Return the names by tensor id: stored ones, and those of other parameters."""
        shards = ((fqn, each.tensor) for fqn, each in self.shards.items())
        items = (*shards, *self.parameters.items(), *self.tensors.items())
        return {id(tensor): fqn for fqn, tensor in items}


def flatten_model(model: ModelArgument | None, argument: str = "model") -> FlatModel:
    """Return every tensor of the model. LayoutError, naming the tensor, for unsupported ones.

    `argument`: the caller's name of the model, for errors.
    """
    flat, names_by_memory = FlatModel(), dict[object, str]()
    if model is None:
        return flat
    for module, state in _collect(model, argument).states:
        if module is not None:
            _flatten_module(flat, names_by_memory, module, state)
            continue
        others = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor | Shards)}
        flat.extra_state |= {k: v for k, v in others.items() if is_extra_state(str(k))}
        tensors = {k: v for k, v in state.items() if k not in flat.extra_state}
        check_tensors(tensors, argument)
        for fqn, tensor in tensors.items():
            if isinstance(tensor, Shards):
                flat.shards[fqn] = tensor
            else:
                _add(flat, names_by_memory, fqn, tensor)
    flat.aliases = resolve_alias_chains(flat.aliases)
    return flat


def computed_names(model: ModelArgument | None, flat: FlatModel, argument: str) -> list[str]:
    """Return the tensors that a `state_dict` computes, as packed weights: no load fills them."""
    if model is None or isinstance(model, Mapping | CapturedModel):
        return []
    tensors = (t for module in _modules(model) for t in (*module.parameters(), *module.buffers()))
    registered = {id(tensor) for tensor in tensors}
    others = [fqn for fqn, tensor in flat.tensors.items() if id(tensor) not in registered]
    again = flatten_model(model, argument).tensors if others else {}
    return [fqn for fqn in others if not is_same_memory(flat.tensors[fqn], again[fqn])]


@dataclass(frozen=True, slots=True)
class LoadMethod:
    """A module whose `load_state_dict` does more than copy tensors of the same name.

    `module`: without wrappers. `state`: its `state_dict()`. `names`: key in it -> stored name.
    `prefixes`: of the stored names that the module may rename, compute or do without; "" for all.
    `key_prefixes`: stored prefix of each of its modules -> that of keys in `state`.
    """

    module: nn.Module
    state: Mapping[str, Any]
    names: Mapping[str, str]
    prefixes: tuple[str, ...]
    key_prefixes: Mapping[str, str]

    def key(self, fqn: str) -> str:
        """Return the key in a state dict of a stored name that no key of `state` has."""
        prefixes = (fqn[: i + 1] for i in range(len(fqn) - 1, -1, -1) if fqn[i] == ".")
        prefix = next(filter(self.key_prefixes.__contains__, prefixes), "")
        return self.key_prefixes[prefix] + fqn[len(prefix) :]


def load_methods(
    model: ModelArgument | None, flat: FlatModel, computed: Collection[str]
) -> list[LoadMethod]:
    """Return the modules to load by their own `load_state_dict`; all others are filled in place.

    `computed`: of `computed_names`. Torch copies into registered tensors of these names.
    """
    if model is None or isinstance(model, Mapping | CapturedModel):
        return []
    # A method would be passed the elements that FSDP1 leaves this rank.
    modules = (module for module in _modules(model) if not has_flat_parameters(module))
    methods = (_load_method(module, flat, computed) for module in modules)
    return [method for method in methods if method is not None]


def _load_method(
    module: nn.Module, flat: FlatModel, computed: Collection[str]
) -> LoadMethod | None:
    while (inner := _wrapped(module)) is not None:
        module = inner
    modules = dict(module.named_modules(remove_duplicate=False))
    prefixes = [f"{name}." if name else "" for name in modules]
    customized = [
        prefix
        for prefix, inner in zip(prefixes, modules.values(), strict=True)
        if _customizes_load(inner)
    ]
    if not all(map(_is_of_torch, (module.state_dict, module.load_state_dict))):
        customized = [""]
    if not customized and not computed:
        return None
    wrapper_prefixes = _wrapper_prefixes(modules)
    tensors = (*module.named_parameters(), *module.named_buffers()) if computed else ()
    copied = {clean_name(name, wrapper_prefixes) for name, _ in tensors}.intersection(computed)
    if not customized and not copied:
        return None
    state = live_state_dict(module)
    names = {key: clean_name(key, wrapper_prefixes) for key in state}
    # Activation checkpointing leaves its name out of keys, and inserts it in a hook.
    keys = {prefix: prefix.replace(WRAPPER_NAMES[1], "") for prefix in prefixes}
    return LoadMethod(
        module,
        state,
        {key: flat.aliases.get(name, name) for key, name in names.items()},
        tuple(sorted(copied | {clean_name(prefix, wrapper_prefixes) for prefix in customized})),
        {clean_name(prefix, wrapper_prefixes): key for prefix, key in keys.items()},
    )


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module inside of a wrapper of torch, else None."""
    is_wrapper = isinstance(module, DistributedDataParallel | DataParallel)
    name = "module" if is_wrapper else WRAPPER_NAMES[0].removesuffix(".")
    inner = module._modules.get(name)
    return inner if is_wrapper or type(module).__module__.startswith("torch.") else None


def _customizes_load(module: nn.Module) -> bool:
    """Whether a module changes how it is loaded, as part of another: by a method or a hook."""
    pre_hooks, post_hooks = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    if not pre_hooks and not post_hooks and type(module)._load_from_state_dict is _LOAD:
        return False  # most modules
    functions = (module._load_from_state_dict, *pre_hooks.values(), *post_hooks.values())
    return not all(map(_is_of_torch, functions))


def _is_of_torch(function: Any) -> bool:
    """Whether a method or hook is that of torch's layers and wrappers, which keep tensors as saved.

    Those of `torch.nn.utils` and of quantized layers rename and pack them.
    """
    function = getattr(function, "hook", function)  # as `Module` holds hooks
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).startswith(("torch.nn.modules.", "torch.distributed."))


def _modules(model: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    return model if isinstance(model, Sequence) else [model]


def resolve_alias_chains(aliases: Mapping[str, str]) -> dict[str, str]:
    """Return aliases that name stored tensors, from such that may name other aliases.

    Ranks that store two tied tensors under each other's names have two stored tensors.
    """
    roots = {}
    for alias, stored in aliases.items():
        passed = {alias}
        while stored in aliases and stored not in passed:
            passed.add(stored)
            stored = aliases[stored]
        if stored != alias:
            roots[alias] = stored
    return roots


def capture_model(model: ModelArgument, argument: str) -> CapturedModel:
    """Return the model as it is now: tensors by reference, extra state by value."""
    captured = _collect(model, argument)
    for _, state in captured.states:
        state.update({raw: copy.deepcopy(state[raw]) for raw in filter(is_extra_state, state)})
    return captured


def without_buffers(module: nn.Module) -> CapturedModel:
    """Return the module with parameters and DTensors. One rank saves others, such as statistics."""
    state = live_state_dict(module)
    kept = {
        raw: value
        for raw, value in state.items()
        if not isinstance(value, torch.Tensor) or is_parameter_or_dtensor(value)
    }
    return CapturedModel([(module, kept)])


def is_parameter_or_dtensor(tensor: object) -> bool:
    """Whether all ranks hold the tensor jointly, or hold equal copies."""
    return isinstance(tensor, nn.Parameter | DTensor)


def _collect(model: ModelArgument, argument: str) -> CapturedModel:
    """Return the state of each module now. LayoutError for other types."""
    if isinstance(model, CapturedModel):
        return model
    if isinstance(model, Mapping):
        return CapturedModel([(None, capture_tensors(model))])
    modules: Sequence[object] = model if isinstance(model, Sequence) else [model]
    states = []
    for module in modules:
        if not isinstance(module, nn.Module):
            raise LayoutError(
                f"{argument}: got a {type(module).__name__}, expected an nn.Module, a list of "
                "them, or a dict of tensors"
            )
        # Also reshards FSDP2's parameters after a forward pass without backward.
        states.append((module, live_state_dict(module)))
    return CapturedModel(states)


def live_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return `state_dict()`, with parameters unless its class copies; or FSDP1's flat state."""
    if has_flat_parameters(module):
        return flat_state_dict(module)
    method: Any = module.state_dict
    try:
        inspect.signature(method).bind(keep_vars=True)
    except TypeError:  # an override that takes no arguments, as trainers pass none
        state: dict[str, Any] = method()
    else:
        state = method(keep_vars=True)
    return state


def _flatten_module(
    flat: FlatModel,
    names_by_memory: dict[object, str],
    module: nn.Module,
    state: Mapping[str, Any],
) -> None:
    # A shared module has several names, each with its extra state.
    modules = dict(module.named_modules(remove_duplicate=False))
    wrapper_prefixes = _wrapper_prefixes(modules)
    for raw, value in state.items():
        fqn = clean_name(raw, wrapper_prefixes)
        if is_extra_state(fqn):
            flat.extra_state[fqn] = value
        elif isinstance(value, FlatSlice):
            _add_slice(flat, names_by_memory, fqn, value)
        elif isinstance(value, torch.Tensor):
            _add(flat, names_by_memory, fqn, value)
        else:
            raise LayoutError(
                f"{fqn}: got a {type(value).__name__} in the module's state, expected a tensor; "
                "store other values with get_extra_state"
            )
    flat.extra_owners = flat.extra_owners or {}
    ids = {*map(id, state.values()), *flat.slices}
    for name, inner in modules.items():
        prefix = f"{name}." if name else ""
        if type(inner).set_extra_state is not nn.Module.set_extra_state:
            flat.extra_owners[clean_name(prefix + EXTRA_STATE, wrapper_prefixes)] = inner
        if isinstance(inner, DistributedDataParallel):
            flat.ddp_world = max(flat.ddp_world, inner.process_group.size())
            if inner.broadcast_buffers and inner.process_group.rank() != 0:
                buffers = (prefix + buffer for buffer, _ in inner.named_buffers())
                flat.skipped_ddp_buffers.update(clean_name(b, wrapper_prefixes) for b in buffers)
        for key, parameter in inner._parameters.items():
            if parameter is not None and id(parameter) not in ids and is_dense(parameter):
                flat.parameters[clean_name(prefix + key, wrapper_prefixes)] = parameter
                ids.add(id(parameter))
    _rename_tied(flat, module)


def _wrapper_prefixes(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return raw name prefixes that end with a wrapper's `module.`, longest first."""
    kinds = (DistributedDataParallel, DataParallel)
    names = [name for name, inner in modules.items() if isinstance(inner, kinds)]
    prefixes = (f"{name}.module." if name else "module." for name in names)
    return sorted(prefixes, key=len, reverse=True)


def clean_name(raw: str, wrapper_prefixes: Sequence[str]) -> str:
    """Return a name without the prefixes of wrappers."""
    for prefix in wrapper_prefixes:
        if raw.startswith(prefix):
            raw = prefix.removesuffix("module.") + raw[len(prefix) :]
    return strip_wrappers(raw)


def _add(
    flat: FlatModel, names_by_memory: dict[object, str], fqn: str, tensor: torch.Tensor
) -> None:
    shards = named_shards(fqn, tensor)
    if is_lazy(tensor):
        raise LayoutError(f"{fqn}: has no shape yet; run the model's first forward pass before")
    if flat.tensors.get(flat.aliases.get(fqn, fqn)) is tensor:
        return
    if fqn in flat.tensors or fqn in flat.shards or fqn in flat.aliases:
        raise LayoutError(
            f"{fqn}: two modules of the model use this name for different tensors; rename one"
        )
    stored_name = names_by_memory.setdefault(address_of(tensor, shards), fqn)
    if stored_name == fqn:
        flat.tensors[fqn] = tensor
    else:
        flat.aliases[fqn] = stored_name


def _add_slice(flat: FlatModel, names: dict[object, str], fqn: str, each: FlatSlice) -> None:
    stored_name = names.setdefault(id(each), fqn)
    if stored_name != fqn:
        flat.aliases[fqn] = stored_name
        return
    flat.slices.setdefault(id(each.param), []).append(each)
    if each.shards is None:
        _add(flat, names, fqn, each.elements)
    else:
        flat.shards[fqn] = each.shards


def _rename_tied(flat: FlatModel, module: nn.Module) -> None:
    """Store a tied weight under its first name on a pipeline stage that has only the second.

    Names come from transformers' `_tied_weights_keys`; the other stage stores the first name too.
    """
    tied, config = getattr(module, "_tied_weights_keys", None), getattr(module, "config", None)
    if not isinstance(tied, Mapping) or not getattr(config, "tie_word_embeddings", False):
        return
    for alias, target in tied.items():
        if alias in flat.tensors and target not in flat.tensors and target not in flat.aliases:
            flat.tensors[target] = flat.tensors.pop(alias)
            flat.aliases[alias] = target

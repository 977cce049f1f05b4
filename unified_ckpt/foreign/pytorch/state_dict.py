"""Opens files of `torch.save` with a state dict.

The state dict may be bare or inside a training script's dict. Tensors are mapped, not copied;
other plain values become `extra`. Optimizer state by position gets its names from the target
optimizer, or from the order of the model's tensors if that is unambiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.engine.source.protocol import Order, Source, SourceMetadata
from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.foreign.files.parsing import expect_dict
from unified_ckpt.foreign.pytorch.exported import ENTRIES, EXPORT_KEY, restore_entries
from unified_ckpt.foreign.pytorch.optimizer_groups import (
    SavedGroup,
    archived_tensor,
    is_optimizer_state,
    other_entries,
    parse_groups,
)
from unified_ckpt.foreign.pytorch.optimizer_names import (
    DDP_PREFIX,
    ForeignCheckpoint,
    exported_optimizer,
    with_optimizer_names,
)
from unified_ckpt.foreign.restricted_pickle.archive import ArchivedTensor
from unified_ckpt.foreign.restricted_pickle.load import read_torch
from unified_ckpt.foreign.restricted_pickle.placeholders import NAMESPACE_CLASSES, to_plain
from unified_ckpt.foreign.transformers_models import config_order
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.names import is_extra_state, strip_wrappers
from unified_ckpt.views.shards import ShardedTensor

# Keys under which scripts store the model, most likely first.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim", "optimizers")
_LIGHTNING_KEY = "pytorch-lightning_version"
_BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")  # of norm layers
_STEP_KEYS = ("step", "global_step", "iteration")


@dataclass(frozen=True, slots=True)
class ParsedStateDict:
    """The content of a state dict.

    `aliases`: tied name -> stored name, for tensors that share memory. `extra_states`: of modules,
    by name. `values`: everything else.
    """

    tensors: dict[Key, ShardedTensor]
    aliases: dict[str, str]
    extra_states: dict[str, Any]
    values: dict[str, Any]


def open_torch_file(path: str, options: SourceOptions) -> Source:
    """Open a file of `torch.save`, including Lightning's.

    FormatError if it is damaged, requests classes, or holds no model state dict.
    """
    content = expect_dict(
        read_torch(path, placeholders=NAMESPACE_CLASSES),
        path,
        "a state dict or a dict that has one",
    )
    model_key = _model_key(path, content)
    weights = content[model_key] if model_key is not None else content
    if not _is_state_dict(weights):
        keys = ", ".join(sorted(map(str, content))[:10])
        raise FormatError(
            f"{path}: no state dict: got the keys {keys or 'of an empty dict'}, expected tensors, "
            f"alone or under one of {', '.join(_MODEL_KEYS)}"
        )
    model = parse_state_dict(path, weights)
    tensors = model.tensors
    aliases: dict[str, Mapping[str, str]] = {MODEL: model.aliases}
    groups: list[SavedGroup] = []
    rest: dict[Any, Any] = {}
    optimizer = SourceMetadata()
    if model_key is not None:
        rest = {key: value for key, value in content.items() if key != model_key}
        groups = list(_param_groups(path, rest))
        for part, parsed in _other_parts(path, rest):
            tensors |= parsed.tensors
            aliases[part] = parsed.aliases
            if part_values := parsed.extra_states | parsed.values:
                rest[part] = part_values
        if EXPORT_KEY in content:
            states, optimizer = exported_optimizer(path, groups, rest.pop(OPTIMIZER, {}))
            tensors, groups = tensors | states, []
    step = next((rest[name] for name in _STEP_KEYS if isinstance(rest.get(name), int)), None)
    if model_key is None:
        rest = model.values
    elif model.values:
        rest[model_key] = model.values
    file_metadata = SourceMetadata(
        step=step,
        extra=to_plain(rest) or None,
        modules=to_plain(model.extra_states),
        groups=optimizer.groups,
        scalars=optimizer.scalars,
    )
    metadata, rank_extra = restore_entries(file_metadata)
    checkpoint = ForeignCheckpoint(
        path,
        "lightning" if _LIGHTNING_KEY in content else "torch",
        tensors,
        aliases=aliases,
        metadata=metadata,
        indexed_groups=groups,
        rank_extra=rank_extra,
    )
    # A state dict lists parameters in the order of `Module.parameters()`, with buffers in between.
    parameters = [
        (name, tensor.spec.shape)
        for (part, name), tensor in tensors.items()
        if part == MODEL and name.rpartition(".")[2] not in _BUFFER_NAMES
    ]
    orders: dict[str, Callable[[], Order]] = {
        "the order of the file's tensors": lambda: [parameters]
    }
    if options.config is not None:
        orders[f"the model of {options.config}"] = partial(
            config_order, options.config, len(groups)
        )
    return with_optimizer_names(checkpoint, options, stored_orders=orders)


def _model_key(path: str, content: Mapping[Any, Any]) -> str | None:
    """Return the key of the model; None if the file is its state dict itself.

    FormatError if two keys could be the model. Lightning's is known.
    """
    if EXPORT_KEY in content:
        return MODEL
    candidates = [name for name in _MODEL_KEYS if _is_state_dict(content.get(name))]
    if _LIGHTNING_KEY in content and "state_dict" in candidates:
        return "state_dict"
    if len(candidates) > 1:
        problem = f"{path}: expected one state dict that may be the model, got several"
        raise FormatError(format_list(problem, candidates))
    return candidates[0] if candidates else None


def _param_groups(path: str, rest: dict[Any, Any]) -> Iterator[SavedGroup]:
    """Take the optimizers out of `rest`, except what is beside their groups and state.

    They are under the usual keys, otherwise the only one is under any key. Several under unusual
    keys, as of a generator and a critic, stay plain values.
    """
    usual = [key for key in _OPTIMIZER_KEYS if _has_optimizers(rest.get(key))]
    others = [key for key, value in rest.items() if _has_optimizers(value)]
    for key in usual or (others if len(others) == 1 else []):
        value = rest.pop(key)
        state_dicts = value if isinstance(value, list) else [value]
        for state_dict in state_dicts:
            yield from parse_groups(path, state_dict)
        if any(beside := list(map(other_entries, state_dicts))):
            rest[key] = beside


def _other_parts(path: str, rest: dict[Any, Any]) -> Iterator[tuple[str, ParsedStateDict]]:
    """Take further parts out of `rest`: all state dicts of an export, else master weights."""
    for part in rest.keys() - ENTRIES if EXPORT_KEY in rest else [MASTER]:
        if _is_state_dict(rest.get(part)):
            yield part, parse_state_dict(path, rest.pop(part), part=part)


def _has_optimizers(value: Any) -> bool:
    """Return whether the value is an optimizer's state dict, or a list of them."""
    return is_optimizer_state(value) or (
        isinstance(value, list) and bool(value) and all(map(is_optimizer_state, value))
    )


def _is_state_dict(content: Any) -> bool:
    """Return whether the value maps names to tensors; some frameworks add a few plain values."""
    return (
        isinstance(content, Mapping)
        and bool(content)
        and any(isinstance(value, ArchivedTensor) for value in content.values())
    )


def parse_state_dict(
    path: str, state_dict: Any, *, part: str = MODEL, without_aliases: bool = False
) -> ParsedStateDict:
    """Return the content of a state dict, with its tensors under `part`.

    `without_aliases`: every name is a tensor of its own, even if it shares memory.
    """
    if not _is_state_dict(state_dict):
        raise FormatError(f"{path}: no state dict; expected tensors by name")
    plain_names = _plain_names(state_dict)
    extra_states = {
        plain_names[name]: value for name, value in state_dict.items() if is_extra_state(str(name))
    }
    state_dict = {
        name: value for name, value in state_dict.items() if not is_extra_state(str(name))
    }
    raise_if_any(
        FormatError,
        f"{path}: got nested tensors, which would be left out",
        sorted(str(name) for name, value in state_dict.items() if _holds_tensors(value)),
    )
    tensors: dict[Key, ShardedTensor] = {}
    seen_names: set[str] = set()
    names_by_memory: dict[object, str] = {}
    aliases = {}
    archived = {
        name: value for name, value in state_dict.items() if isinstance(value, ArchivedTensor)
    }
    for stored_name, tensor in archived.items():
        name = plain_names[stored_name]
        if name in seen_names:
            raise FormatError(
                f"{path}: {name}: two tensors have this name without wrapper prefixes, "
                "expected unique names"
            )
        seen_names.add(name)
        shares_memory = prod(tensor.shape) and not without_aliases
        memory: object = tensor.memory if shares_memory else name
        first_name = names_by_memory.setdefault(memory, name)
        if first_name != name:
            aliases[name] = first_name
            continue
        with error_prefix(f"{path}: {name}"):
            tensors[part, name] = archived_tensor(tensor, path)
    values = {str(name): value for name, value in state_dict.items() if name not in archived}
    return ParsedStateDict(tensors, aliases, extra_states, values)


def _holds_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list | tuple) and any(
        isinstance(item, ArchivedTensor) or _holds_tensors(item) for item in items
    )


def _plain_names(state_dict: Mapping[Any, Any]) -> dict[Any, str]:
    """Return stored name -> name without wrapper prefixes, for tensors and extra state.

    `module.` is DistributedDataParallel's only if all names have it; otherwise it is a submodule.
    """
    names = {
        stored_name: strip_wrappers(str(stored_name))
        for stored_name, value in state_dict.items()
        if isinstance(value, ArchivedTensor) or is_extra_state(str(stored_name))
    }
    if not all(name.startswith(DDP_PREFIX) for name in names.values()):
        return names
    return {stored_name: name.removeprefix(DDP_PREFIX) for stored_name, name in names.items()}

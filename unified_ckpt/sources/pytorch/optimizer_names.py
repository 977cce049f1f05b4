"""Names for optimizer state that is by position. Who knows the order: the caller, the file, the
target's optimizer, the model's config.

How state could go to the wrong parameter: the order is another one and the shapes are alike. So
each order is held against the shape of every entry; all who know one must agree; and where entries
could be those of several parameters, nothing is named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.by_position import IndexedOptimizerSource, Order
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.modules import strip_wrappers
from unified_ckpt.views.shards import ShardedSource, ShardedTensor, whole_tensor

Shape = tuple[int, ...]
DDP_PREFIX = "module."  # before every name of a model in DistributedDataParallel
_ORDER_OPTION = "SourceOptions(optimizer_order=[[names of group 0, in its order], ...])"
_REMEDY = f"pass an optimizer made as that one was to uc.load, the model's config.json as `config`, or {_ORDER_OPTION}"


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A param group as it was saved: `state` of each parameter in its order. `names`: of these,
    where the file has them.
    """

    options: Mapping[str, Any]
    state: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...] | None


@dataclass(slots=True)
class ForeignCheckpoint:
    """What a path holds. `indexed_groups`: optimizer state by position, the groups of all
    optimizers one after another; `optimizer_paths`: its files.
    """

    root: str
    format: str
    tensors: dict[Key, ShardedTensor] = field(default_factory=dict)
    aliases: dict[str, Mapping[str, str]] = field(default_factory=dict)
    metadata: SourceMetadata = field(default_factory=SourceMetadata)
    indexed_groups: list[SavedGroup] = field(default_factory=list)
    optimizer_paths: list[str] = field(default_factory=list)
    rank_extra: Callable[[int], Any] = lambda _: None


@dataclass(frozen=True, slots=True)
class _NamedState:
    """Optimizer state by parameter, as a source says it."""

    tensors: Mapping[Key, ShardedTensor]
    scalars: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]


def with_optimizer_names(
    checkpoint: ForeignCheckpoint,
    options: SourceOptions,
    *,
    stored_orders: Mapping[str, Callable[[], Order]],
) -> Source:
    """What was found as a source, whose optimizer state gets its names when it is asked for.

    `stored_orders`: by what it is called in messages, an order that the checkpoint gives, which may
    have more parameters than the groups.
    """
    without_optimizer = _source(checkpoint, checkpoint.tensors, checkpoint.metadata)
    if not checkpoint.indexed_groups:
        return without_optimizer
    paths = ", ".join(checkpoint.optimizer_paths) or checkpoint.root
    shapes = {
        name if part == MODEL else f"{part}.{name}": tensor.spec.shape
        for (part, name), tensor in checkpoint.tensors.items()
    }
    shapes |= {alias: shapes[name] for alias, name in checkpoint.aliases.get(MODEL, {}).items()}

    def resolve_names(target: Order | None) -> Source:
        # Without a target, what is named has to be in the checkpoint: a target has its own names,
        # and its own shapes.
        orders = (
            stored_orders
            if target is not None
            else {
                label: partial(_order_in_model, make_order, shapes)
                for label, make_order in stored_orders.items()
            }
        )
        order = _resolve_order(
            paths,
            checkpoint.indexed_groups,
            caller_order=options.optimizer_order,
            shapes=shapes,
            target=target,
            stored_orders=orders,
        )
        state = _name_state(paths, checkpoint.indexed_groups, order)
        return _source(
            checkpoint,
            {**checkpoint.tensors, **state.tensors},
            replace(checkpoint.metadata, groups=state.groups, scalars=state.scalars),
        )

    return IndexedOptimizerSource(without_optimizer, resolve_names)


def _source(
    checkpoint: ForeignCheckpoint, tensors: Mapping[Key, ShardedTensor], metadata: SourceMetadata
) -> ShardedSource:
    return ShardedSource(
        checkpoint.root,
        tensors,
        format=checkpoint.format,
        metadata=metadata,
        aliases=checkpoint.aliases,
        rank_extra=checkpoint.rank_extra,
    )


def _order_in_model(make_order: Callable[[], Order], shapes: Mapping[str, Shape]) -> Order:
    """The order, of parameters that the checkpoint's model has."""
    order = make_order()
    unknown = sorted(name for group in order for name, shape in group if shapes.get(name) != shape)
    if unknown:
        raise FormatError(
            format_list(
                "the checkpoint's model has these under other names, or in other shapes", unknown
            )
        )
    return order


def unreadable_reason(tensor: torch.Tensor) -> str:
    """Why a tensor is not read, empty where it is."""
    if isinstance(tensor, DTensor):
        return "a rank's part of a DTensor, whose other parts are not in this file (`full_tensor()` has them all)"
    if tensor.is_meta:
        return "a tensor without values (of device meta)"
    dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return "" if dense else f"a {'nested' if tensor.is_nested else tensor.layout} tensor"


def is_optimizer_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
    )


def parse_groups(path: str, state_dict: Any) -> list[SavedGroup]:
    """The groups of an optimizer's state dict. FormatError for what is none, or has state of no
    group.
    """
    if not is_optimizer_state(state_dict):
        raise FormatError(
            f"{path}: is no optimizer's state dict; needed one with state and param_groups"
        )
    state, seen_keys = state_dict["state"], list[Any]()
    groups: list[SavedGroup] = []
    for number, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise FormatError(f"{path}: param group {number} lists no params")
        keys = group["params"]
        seen_keys += keys
        unexpected = next(
            (key for key in keys if not isinstance(state.get(key, {}), Mapping)), None
        )
        if unexpected is not None:
            raise FormatError(
                f"{path}: the state of parameter {unexpected} is a {type(state[unexpected]).__name__}; needed values by name"
            )
        names = group.get("param_names") or (
            keys if all(isinstance(key, str) for key in keys) else None
        )
        if names is not None and len(names) != len(keys):
            raise FormatError(
                f"{path}: param group {number} has {len(keys)} params and {len(names)} names"
            )
        entries = tuple(state.get(key, {}) for key in keys)
        options = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        groups.append(
            SavedGroup(
                options, entries, tuple(map(strip_wrappers, names)) if names is not None else None
            )
        )
    if len(set(seen_keys)) != len(seen_keys) or not set(state) <= set(seen_keys):
        unexpected = sorted(map(str, set(state) - set(seen_keys)))
        raise FormatError(
            format_list(f"{path}: state of no param group", unexpected)
            if unexpected
            else f"{path}: a parameter is in two places of its groups"
        )
    return groups


def _resolve_order(
    path: str,
    groups: Sequence[SavedGroup],
    *,
    caller_order: Sequence[Sequence[str]] | None,
    shapes: Mapping[str, Shape],
    target: Order | None,
    stored_orders: Mapping[str, Callable[[], Order]],
) -> Order:
    """The names and shapes of the groups' parameters.

    `caller_order`: the caller's order; `shapes`: of parameters by name, as far as they are known;
    `target`: the order of the optimizer to be filled; `stored_orders`: by what it is called in
    messages, an order that the checkpoint gives, which may have more parameters than the groups.
    FormatError where none fits, or where two that fit differ.
    """
    file_names = [saved_group.names for saved_group in groups if saved_group.names is not None]
    explicit_names = (
        caller_order
        if caller_order is not None
        else file_names
        if len(file_names) == len(groups)
        else None
    )
    if explicit_names is not None:
        known_shapes = {name: shape for group in target or () for name, shape in group} | dict(
            shapes
        )
        order = _with_shapes(
            path, groups, _strip_wrapper(explicit_names, known_shapes), known_shapes
        )
        _, reason = match_order(groups, order)
        if reason:
            raise FormatError(f"{path}: the names given for its optimizer do not fit: {reason}")
        return order
    candidates = dict(stored_orders)
    if target is not None:
        candidates = {"the optimizer to be filled": partial(tuple, target), **stored_orders}
    fitting, reasons = _matching_orders(groups, candidates)
    if not fitting:
        problem = (
            f"{path}: its optimizer state is by position, and of which parameters is not known"
        )
        raise FormatError(format_list(problem, reasons) + f"\n  {_REMEDY}")
    return _agreed_order(path, fitting)


def _matching_orders(
    groups: Sequence[SavedGroup], candidates: Mapping[str, Callable[[], Order]]
) -> tuple[dict[str, Order], list[str]]:
    """The orders that fit, and why the others do not."""
    orders: dict[str, Order] = {}
    reasons = []
    for label, make_order in candidates.items():
        try:
            order, reason = match_order(groups, make_order())
        except CheckpointError as error:
            order, reason = None, str(error)
        if order is not None:
            orders[label] = order
        else:
            reasons.append(f"{label}: {reason}")
    return orders, reasons


def _agreed_order(path: str, orders: Mapping[str, Order]) -> Order:
    (first_label, agreed), *others = orders.items()
    for label, order in others:
        differing = [
            pair
            for pair in zip(_flat_names(agreed), _flat_names(order), strict=True)
            if pair[0] != pair[1]
        ]
        if differing:
            raise FormatError(
                f"{path}: its optimizer state is by position; where {first_label} has {differing[0][0]}, {label} has {differing[0][1]}, and both "
                f"fit; needed {_ORDER_OPTION}"
            )
    return agreed


def match_order(groups: Sequence[SavedGroup], order: Order) -> tuple[Order | None, str]:
    """The order, of those parameters that the groups have; else None and why. Parameters may be
    left out where it is plain which.
    """
    if len(groups) != len(order):
        return None, f"has {len(order)} param group(s), the checkpoint {len(groups)}"
    matched = []
    for number, (group, parameters) in enumerate(zip(groups, order, strict=True)):
        from_start, from_end = (
            _match_entries(group.state, parameters),
            _match_entries(group.state[::-1], list(parameters)[::-1]),
        )
        if from_start is None or from_end is None:
            return None, f"param group {number}: {_explain_mismatch(group, parameters)}"
        if from_start != [len(parameters) - 1 - index for index in reversed(from_end)]:
            return (
                None,
                f"param group {number} has {len(group.state)} of {len(parameters)} parameters, and shapes do not tell which",
            )
        matched.append([parameters[index] for index in from_start])
    return matched, ""


def _match_entries(
    entries: Sequence[Mapping[str, Any]], parameters: Sequence[tuple[str, Shape]]
) -> list[int] | None:
    """Which parameter each entry is, the first that can be, in their order; None where some entry
    is none.
    """
    indices: list[int] = []
    index = 0
    for entry in entries:
        while index < len(parameters) and not shape_fits(entry, parameters[index][1]):
            if len(parameters) - index <= len(entries) - len(indices):
                return None
            index += 1
        if index == len(parameters):
            return None
        indices.append(index)
        index += 1
    return indices


def shape_fits(state: Mapping[str, Any], shape: Shape) -> bool:
    """Whether it can be the state of a parameter of this shape: some tensor of it has that, or is
    of its rows or columns, as Adafactor's. State without tensors fits any.
    """
    shapes = {
        tuple(value.shape)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step" and value.dim() > 0
    }
    if not shapes:
        scalar = any(
            isinstance(value, torch.Tensor) and key not in ("step", "RMS")
            for key, value in state.items()
        )
        return not scalar or shape == ()
    factored = {shape[:-1], shape[:-2] + shape[-1:]} if len(shape) > 1 else set()
    return shape in shapes or (bool(factored) and factored <= shapes)


def _explain_mismatch(group: SavedGroup, parameters: Sequence[tuple[str, Shape]]) -> str:
    if len(group.state) != len(parameters):
        return f"has {len(parameters)} parameters, the checkpoint {len(group.state)}, and their shapes do not fit"
    entry, (name, shape) = next(
        pair
        for pair in zip(group.state, parameters, strict=True)
        if not shape_fits(pair[0], pair[1][1])
    )
    shapes = ", ".join(
        f"{key} {tuple(value.shape)}"
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    )
    return f"{name} has shape {shape}, the state there is {shapes}"


def _strip_wrapper(
    group_names: Sequence[Sequence[str]], known_names: Collection[str]
) -> Sequence[Sequence[str]]:
    """Names of parameters of a model in DistributedDataParallel, whose weights were saved without
    it, as those have them.
    """
    all_names = [name for names in group_names for name in names]
    wrapped = all(name.startswith(DDP_PREFIX) and name not in known_names for name in all_names)
    return (
        [[name.removeprefix(DDP_PREFIX) for name in names] for names in group_names]
        if wrapped
        else group_names
    )


def _with_shapes(
    path: str,
    groups: Sequence[SavedGroup],
    group_names: Sequence[Sequence[str]],
    shapes: Mapping[str, Shape],
) -> Order:
    if len(group_names) != len(groups) or any(
        len(names) != len(group.state) for names, group in zip(group_names, groups, strict=True)
    ):
        counts, expected = (
            [len(names) for names in group_names],
            [len(group.state) for group in groups],
        )
        raise FormatError(
            f"{path}: the names given are of param groups with {counts} parameters; needed {expected}"
        )
    missing = sorted({name for names in group_names for name in names} - set(shapes))
    if missing:
        raise FormatError(
            format_list(f"{path}: names of its optimizer that no tensor of the model has", missing)
        )
    return [[(name, shapes[name]) for name in names] for names in group_names]


def _flat_names(order: Order) -> list[str]:
    return [name for group in order for name, _ in group]


def _name_state(path: str, groups: Sequence[SavedGroup], order: Order) -> _NamedState:
    """The state under these names, which fit."""
    tensors: dict[Key, ShardedTensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for group, parameters in zip(groups, order, strict=True):
        for entry, (name, _) in zip(group.state, parameters, strict=True):
            for key, value in entry.items():
                if not isinstance(key, str) or not key or "/" in key:
                    raise FormatError(
                        f"{path}: state of {name} has the key {key!r}; needed a name without '/'"
                    )
                if not isinstance(value, torch.Tensor):
                    scalars.setdefault(name, {})[key] = value
                elif reason := unreadable_reason(value):
                    raise FormatError(
                        f"{path}: {key} of {name} is {reason}; needed a dense one with all its values"
                    )
                else:
                    tensors[OPTIMIZER, f"{name}/{key}"] = whole_tensor(value, path)
    named_groups = [
        {"names": [name for name, _ in parameters], "options": dict(group.options)}
        for group, parameters in zip(groups, order, strict=True)
    ]
    return _NamedState(tensors, scalars, named_groups)

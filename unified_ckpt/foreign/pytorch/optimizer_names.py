"""Names optimizer state that is stored by position.

The order comes from the caller, the file, the target's optimizer, or the model's config.

How state could go to the wrong parameter: the order differs and shapes are alike. So each order
is checked against the shape of every entry, all orders that fit must agree, and nothing is named
if an entry could belong to several parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.engine.source.protocol import (
    IndexedOptimizerSource,
    Order,
    Source,
    SourceMetadata,
)
from unified_ckpt.errors import CheckpointError, FormatError, error_prefix
from unified_ckpt.foreign.pytorch.optimizer_groups import (
    SavedGroup,
    archived_tensor,
    other_entries,
    parse_groups,
)
from unified_ckpt.foreign.restricted_pickle.archive import ArchivedTensor
from unified_ckpt.foreign.restricted_pickle.load import load_tensors
from unified_ckpt.format.names import MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.views.sharded_source import ShardedSource, SourceExtras
from unified_ckpt.views.shards import ShardedTensor

Shape = tuple[int, ...]
DDP_PREFIX = "module."  # of all names in DistributedDataParallel
_ORDER_OPTION = "SourceOptions(optimizer_order=[[names of group 0, in order], ...])"
_REMEDY = (
    "pass an optimizer with the same groups to uc.load, the model's config.json as "
    f"SourceOptions(config=...), or {_ORDER_OPTION}"
)


@dataclass(slots=True)
class ForeignCheckpoint:
    """The content of a path while it is opened.

    `indexed_groups`: optimizer state by position, the groups of all optimizers concatenated.
    `optimizer_paths`: the files with that state.
    """

    root: str
    format: str
    tensors: dict[Key, ShardedTensor] = field(default_factory=dict)
    aliases: dict[str, Mapping[str, str]] = field(default_factory=dict)
    metadata: SourceMetadata = field(default_factory=SourceMetadata)
    indexed_groups: list[SavedGroup] = field(default_factory=list)
    optimizer_paths: list[str] = field(default_factory=list)
    rank_extra: Callable[[int], Any] = lambda _: None

    def add_optimizer(self, path: str, name: str, state_dict: Any) -> None:
        """Add an optimizer by position. What is beside its groups and state becomes `extra`."""
        self.indexed_groups += parse_groups(path, state_dict)
        self.add_extra(name, other_entries(state_dict))

    def add_extra(self, name: str, values: Any) -> None:
        """Add values to `extra`, unless there are none."""
        if values:
            extra = {**(self.metadata.extra or {}), name: values}
            self.metadata = replace(self.metadata, extra=extra)


# Optimizer state by parameter name: its tensors, and metadata with the param groups and scalars.
NamedState = tuple[dict[Key, ShardedTensor], SourceMetadata]


def with_optimizer_names(
    checkpoint: ForeignCheckpoint,
    options: SourceOptions,
    *,
    stored_orders: Mapping[str, Callable[[], Order]],
) -> Source:
    """Return a Source whose optimizer state is named on demand.

    `stored_orders`: orders that the checkpoint gives, by their label in messages. They may have
    more parameters than the groups.
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
        orders = stored_orders
        if target is None:  # then the checkpoint's model must have the names and shapes
            orders = {
                label: partial(_order_in_model, make_order, shapes)
                for label, make_order in stored_orders.items()
            }
        order = _resolve_order(
            paths,
            checkpoint.indexed_groups,
            caller_order=options.optimizer_order,
            shapes=shapes,
            target=target,
            stored_orders=orders,
        )
        return named(order)

    def named(order: Order) -> Source:
        tensors, state = _name_state(paths, checkpoint.indexed_groups, order)
        return _source(
            checkpoint,
            checkpoint.tensors | tensors,
            replace(checkpoint.metadata, groups=state.groups, scalars=state.scalars),
        )

    are_named = all(group.names is not None for group in checkpoint.indexed_groups)
    numbers = count()  # names of parameters of unknown shapes
    by_index = partial(
        named,
        [[(str(next(numbers)), ()) for _ in group.state] for group in checkpoint.indexed_groups],
    )
    return IndexedOptimizerSource(
        without_optimizer,
        resolve_names,
        by_index=None if are_named or options.optimizer_order is not None else by_index,
    )


def _source(
    checkpoint: ForeignCheckpoint, tensors: Mapping[Key, ShardedTensor], metadata: SourceMetadata
) -> ShardedSource:
    return ShardedSource(
        checkpoint.root,
        tensors,
        format=checkpoint.format,
        metadata=replace(
            metadata,
            extra=load_tensors(metadata.extra),
            modules=load_tensors(metadata.modules),
            groups=load_tensors(metadata.groups),
            scalars=load_tensors(metadata.scalars),
        ),
        aliases=checkpoint.aliases,
        extras=SourceExtras(rank_extra=checkpoint.rank_extra),
    )


def _order_in_model(make_order: Callable[[], Order], shapes: Mapping[str, Shape]) -> Order:
    """Return the order. FormatError if the checkpoint's model lacks one of its parameters."""
    order = make_order()
    raise_if_any(
        FormatError,
        "the checkpoint's model has other names or shapes for these parameters",
        sorted(name for group in order for name, shape in group if shapes.get(name) != shape),
    )
    return order


def _resolve_order(
    path: str,
    groups: Sequence[SavedGroup],
    *,
    caller_order: Sequence[Sequence[str]] | None,
    shapes: Mapping[str, Shape],
    target: Order | None,
    stored_orders: Mapping[str, Callable[[], Order]],
) -> Order:
    """Return names and shapes of the groups' parameters.

    `caller_order`: from SourceOptions. `shapes`: of known parameters by name. `target`: the order
    of the optimizer to fill. `stored_orders`: see `with_optimizer_names`. FormatError if no order
    fits, or if two that fit differ.
    """
    explicit_names = caller_order
    if explicit_names is None:
        file_names = [group.names for group in groups if group.names is not None]
        explicit_names = file_names if len(file_names) == len(groups) else None
    if explicit_names is not None:
        known_shapes = {name: shape for group in target or () for name, shape in group}
        known_shapes |= shapes
        names = _strip_wrapper(explicit_names, known_shapes)
        order = _with_shapes(path, groups, names, known_shapes)
        _, reason = match_order(groups, order)
        if reason:
            raise FormatError(f"{path}: the given names do not fit its optimizer: {reason}")
        return order
    candidates = dict(stored_orders)
    if target is not None:
        candidates = {"the target optimizer": partial(tuple, target), **stored_orders}
    fitting, reasons = _matching_orders(groups, candidates)
    if not fitting:
        problem = f"{path}: optimizer state is by position, and its parameter names are unknown"
        raise FormatError(format_list(problem, reasons) + f"\n  {_REMEDY}")
    return _agreed_order(path, fitting)


def _matching_orders(
    groups: Sequence[SavedGroup], candidates: Mapping[str, Callable[[], Order]]
) -> tuple[dict[str, Order], list[str]]:
    """Return the orders that fit, and the reasons why others do not."""
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
        for name, other_name in zip(_flat_names(agreed), _flat_names(order), strict=True):
            if name != other_name:
                raise FormatError(
                    f"{path}: optimizer state is by position, and two orders fit: {first_label} "
                    f"has {name} where {label} has {other_name}; pass {_ORDER_OPTION}"
                )
    return agreed


def match_order(groups: Sequence[SavedGroup], order: Order) -> tuple[Order | None, str]:
    """Return the order restricted to the groups' parameters; otherwise None and the reason.

    Parameters may be missing from the groups if shapes identify them.
    """
    if len(groups) != len(order):
        return None, f"got {len(order)} param group(s), expected {len(groups)} as saved"
    matched = []
    for number, (group, parameters) in enumerate(zip(groups, order, strict=True)):
        from_start = _match_entries(group.state, parameters)
        from_end = _match_entries(group.state[::-1], list(parameters)[::-1])
        if from_start is None or from_end is None:
            return None, f"param group {number}: {_explain_mismatch(group, parameters)}"
        if from_start != [len(parameters) - 1 - index for index in reversed(from_end)]:
            counts = f"{len(group.state)} of {len(parameters)} parameters"
            return None, f"param group {number} has {counts}, and shapes do not identify them"
        matched.append([parameters[index] for index in from_start])
    return matched, ""


def _match_entries(
    entries: Sequence[Mapping[str, Any]], parameters: Sequence[tuple[str, Shape]]
) -> list[int] | None:
    """Return each entry's first possible parameter index, in order; None if one has none."""
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
    """Return whether the state can belong to a parameter of this shape.

    Some tensor must have that shape, or be factored over its rows and columns as in Adafactor.
    State without tensors fits any shape.
    """
    shapes = {
        value.shape
        for key, value in state.items()
        if isinstance(value, ArchivedTensor) and key != "step" and value.shape
    }
    if not shapes:
        scalar = any(
            isinstance(value, ArchivedTensor) and key not in ("step", "RMS")
            for key, value in state.items()
        )
        return not scalar or shape == ()
    if shape in shapes or len(shape) < 2:
        return shape in shapes
    factors = {shape[:-1], shape[:-2] + shape[-1:]}
    torch_factors = {(*shape[:-1], 1), (*shape[:-2], 1, shape[-1])}  # of torch.optim.Adafactor
    return factors <= shapes or torch_factors <= shapes


def _explain_mismatch(group: SavedGroup, parameters: Sequence[tuple[str, Shape]]) -> str:
    if len(group.state) != len(parameters):
        counts = f"got {len(parameters)} parameters, expected {len(group.state)} as saved"
        return f"{counts}, and their shapes do not fit"
    entry, (name, shape) = next(
        pair
        for pair in zip(group.state, parameters, strict=True)
        if not shape_fits(pair[0], pair[1][1])
    )
    tensors = {key: value for key, value in entry.items() if isinstance(value, ArchivedTensor)}
    shapes = ", ".join(f"{key} {value.shape}" for key, value in tensors.items())
    return f"{name} has shape {shape}, but the state at its position has {shapes}"


def _strip_wrapper(
    group_names: Sequence[Sequence[str]], known_names: Collection[str]
) -> Sequence[Sequence[str]]:
    """Remove DistributedDataParallel's prefix if the weights were saved without it."""
    all_names = [name for names in group_names for name in names]
    if not all(name.startswith(DDP_PREFIX) and name not in known_names for name in all_names):
        return group_names
    return [[name.removeprefix(DDP_PREFIX) for name in names] for names in group_names]


def _with_shapes(
    path: str,
    groups: Sequence[SavedGroup],
    group_names: Sequence[Sequence[str]],
    shapes: Mapping[str, Shape],
) -> Order:
    counts, expected = list(map(len, group_names)), [len(group.state) for group in groups]
    if counts != expected:
        raise FormatError(
            f"{path}: got names for param groups of {counts} parameters, expected {expected}"
        )
    raise_if_any(
        FormatError,
        f"{path}: the model has no tensors for these names",
        sorted({name for names in group_names for name in names} - set(shapes)),
    )
    return [[(name, shapes[name]) for name in names] for names in group_names]


def _flat_names(order: Order) -> list[str]:
    return [name for group in order for name, _ in group]


def exported_optimizer(
    path: str, groups: Sequence[SavedGroup], states_by_name: Mapping[str, Any]
) -> NamedState:
    """Return the optimizer that a conversion wrote: in groups that have names, else by name."""
    if groups:
        return _name_state(
            path, groups, [[(name, ()) for name in group.names or ()] for group in groups]
        )
    group = SavedGroup({}, tuple(states_by_name.values()), tuple(states_by_name))
    tensors, state = _name_state(path, [group], [[(name, ()) for name in states_by_name]])
    return tensors, replace(state, groups=())


def _name_state(path: str, groups: Sequence[SavedGroup], order: Order) -> NamedState:
    """Return the state under the names of an order that fits."""
    tensors: dict[Key, ShardedTensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for group, parameters in zip(groups, order, strict=True):
        for entry, (name, _) in zip(group.state, parameters, strict=True):
            for key, value in entry.items():
                if not isinstance(key, str) or not key or "/" in key:
                    raise FormatError(
                        f"{path}: {name}: got state key {key!r}, expected a string without '/'"
                    )
                if not isinstance(value, ArchivedTensor):
                    scalars.setdefault(name, {})[key] = value
                else:
                    with error_prefix(f"{path}: {name}: {key}"):
                        tensors[OPTIMIZER, f"{name}/{key}"] = archived_tensor(value, path)
    named_groups = [
        {"names": [name for name, _ in parameters], "options": dict(group.options)}
        for group, parameters in zip(groups, order, strict=True)
    ]
    return tensors, SourceMetadata(groups=named_groups, scalars=scalars)

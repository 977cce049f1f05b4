"""Names for optimizer state that is by position. Who knows the order: the caller, the file, the target's optimizer, the model's config.

How state could go to the wrong parameter: the order is another one and the shapes are alike. So each order is held against the shape of
every entry; all who know one must agree; and where entries could be those of several parameters, nothing is named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.by_position import ByPosition, Order
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.modules import unwrapped
from unified_ckpt.views.shards import Assembled, Assembly, whole_tensor

Shape = tuple[int, ...]
WRAPPER = "module."  # before every name of a model in DistributedDataParallel
_ORDER = "SourceOptions(optimizer_order=[[names of group 0, in its order], ...])"
_REMEDY = f"pass an optimizer made as that one was to uc.load, the model's config.json as `config`, or {_ORDER}"


@dataclass(frozen=True, slots=True)
class Group:
    """A param group as it was saved: `state` of each parameter in its order. `names`: of these, where the file has them."""

    options: Mapping[str, Any]
    state: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...] | None


@dataclass(slots=True)
class Found:
    """What a path holds. `unnamed`: optimizer state by position, the groups of all optimizers one after another; `where`: its files."""

    root: str
    format: str
    tensors: dict[Key, Assembly] = field(default_factory=dict)
    aliases: dict[str, Mapping[str, str]] = field(default_factory=dict)
    said: Said = field(default_factory=Said)
    unnamed: list[Group] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    rank_extra: Callable[[int], Any] = lambda _: None


@dataclass(frozen=True, slots=True)
class _Named:
    """Optimizer state by parameter, as a source says it."""

    tensors: Mapping[Key, Assembly]
    scalars: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]


def by_position(
    found: Found, options: SourceOptions, *, own: Mapping[str, Callable[[], Order]]
) -> Source:
    """What was found as a source, whose optimizer state gets its names when it is asked for.

    `own`: by what it is called in messages, an order that the checkpoint gives, which may have more parameters than the groups.
    """
    bare = _source(found, found.tensors, found.said)
    if not found.unnamed:
        return bare
    where = ", ".join(found.where) or found.root
    shapes = {
        name if part == MODEL else f"{part}.{name}": one.spec.shape
        for (part, name), one in found.tensors.items()
    }
    shapes |= {alias: shapes[name] for alias, name in found.aliases.get(MODEL, {}).items()}

    def named(target: Order | None) -> Source:
        # Without a target, what is named has to be in the checkpoint: a target has its own names, and its own shapes.
        orders = (
            own
            if target is not None
            else {who: partial(_within, make, shapes) for who, make in own.items()}
        )
        order = _resolve(
            where,
            found.unnamed,
            told=options.optimizer_order,
            shapes=shapes,
            target=target,
            own=orders,
        )
        state = _name_state(where, found.unnamed, order)
        return _source(
            found,
            {**found.tensors, **state.tensors},
            replace(found.said, groups=state.groups, scalars=state.scalars),
        )

    return ByPosition(bare, named)


def _source(found: Found, tensors: Mapping[Key, Assembly], said: Said) -> Assembled:
    return Assembled(
        found.root,
        tensors,
        format=found.format,
        said=said,
        aliases=found.aliases,
        rank_extra=found.rank_extra,
    )


def _within(make: Callable[[], Order], shapes: Mapping[str, Shape]) -> Order:
    """The order, of parameters that the checkpoint's model has."""
    order = make()
    strangers = sorted(
        name for group in order for name, shape in group if shapes.get(name) != shape
    )
    if strangers:
        raise FormatError(
            listed(
                "the checkpoint's model has these under other names, or in other shapes", strangers
            )
        )
    return order


def unread(tensor: torch.Tensor) -> str:
    """Why a tensor is not read, empty where it is."""
    if isinstance(tensor, DTensor):
        return "a rank's part of a DTensor, whose other parts are not in this file (`full_tensor()` has them all)"
    if tensor.is_meta:
        return "a tensor without values (of device meta)"
    dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return "" if dense else f"a {'nested' if tensor.is_nested else tensor.layout} tensor"


def is_optimizer(told: Any) -> bool:
    return (
        isinstance(told, Mapping)
        and isinstance(told.get("state"), Mapping)
        and isinstance(told.get("param_groups"), list)
    )


def parse_groups(path: str, told: Any) -> list[Group]:
    """The groups of an optimizer's state dict. FormatError for what is none, or has state of no group."""
    if not is_optimizer(told):
        raise FormatError(
            f"{path}: is no optimizer's state dict; needed one with state and param_groups"
        )
    state, seen = told["state"], list[Any]()
    found: list[Group] = []
    for number, group in enumerate(told["param_groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise FormatError(f"{path}: param group {number} lists no params")
        keys = group["params"]
        seen += keys
        stray = next((key for key in keys if not isinstance(state.get(key, {}), Mapping)), None)
        if stray is not None:
            raise FormatError(
                f"{path}: the state of parameter {stray} is a {type(state[stray]).__name__}; needed values by name"
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
        found.append(
            Group(options, entries, tuple(map(unwrapped, names)) if names is not None else None)
        )
    if len(set(seen)) != len(seen) or not set(state) <= set(seen):
        stray = sorted(map(str, set(state) - set(seen)))
        raise FormatError(
            listed(f"{path}: state of no param group", stray)
            if stray
            else f"{path}: a parameter is in two places of its groups"
        )
    return found


def _resolve(
    path: str,
    groups: Sequence[Group],
    *,
    told: Sequence[Sequence[str]] | None,
    shapes: Mapping[str, Shape],
    target: Order | None,
    own: Mapping[str, Callable[[], Order]],
) -> Order:
    """The names and shapes of the groups' parameters.

    `told`: the caller's order; `shapes`: of parameters by name, as far as they are known; `target`: the order of the optimizer to be
    filled; `own`: by what it is called in messages, an order that the checkpoint gives, which may have more parameters than the groups.
    FormatError where none fits, or where two that fit differ.
    """
    in_file = [one.names for one in groups if one.names is not None]
    given = told if told is not None else in_file if len(in_file) == len(groups) else None
    if given is not None:
        known = {name: shape for group in target or () for name, shape in group} | dict(shapes)
        order = _with_shapes(path, groups, _without_wrapper(given, known), known)
        _, why = fitted(groups, order)
        if why:
            raise FormatError(f"{path}: the names given for its optimizer do not fit: {why}")
        return order
    candidates = dict(own)
    if target is not None:
        candidates = {"the optimizer to be filled": partial(tuple, target), **own}
    fitting, reasons = _fitting(groups, candidates)
    if not fitting:
        what = f"{path}: its optimizer state is by position, and of which parameters is not known"
        raise FormatError(listed(what, reasons) + f"\n  {_REMEDY}")
    return _agreed(path, fitting)


def _fitting(
    groups: Sequence[Group], candidates: Mapping[str, Callable[[], Order]]
) -> tuple[dict[str, Order], list[str]]:
    """The orders that fit, and why the others do not."""
    orders: dict[str, Order] = {}
    reasons = []
    for who, make in candidates.items():
        try:
            found, why = fitted(groups, make())
        except CheckpointError as error:
            found, why = None, str(error)
        if found is not None:
            orders[who] = found
        else:
            reasons.append(f"{who}: {why}")
    return orders, reasons


def _agreed(path: str, orders: Mapping[str, Order]) -> Order:
    (first, chosen), *others = orders.items()
    for who, order in others:
        differing = [
            pair for pair in zip(_names(chosen), _names(order), strict=True) if pair[0] != pair[1]
        ]
        if differing:
            raise FormatError(
                f"{path}: its optimizer state is by position; where {first} has {differing[0][0]}, {who} has {differing[0][1]}, and both "
                f"fit; needed {_ORDER}"
            )
    return chosen


def fitted(groups: Sequence[Group], order: Order) -> tuple[Order | None, str]:
    """The order, of those parameters that the groups have; else None and why. Parameters may be left out where it is plain which."""
    if len(groups) != len(order):
        return None, f"has {len(order)} param group(s), the checkpoint {len(groups)}"
    chosen = []
    for number, (group, those) in enumerate(zip(groups, order, strict=True)):
        first, last = _placed(group.state, those), _placed(group.state[::-1], list(those)[::-1])
        if first is None or last is None:
            return None, f"param group {number}: {_misfit(group, those)}"
        if first != [len(those) - 1 - at for at in reversed(last)]:
            return (
                None,
                f"param group {number} has {len(group.state)} of {len(those)} parameters, and shapes do not tell which",
            )
        chosen.append([those[at] for at in first])
    return chosen, ""


def _placed(
    entries: Sequence[Mapping[str, Any]], those: Sequence[tuple[str, Shape]]
) -> list[int] | None:
    """Which parameter each entry is, the first that can be, in their order; None where some entry is none."""
    found: list[int] = []
    at = 0
    for entry in entries:
        while at < len(those) and not fits(entry, those[at][1]):
            if len(those) - at <= len(entries) - len(found):
                return None
            at += 1
        if at == len(those):
            return None
        found.append(at)
        at += 1
    return found


def fits(state: Mapping[str, Any], shape: Shape) -> bool:
    """Whether it can be the state of a parameter of this shape: some tensor of it has that, or is of its rows or columns, as Adafactor's.
    State without tensors fits any."""
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


def _misfit(group: Group, those: Sequence[tuple[str, Shape]]) -> str:
    if len(group.state) != len(those):
        return f"has {len(those)} parameters, the checkpoint {len(group.state)}, and their shapes do not fit"
    entry, (name, shape) = next(
        pair for pair in zip(group.state, those, strict=True) if not fits(pair[0], pair[1][1])
    )
    has = ", ".join(
        f"{key} {tuple(value.shape)}"
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    )
    return f"{name} has shape {shape}, the state there is {has}"


def _without_wrapper(
    given: Sequence[Sequence[str]], known: Collection[str]
) -> Sequence[Sequence[str]]:
    """Names of parameters of a model in DistributedDataParallel, whose weights were saved without it, as those have them."""
    every = [name for names in given for name in names]
    wrapped = all(name.startswith(WRAPPER) and name not in known for name in every)
    return [[name.removeprefix(WRAPPER) for name in names] for names in given] if wrapped else given


def _with_shapes(
    path: str, groups: Sequence[Group], given: Sequence[Sequence[str]], shapes: Mapping[str, Shape]
) -> Order:
    if len(given) != len(groups) or any(
        len(names) != len(one.state) for names, one in zip(given, groups, strict=True)
    ):
        has, needed = [len(names) for names in given], [len(one.state) for one in groups]
        raise FormatError(
            f"{path}: the names given are of param groups with {has} parameters; needed {needed}"
        )
    absent = sorted({name for names in given for name in names} - set(shapes))
    if absent:
        raise FormatError(
            listed(f"{path}: names of its optimizer that no tensor of the model has", absent)
        )
    return [[(name, shapes[name]) for name in names] for names in given]


def _names(order: Order) -> list[str]:
    return [name for group in order for name, _ in group]


def _name_state(path: str, groups: Sequence[Group], order: Order) -> _Named:
    """The state under these names, which fit."""
    tensors: dict[Key, Assembly] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for group, those in zip(groups, order, strict=True):
        for entry, (name, _) in zip(group.state, those, strict=True):
            for key, value in entry.items():
                if not isinstance(key, str) or not key or "/" in key:
                    raise FormatError(
                        f"{path}: state of {name} has the key {key!r}; needed a name without '/'"
                    )
                if not isinstance(value, torch.Tensor):
                    scalars.setdefault(name, {})[key] = value
                elif kind := unread(value):
                    raise FormatError(
                        f"{path}: {key} of {name} is {kind}; needed a dense one with all its values"
                    )
                else:
                    tensors[OPTIMIZER, f"{name}/{key}"] = whole_tensor(value, path)
    found = [
        {"names": [name for name, _ in those], "options": dict(group.options)}
        for group, those in zip(groups, order, strict=True)
    ]
    return _Named(tensors, scalars, found)

"""The two sets of names of a transformers model: names in memory, which checkpoints have, and names
on the hub.

transformers 5 merges and renames tensors of some models at load (the experts of Mixtral), and
reverses it in `save_pretrained`. This module runs that conversion on tensors without bytes, and
derives from the strides where each result lies in its base tensor. So it follows any version of
transformers. Results that are not slices, such as transposed or fused tensors, are refused.

How optimizer state could go to the wrong parameter: it is named like the parameter that a tensor of
the hub is only a part of. So it follows the rules of its parameter.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.overrides import TorchFunctionMode

from unified_ckpt.engine.source.protocol import IndexedOptimizerSource, Order, Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.format.renames import Renames, Rule, Step, Target
from unified_ckpt.runtime.torch_state.modules import flatten_model
from unified_ckpt.runtime.torch_state.names import strip_wrappers
from unified_ckpt.runtime.torch_state.shards.flat_parameters import has_flat_parameters
from unified_ckpt.views.derived import ElementRange, RangesTensor
from unified_ckpt.views.rename_rules import apply_renames

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RULES = "the names of this model on the hub"
_FLAT = Step(reshape=(-1,))


@dataclass(frozen=True, slots=True)
class HubNames:
    """The hub tensors of a model that differ from those in memory in name or shape.

    `tensors`: each as a slice of a tensor in memory. `fused`: names of those that are not slices.
    `shapes`: of all tensors in memory.
    """

    tensors: Mapping[str, RangesTensor]
    fused: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]


def state_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the global shapes of a model's tensors by name, without communication."""
    if has_flat_parameters(model):  # FSDP1, whose `state_dict` gathers
        flat = flatten_model(model)
        shapes = {name: each.global_shape for name, each in flat.shards.items()}
        shapes |= {name: tuple(tensor.shape) for name, tensor in flat.tensors.items()}
        return shapes | {alias: shapes[name] for alias, name in flat.aliases.items()}
    return {
        strip_wrappers(name): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }


def hub_names(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> HubNames:
    """Return how the names of a model on the hub differ from those in memory.

    `shapes`: those of `state_shapes`, of the model or of its wrapper.
    """
    from transformers.core_model_loading import revert_weight_conversion

    memory_tensors = {
        name: torch.empty(shape, dtype=torch.uint8, device="meta") for name, shape in shapes.items()
    }
    with _without_conversion_record(model), _ContiguousAsView():
        hub: dict[str, torch.Tensor] = revert_weight_conversion(
            cast("Any", model), dict(memory_tensors)
        )
    names = {id(tensor): name for name, tensor in memory_tensors.items()}
    tensors, fused = {}, set[str]()
    for name, tensor in hub.items():
        base = names.get(id(tensor)) or names.get(id(tensor._base))
        if base is None or not tensor.is_contiguous():
            fused.add(name)
        elif name != base or tensor.shape != memory_tensors[base].shape:
            first = int(tensor.storage_offset())
            element_range = ElementRange(base, first, tensor.numel())
            tensors[name] = RangesTensor(tuple(tensor.shape), (element_range,))
    return HubNames(tensors, frozenset(fused), shapes)


def fused_error(model: PreTrainedModel, name: str) -> FormatError:
    """Return the error for a hub tensor that is not a slice of a tensor in memory."""
    import transformers

    return FormatError(
        f"{name}: transformers {transformers.__version__} derives it from "
        f"{type(model).__name__}'s tensors by more than slicing and renaming, expected a slice; "
        "use save_pretrained"
    )


def in_model_names(source: Source, model: object) -> Source:
    """Return a source with hub names of a transformers model under its names in memory.

    Optimizer state follows its parameters. A source with all names of the model, and one for any
    other kind of model, is returned as it is. FormatError for a hub tensor that is not a slice of
    one in memory.
    """
    pretrained = _pretrained_model(model)
    if pretrained is None:
        return source
    indexed = source.indexed
    stored = _parameter_names(source if indexed is None else indexed.without_optimizer)
    shapes = state_shapes(model if has_flat_parameters(model) else pretrained)
    if stored.issuperset(shapes):
        return source
    names = hub_names(pretrained, shapes)
    for name in sorted((names.fused & stored) - names.shapes.keys()):
        raise fused_error(pretrained, name)
    renames = _renames(names, stored)
    if not renames.rules:
        return source
    if indexed is None:
        return apply_renames(source, renames, rules_path=_RULES)

    def with_order(order: Order | None) -> Source:
        named = indexed.with_stored_order if order is None else indexed.with_order(order)
        return apply_renames(named, renames, rules_path=_RULES)

    return IndexedOptimizerSource(
        apply_renames(indexed.without_optimizer, renames, rules_path=_RULES), with_order
    )


def _pretrained_model(model: object) -> PreTrainedModel | None:
    """Return the transformers model in DistributedDataParallel or torch.compile, if it is one."""
    transformers = sys.modules.get("transformers")  # else nothing can be a model of it
    while transformers is not None:
        if isinstance(model, transformers.PreTrainedModel):
            return None if hasattr(model, "peft_config") else model
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            break
        model = inner
    return None


def _parameter_names(source: Source) -> set[str]:
    """Return the names of the weights. Optimizer state may have other names than they."""
    return {
        name
        for part in source.parts
        if part != OPTIMIZER
        for name in (*source.names(part), *source.aliases(part))
    }


def _renames(names: HubNames, stored: set[str]) -> Renames:
    """Return rules from hub names to names in memory, for tensors that are stored completely."""
    ranges_by_name: dict[str, list[tuple[int, str, int]]] = {}
    for hub_name, tensor in names.tensors.items():
        (element_range,) = tensor.ranges
        ranges_by_name.setdefault(element_range.name, []).append(
            (element_range.first, hub_name, element_range.count)
        )
    rules = []
    for name, ranges in ranges_by_name.items():
        ranges.sort()
        hub_names_in_order = tuple(hub_name for _, hub_name, _ in ranges)
        if name in stored or not stored.issuperset(hub_names_in_order):
            continue
        ends = [0]
        for first, _, count in ranges:
            if first != ends[-1]:
                break
            ends.append(first + count)
        if ends[-1] != prod(names.shapes[name]):
            raise FormatError(
                f"{name}: got hub tensors for {ends[-1]} elements, "
                f"expected {prod(names.shapes[name])}, each once"
            )
        rules.append(_rule(name, names.shapes[name], hub_names_in_order, names.tensors))
    return Renames(rules=tuple(rules))


def _rule(
    name: str,
    shape: tuple[int, ...],
    hub_names_in_order: tuple[str, ...],
    tensors: Mapping[str, RangesTensor],
) -> Rule:
    """Return the rule that joins hub tensors in this order; optional, as a part may lack them."""
    if len(hub_names_in_order) == 1 and tensors[hub_names_in_order[0]].shape == shape:
        return Rule(match=hub_names_in_order, to=(Target(name=name),), optional=True)
    return Rule(
        match=hub_names_in_order,
        steps=(_FLAT,),
        concat=0 if len(hub_names_in_order) > 1 else None,
        to=(Target(name=name, steps=(Step(reshape=shape),)),),
        optional=True,
    )


@contextlib.contextmanager
def _without_conversion_record(model: torch.nn.Module) -> Iterator[None]:
    """Hide the model's record of its own load conversion, which is empty after a load from a
    unified checkpoint.
    """
    removed = {
        name: vars(model).pop(name) for name in ("_weight_conversions",) if name in vars(model)
    }
    try:
        yield
    finally:
        vars(model).update(removed)


class _ContiguousAsView(TorchFunctionMode):
    """Makes `contiguous` return the view itself, so that its strides show where it lies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))

"""Stacks identical layers into one tensor with a layer dim, as scanned models have, and unstacks
them.

How layers could be mixed up: a layer lacks a tensor or has another shape or dtype, or the last
group is incomplete. Each is refused by name, before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MASTER, MODEL, WEIGHTS, WITHOUT_MASTERS
from unified_ckpt.format.renames import Over, Renames, Rule, Target
from unified_ckpt.views.derived import DerivedSource
from unified_ckpt.views.rename_rules import apply_renames

# names of the list of layers in common models
_LIST_NAMES = (
    "layers",
    "layer",
    "h",
    "blocks",
    "block",
)


def stack_layers(
    source: Source, *, dim: int = 0, lists: Collection[str] | None = None, period: int = 1
) -> DerivedSource:
    """Stack "model.layers.3.mlp.weight" and the like into row 3 of "model.layers.mlp.weight".

    Optimizer state and master weights follow. `lists` names the lists of layers, such as
    "model.layers"; None detects them: each name that is followed by a number. With `period` above
    1, layers repeat every `period`: "model.layers.1.mlp.weight" then holds layers 1, 1 + period,
    and so on. FormatError naming layers that differ.
    """
    names = _parameters(source)
    layers_by_list = {
        list_name: _tensors_by_layer(names, list_name)
        for list_name in (_numbered_lists(names) if lists is None else lists)
    }
    problems = [
        problem
        for list_name, layers in layers_by_list.items()
        for problem in _layer_differences(source, list_name, layers, period)
    ]
    if problems or not layers_by_list:
        problems = problems or ["no tensor name contains a layer number"]
        raise FormatError(format_list("layers cannot be stacked", problems))
    rules = tuple(
        rule
        for list_name, layers in layers_by_list.items()
        for rule in _stack_rules(list_name, len(layers), dim, period)
    )
    return apply_renames(source, Renames(rules=rules))


def unstack_layers(
    source: Source, *, dim: int = 0, lists: Collection[str] | None = None, period: int = 1
) -> DerivedSource:
    """Reverse `stack_layers`.

    `lists=None` detects names that end in "layers", "h" or "blocks" and are not followed by a
    number. A source whose layers are all numbered stays as it is.
    """
    names = _parameters(source)
    list_paths = (
        _stacked_lists(names, period)
        if lists is None
        else [
            f"{list_name}.{offset}" if period > 1 else list_name
            for list_name in lists
            for offset in range(period)
        ]
    )
    problems = [
        problem
        for list_path in list_paths
        for problem in _uneven_lists(source, names, list_path, dim)
    ]
    is_unstacked = lists is None and any(
        name.rpartition(".")[2] in _LIST_NAMES for name in _numbered_lists(names)
    )
    if problems or not (list_paths or is_unstacked):
        names_of_lists = " or ".join(_LIST_NAMES)
        problems = problems or [
            f"no tensor name contains {names_of_lists} before its last component"
        ]
        raise FormatError(format_list("layers cannot be unstacked", problems))
    rules = tuple(_unstack_rule(list_path, dim, period) for list_path in dict.fromkeys(list_paths))
    return apply_renames(source, Renames(rules=rules))


def _parameters(source: Source) -> dict[str, str]:
    """Names of tensors that are parameters, each with a part that has it."""
    parts = [part for part in (MASTER, WITHOUT_MASTERS, MODEL) if part in source.parts]
    return {name: part for part in parts for name in (*source.names(part), *source.aliases(part))}


def _numbered_lists(names: Iterable[str]) -> list[str]:
    matches = (re.match(r"(.+?)\.\d+\.", name) for name in names)
    return sorted({match[1] for match in matches if match is not None})


def _tensors_by_layer(names: Iterable[str], list_name: str) -> dict[int, set[str]]:
    """Layer number -> the rest of the name of each of the layer's tensors."""
    layers: dict[int, set[str]] = {}
    for name in names:
        number, _, rest = (
            name.removeprefix(f"{list_name}.").partition(".")
            if name.startswith(f"{list_name}.")
            else ("", "", "")
        )
        if number.isdecimal() and rest:
            layers.setdefault(int(number), set()).add(rest)
    return layers


def _layer_differences(
    source: Source, list_name: str, layers: Mapping[int, set[str]], period: int
) -> list[str]:
    """Describe what prevents the layers from being stacked."""
    missing = sorted(set(range(len(layers))) - set(layers))
    if missing or not layers:
        return [
            f"{list_name}: got layers {', '.join(map(str, sorted(layers))) or 'without numbers'}, "
            "expected all from 0"
        ]
    if len(layers) % period:
        return [
            f"{list_name}: got {len(layers)} layers, expected a multiple of the period, {period}"
        ]
    problems = []
    for number, rests in sorted(layers.items()):
        first = layers[number % period]
        problems += [
            f"{list_name}.{number}.{rest}: layer {number % period} lacks this tensor"
            for rest in sorted(rests - first)
        ]
        problems += [
            f"{list_name}.{number}.{rest}: is missing; layer {number % period} has it"
            for rest in sorted(first - rests)
        ]
    return problems or [
        problem
        for part in WEIGHTS
        for problem in _spec_differences(source, part, list_name, layers, period)
    ]


def _spec_differences(
    source: Source, part: str, list_name: str, layers: Mapping[int, set[str]], period: int
) -> list[str]:
    """Describe tensors whose shape or dtype differs from that of the first layer."""
    stored = set(source.names(part)) if part in source.parts else set()
    specs = source.specs(
        part,
        {
            name
            for layer, rests in layers.items()
            for rest in rests
            if (name := f"{list_name}.{layer}.{rest}") in stored
        },
    )
    problems = []
    for name, spec in specs.items():
        number, _, rest = name.removeprefix(f"{list_name}.").partition(".")
        first = specs.get(f"{list_name}.{int(number) % period}.{rest}", spec)
        if spec != first:
            description = f"got {spec.dtype} of shape {spec.shape}"
            problems.append(
                f"{part}:{name}: {description}, expected {first.dtype} of shape {first.shape} as "
                f"in layer {int(number) % period}"
            )
    return problems


def _stack_rules(list_name: str, count: int, dim: int, period: int) -> list[Rule]:
    """Return one rule for each layer of a period."""
    rules = []
    for offset in range(period):
        numbers = (
            "|".join(str(number) for number in range(offset, count, period))
            if period > 1
            else r"\d+"
        )
        pattern = rf"(?P<list>{re.escape(list_name)})\.(?P<layer>{numbers})\.(?P<rest>.+)"
        name = "{list}.{rest}" if period == 1 else f"{{list}}.{offset}.{{rest}}"
        stack = Over(over="layer", dim=dim, start=offset, step=period)
        rules.append(Rule(regex=(pattern,), to=(Target(name=name),), stack=stack))
    return rules


def _stacked_lists(names: Iterable[str], period: int) -> list[str]:
    number = r"\.\d+" if period > 1 else ""
    pattern = re.compile(rf"((?:.+\.)?(?:{'|'.join(_LIST_NAMES)}){number})\.(?!\d+\.).+")
    return sorted({match[1] for match in map(pattern.fullmatch, names) if match is not None})


def _uneven_lists(source: Source, names: Mapping[str, str], list_path: str, dim: int) -> list[str]:
    """Describe tensors whose number of layers differs from that of most others."""
    specs = {
        name: source.specs(part, [name])[name]
        for name, part in names.items()
        if name.startswith(f"{list_path}.") and name in source.names(part)
    }
    too_few_dims = [
        f"{name}: got shape {spec.shape}, expected a dim {dim}"
        for name, spec in specs.items()
        if not -len(spec.shape) <= dim < len(spec.shape)
    ]
    if too_few_dims or not specs:
        return too_few_dims or [f"{list_path}: no tensor name starts with this"]
    counts = {name: spec.shape[dim] for name, spec in specs.items()}
    sizes = list(counts.values())
    expected = max(sorted(set(sizes)), key=sizes.count)
    return [
        f"{name}: got {count} layers along dim {dim}, expected {expected} as in the rest of "
        f"{list_path}"
        for name, count in counts.items()
        if count != expected
    ]


def _unstack_rule(list_path: str, dim: int, period: int) -> Rule:
    list_name, _, offset = list_path.rpartition(".") if period > 1 else (list_path, "", "0")
    unstack = Over(over="layer", dim=dim, start=int(offset), step=period)
    return Rule(
        regex=(rf"{re.escape(list_path)}\.(?P<rest>.+)",),
        to=(Target(name=f"{list_name}.{{layer}}.{{rest}}"),),
        unstack=unstack,
    )

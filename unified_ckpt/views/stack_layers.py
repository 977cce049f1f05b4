"""Identical layers in one tensor with a dim for the layer, as scanned models have them, and one by one again. Both ways as views.

How layers could be mixed up: one of them lacks a tensor, or has it in another shape or dtype; the last group is not full. Each is refused
by name, before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format.renames import Over, Renames, Rule, Target
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, WEIGHTS, WITHOUT_MASTERS
from unified_ckpt.views.derived import Recut
from unified_ckpt.views.rename_rules import renamed

_WORDS = (
    "layers",
    "layer",
    "h",
    "blocks",
    "block",
)  # what the list of layers is called in models of others


def stack_layers(
    source: Source, *, dim: int = 0, lists: Collection[str] | None = None, period: int = 1
) -> Recut:
    """ "model.layers.3.mlp.weight" and its like become row 3 of "model.layers.mlp.weight" along `dim`; optimizer state and masters too.

    `lists`: the names of the lists of layers, "model.layers"; None: found out, each name that a number follows first. `period`: so many
    layers after each other differ, and each `period`th is alike: "model.layers.1.mlp.weight" then stands for the layers 1, 1 + period, ...
    FormatError naming the layers that differ.
    """
    names = _parameters(source)
    found = {one: _layers(names, one) for one in (_lists(names) if lists is None else lists)}
    problems = [
        problem for one, layers in found.items() for problem in _differ(source, one, layers, period)
    ]
    if problems or not found:
        raise FormatError(
            listed(
                "layers cannot be stacked",
                problems or ["no tensor has the number of a layer in its name"],
            )
        )
    return renamed(
        source,
        Renames(
            rules=tuple(
                rule for one in found for rule in _stack_rules(one, len(found[one]), dim, period)
            )
        ),
    )


def unstack_layers(
    source: Source, *, dim: int = 0, lists: Collection[str] | None = None, period: int = 1
) -> Recut:
    """The reverse. `lists`: None: found out, names that end in "layers", "h" or "blocks" and that no number follows."""
    names = _parameters(source)
    places = (
        _stacked_lists(names, period)
        if lists is None
        else [f"{one}.{k}" if period > 1 else one for one in lists for k in range(period)]
    )
    problems = [problem for place in places for problem in _uneven(source, names, place, dim)]
    if problems or not places:
        raise FormatError(
            listed(
                "layers cannot be unstacked",
                problems or [f"no name has a part {' or '.join(_WORDS)} before its end"],
            )
        )
    return renamed(
        source,
        Renames(rules=tuple(_unstack_rule(place, dim, period) for place in dict.fromkeys(places))),
    )


def _parameters(source: Source) -> dict[str, str]:
    """Names of tensors that stand for parameters, and a part that has each."""
    parts = [part for part in (MASTER, WITHOUT_MASTERS, MODEL) if part in source.parts]
    return {name: part for part in parts for name in (*source.names(part), *source.aliases(part))}


def _lists(names: Iterable[str]) -> list[str]:
    found = (re.match(r"(.+?)\.\d+\.", name) for name in names)
    return sorted({match[1] for match in found if match is not None})


def _layers(names: Iterable[str], of: str) -> dict[int, set[str]]:
    """Number -> what the layer has, by the rest of the names."""
    found: dict[int, set[str]] = {}
    for name in names:
        number, _, rest = (
            name.removeprefix(f"{of}.").partition(".")
            if name.startswith(f"{of}.")
            else ("", "", "")
        )
        if number.isdecimal() and rest:
            found.setdefault(int(number), set()).add(rest)
    return found


def _differ(source: Source, of: str, layers: Mapping[int, set[str]], period: int) -> list[str]:
    """What keeps layers from being one tensor."""
    lost = sorted(set(range(len(layers))) - set(layers))
    if lost or not layers:
        return [
            f"{of}: has layers {', '.join(map(str, sorted(layers))) or 'of no number'}; needed all from 0 on"
        ]
    if len(layers) % period:
        return [
            f"{of}: has {len(layers)} layers; needed a multiple of the period, {period}: the last group has {len(layers) % period}"
        ]
    problems = []
    for number, rests in sorted(layers.items()):
        first = layers[number % period]
        problems += [
            f"{of}.{number}.{rest}: layer {number % period} has none"
            for rest in sorted(rests - first)
        ]
        problems += [
            f"{of}.{number}.{rest}: is missing; layer {number % period} has one"
            for rest in sorted(first - rests)
        ]
    return problems or [
        problem for part in WEIGHTS for problem in _unlike(source, part, of, layers, period)
    ]


def _unlike(
    source: Source, part: str, of: str, layers: Mapping[int, set[str]], period: int
) -> list[str]:
    """Tensors of a part that have not the shape and dtype of those of the first layer."""
    stored = set(source.names(part)) if part in source.parts else set()
    specs = source.specs(
        part,
        {
            name
            for n, rests in layers.items()
            for rest in rests
            if (name := f"{of}.{n}.{rest}") in stored
        },
    )
    problems = []
    for name, spec in specs.items():
        number, _, rest = name.removeprefix(f"{of}.").partition(".")
        first = specs.get(f"{of}.{int(number) % period}.{rest}", spec)
        if spec != first:
            has = f"is {spec.dtype} of shape {spec.shape}"
            problems.append(
                f"{part}:{name}: {has}; layer {int(number) % period} has {first.dtype} of shape {first.shape}"
            )
    return problems


def _stack_rules(of: str, count: int, dim: int, period: int) -> list[Rule]:
    """One for each layer of a period."""
    rules = []
    for first in range(period):
        numbers = (
            "|".join(str(number) for number in range(first, count, period))
            if period > 1
            else r"\d+"
        )
        pattern = rf"(?P<list>{re.escape(of)})\.(?P<layer>{numbers})\.(?P<rest>.+)"
        name = "{list}.{rest}" if period == 1 else f"{{list}}.{first}.{{rest}}"
        stack = Over(over="layer", dim=dim, start=first, step=period)
        rules.append(Rule(regex=(pattern,), to=(Target(name=name),), stack=stack))
    return rules


def _stacked_lists(names: Iterable[str], period: int) -> list[str]:
    number = r"\.\d+" if period > 1 else ""
    pattern = re.compile(rf"((?:.+\.)?(?:{'|'.join(_WORDS)}){number})\.(?!\d+\.).+")
    return sorted({match[1] for match in map(pattern.fullmatch, names) if match is not None})


def _uneven(source: Source, names: Mapping[str, str], place: str, dim: int) -> list[str]:
    """Tensors of a list that have another number of layers than most have."""
    specs = {
        name: source.specs(part, [name])[name]
        for name, part in names.items()
        if name.startswith(f"{place}.") and name in source.names(part)
    }
    short = [
        f"{name}: has shape {spec.shape}; needed a dim {dim}"
        for name, spec in specs.items()
        if not -len(spec.shape) <= dim < len(spec.shape)
    ]
    if short or not specs:
        return short or [f"{place}: no tensor has a name under it"]
    counts = {name: spec.shape[dim] for name, spec in specs.items()}
    usual = _most(list(counts.values()))
    return [
        f"{name}: has {count} layers along dim {dim}; {place} has {usual}"
        for name, count in counts.items()
        if count != usual
    ]


def _most(counts: Sequence[int]) -> int:
    return max(sorted(set(counts)), key=counts.count)


def _unstack_rule(place: str, dim: int, period: int) -> Rule:
    of, _, first = place.rpartition(".") if period > 1 else (place, "", "0")
    unstack = Over(over="layer", dim=dim, start=int(first), step=period)
    return Rule(
        regex=(rf"{re.escape(place)}\.(?P<rest>.+)",),
        to=(Target(name=f"{of}.{{layer}}.{{rest}}"),),
        unstack=unstack,
    )

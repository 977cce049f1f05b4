"""Stacks identical layers into one tensor with a layer dim, as scanned models have, and unstacks
them.

How layers could be mixed up: a layer lacks a tensor or has another shape or dtype. The rename rules
that this makes refuse each by name, before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MASTER, MODEL, WITHOUT_MASTERS
from unified_ckpt.format.renames import Over, Renames, Rule, Target
from unified_ckpt.views.derived import DerivedSource
from unified_ckpt.views.rename_rules import apply_renames

# names of the list of layers in common models
_LIST_NAMES = ("layers", "layer", "h", "blocks", "block")


def stack_layers(source: Source, *, dim: int = 0) -> DerivedSource:
    """Stack "model.layers.3.mlp.weight" and the like into row 3 of "model.layers.mlp.weight".

    A list of layers is each name that is followed by a number. Optimizer state and master weights
    follow. FormatError naming layers that differ.
    """
    list_names = _numbered_lists(_parameters(source))
    if not list_names:
        raise FormatError("layers cannot be stacked: no tensor name contains a layer number")
    rules = tuple(
        Rule(
            regex=(rf"{re.escape(list_name)}\.(?P<layer>\d+)\.(?P<rest>.+)",),
            to=(Target(name=f"{list_name}.{{rest}}"),),
            stack=Over(over="layer", dim=dim),
        )
        for list_name in list_names
    )
    return apply_renames(source, Renames(rules=rules), rules_path="layers='stacked'")


def unstack_layers(source: Source, *, dim: int = 0) -> DerivedSource:
    """Reverse `stack_layers`.

    A list of layers is each name that ends in "layers", "h" or "blocks" and is not followed by a
    number. A source whose layers are all numbered stays as it is.
    """
    names = _parameters(source)
    pattern = re.compile(rf"((?:.+\.)?(?:{'|'.join(_LIST_NAMES)}))\.(?!\d+\.).+")
    list_names = sorted({match[1] for match in map(pattern.fullmatch, names) if match is not None})
    problems = [
        problem
        for list_name in list_names
        for problem in _uneven_lists(source, names, list_name, dim)
    ]
    is_unstacked = any(name.rpartition(".")[2] in _LIST_NAMES for name in _numbered_lists(names))
    if problems or not (list_names or is_unstacked):
        names_of_lists = " or ".join(_LIST_NAMES)
        problems = problems or [
            f"no tensor name contains {names_of_lists} before its last component"
        ]
        raise FormatError(format_list("layers cannot be unstacked", problems))
    rules = tuple(
        Rule(
            regex=(rf"{re.escape(list_name)}\.(?P<rest>.+)",),
            to=(Target(name=f"{list_name}.{{layer}}.{{rest}}"),),
            unstack=Over(over="layer", dim=dim),
        )
        for list_name in list_names
    )
    return apply_renames(source, Renames(rules=rules), rules_path="layers='unstacked'")


def _parameters(source: Source) -> dict[str, str]:
    """Names of tensors that are parameters, each with a part that has it."""
    parts = [part for part in (MASTER, WITHOUT_MASTERS, MODEL) if part in source.parts]
    return {name: part for part in parts for name in (*source.names(part), *source.aliases(part))}


def _numbered_lists(names: Iterable[str]) -> list[str]:
    matches = (re.match(r"(.+?)\.\d+\.", name) for name in names)
    return sorted({match[1] for match in matches if match is not None})


def _uneven_lists(source: Source, names: Mapping[str, str], list_name: str, dim: int) -> list[str]:
    """Describe tensors whose number of layers differs from that of most others."""
    specs = {
        name: source.specs(part, [name])[name]
        for name, part in names.items()
        if name.startswith(f"{list_name}.") and name in source.names(part)
    }
    too_few_dims = [
        f"{name}: got shape {spec.shape}, expected a dim {dim}"
        for name, spec in specs.items()
        if not -len(spec.shape) <= dim < len(spec.shape)
    ]
    if too_few_dims:
        return too_few_dims
    counts = {name: spec.shape[dim] for name, spec in specs.items()}
    sizes = list(counts.values())
    expected = max(sorted(set(sizes)), key=sizes.count, default=0)
    return [
        f"{name}: got {count} layers along dim {dim}, expected {expected} as in the rest of "
        f"{list_name}"
        for name, count in counts.items()
        if count != expected
    ]

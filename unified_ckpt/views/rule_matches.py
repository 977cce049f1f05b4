"""Finds the rename rule that matches a name, and the names that it outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format.renames import Over, Renames, Rule, captures, substitute
from unified_ckpt.views.rule_outputs import base_recipe


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A rule that matches a name.

    `targets` are the names that it outputs, with a placeholder for the number that it unstacks.
    `layer` is the number that it stacks; `pattern_index`, which of its patterns matched.
    """

    rule_index: int
    rule: Rule
    targets: tuple[str, ...]
    layer: str
    pattern_index: int


class Rules:
    """The rules of a file that apply to a part; with `named_only`, those that name the part."""

    def __init__(self, renames: Renames, part: str, *, named_only: bool = False) -> None:
        self._patterns = list[tuple[int, Rule, int, re.Pattern[str]]]()
        self._by_name: dict[str, tuple[int, Rule, int]] = {}  # thousands of rules may name one each
        for rule_index, rule in enumerate(renames.rules):
            if not named_only if rule.parts is None else part in rule.parts:
                if rule.has_plain_names:
                    for pattern_index, name in enumerate(rule.match):
                        self._by_name.setdefault(name, (rule_index, rule, pattern_index))
                else:
                    self._patterns += [
                        (rule_index, rule, pattern_index, pattern)
                        for pattern_index, pattern in enumerate(rule.patterns())
                    ]

    def match(self, name: str) -> RuleMatch | None:
        """Return the first rule that matches the name. A rule that only pads keeps the name."""
        plain = self._by_name.get(name)
        for rule_index, rule, pattern_index, pattern in self._patterns:
            if plain is not None and plain[0] < rule_index:
                break
            regex_match = pattern.fullmatch(name)
            if regex_match is not None:
                values = captures(regex_match)
                layer = values.pop(rule.stack.over) if rule.stack is not None else "0"
                targets = _targets(rule, name, values)
                return RuleMatch(rule_index, rule, targets, layer, pattern_index)
        if plain is None:
            return None
        rule_index, rule, pattern_index = plain
        return RuleMatch(rule_index, rule, _targets(rule, name, {}), "0", pattern_index)


def _targets(rule: Rule, name: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names that a rule outputs, for a name and what its placeholders matched."""
    if rule.pads_only:
        return (name,)
    return tuple(substitute(target.name, values) for target in rule.to)


def unstacked_names(
    source: Source, rule: Rule, over: Over, target: str, shape_rows: Sequence[Sequence[Key]]
) -> list[str]:
    """Return the names of the tensors that a rule unstacks. FormatError if the dim does not exist.

    `over`: the dim that it unstacks. `target`: their name, with a placeholder for the number.
    """
    shapes = {
        key: source.specs(key[0], [key[1]])[key[1]].shape for row in shape_rows for key in row
    }
    shape = base_recipe(rule, shape_rows, shapes, power=1).shape
    if not -len(shape) <= over.dim < len(shape):
        raise FormatError(
            f"{':'.join(shape_rows[0][0])}: cannot unstack dim {over.dim} of shape {shape}; "
            f"expected one of its {len(shape)} dims"
        )
    return [
        substitute(target, {over.over: str(over.start + index * over.step)})
        for index in range(shape[over.dim])
    ]


def only_renames(rule: Rule) -> bool:
    """Return whether a rule changes nothing but names."""
    reshapes = (
        rule.concat is not None
        or rule.stack is not None
        or rule.unstack is not None
        or rule.split is not None
    )
    return not reshapes and not rule.steps and not any(target.steps for target in rule.to)

"""Applies rename rules to a source: to its tensors, and to everything else that uses their names.

How a tensor could silently be lost: no rule matches it, two tensors get one name, or a layer of a
stack is missing. Each is an error that lists the names, before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS
from unified_ckpt.format.renames import Over, Renames, Rule
from unified_ckpt.views.derived import DerivedSource, Expr, Renamed
from unified_ckpt.views.renamed_metadata import renamed_metadata
from unified_ckpt.views.rule_matches import (
    RuleMatch,
    Rules,
    only_renames,
    unstacked_names,
)
from unified_ckpt.views.rule_outputs import STEP, RuleOutput


@dataclass(frozen=True, slots=True)
class _NamedTensors:
    """Tensors of a part, by the names that rules match.

    `alias_keys` are those names that are aliases; `shape_keys`, a tensor with the parameter's
    shape. `state` is the kind of optimizer state, None for tensors whose name is the key.
    """

    part: str
    keys: Mapping[str, Key]
    alias_keys: Mapping[str, Key]
    shape_keys: Mapping[str, Key]
    state: str | None = None

    def stored_name(self, name: str) -> str:
        """Return the full name in the part."""
        return name if self.state is None else f"{name}/{self.state}"


@dataclass(slots=True)
class _PartPlan:
    """What becomes of a part.

    `alias_only` holds names that come only from aliases; `used`, the indices of rules that matched;
    `pads`, the dims that may grow, by name.
    """

    exprs: dict[str, Expr] = field(default_factory=dict)
    alias_only: set[str] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    pads: dict[str, tuple[int, ...]] = field(default_factory=dict)


def apply_renames(source: Source, renames: Renames, *, rules_path: str = "rules") -> DerivedSource:
    """Return the source under the names that the rules give.

    `rules_path` names the rules' file in messages. FormatError listing what the rules leave
    undecided.
    """
    plans = {part: _part_plan(source, part, renames) for part in source.parts}
    problems = [problem for plan in plans.values() for problem in plan.problems]
    used = {rule_index for plan in plans.values() for rule_index in plan.used}
    rules = Rules(renames, MODEL)
    used |= {
        match.rule_index
        for match in map(rules.match, source.metadata().modules)
        if match is not None
    }
    for rule_index, rule in enumerate(renames.rules):
        if rule_index not in used and not rule.optional:
            problems.append(
                f"rule {rule_index + 1} ({', '.join((*rule.match, *rule.regex))}): matches no "
                "tensor; remove it, or set `optional = true`"
            )
    raise_if_any(FormatError, f"{rules_path}: rules do not fit the checkpoint", problems)
    resolved = {
        part: _resolve_aliases(plan)
        for part, plan in plans.items()
        if plan.exprs or not source.names(part)
    }
    exprs = {part: exprs for part, (exprs, _) in resolved.items()}
    aliases = {part: aliases for part, (_, aliases) in resolved.items()}
    pads = {
        (part, aliases.get(part, {}).get(name, name)): dims
        for part, plan in plans.items()
        for name, dims in plan.pads.items()
    }
    metadata, new_paths = renamed_metadata(source, renames, _shape_keys(source), pads)
    if any(group["names"] for group in metadata.groups):
        exprs.setdefault(OPTIMIZER, {})  # whose state rules drop, not its parameters
    return DerivedSource(source, exprs, aliases=aliases, metadata=metadata, new_paths=new_paths)


def _part_plan(source: Source, part: str, renames: Renames) -> _PartPlan:
    plan = _PartPlan()
    keys = {name: (part, name) for name in sorted(source.names(part))}
    if part == OPTIMIZER:
        _plan_optimizer(plan, source, keys, renames)
    else:
        alias_keys = {
            name: (part, target)
            for name, target in sorted(source.aliases(part).items())
            if name not in keys
        }
        _apply_rules(
            plan,
            source,
            _NamedTensors(part, keys | alias_keys, alias_keys, keys | alias_keys),
            Rules(renames, part),
            renames,
        )
    return plan


def _plan_optimizer(
    plan: _PartPlan, source: Source, keys: Mapping[str, Key], renames: Renames
) -> None:
    """Apply the optimizer's own rules first; other state follows its parameter."""
    optimizer_rules = Rules(renames, OPTIMIZER, named_only=True)
    matched = {name: key for name, key in keys.items() if optimizer_rules.match(name) is not None}
    _apply_rules(
        plan, source, _NamedTensors(OPTIMIZER, matched, {}, keys), optimizer_rules, renames
    )
    states: dict[str, dict[str, Key]] = {}
    for name in keys.keys() - matched.keys():
        fqn, _, state = name.rpartition("/")
        states.setdefault(state, {})[fqn] = keys[name]
    model_rules, shape_keys = Rules(renames, MODEL), _shape_keys(source)
    for state, keys_by_fqn in sorted(states.items()):
        _apply_rules(
            plan,
            source,
            _NamedTensors(OPTIMIZER, dict(sorted(keys_by_fqn.items())), {}, shape_keys, state),
            model_rules,
            renames,
        )


def _shape_keys(source: Source) -> dict[str, Key]:
    """A tensor with the shape of each parameter that has state."""
    shape_keys: dict[str, Key] = {}
    for name in sorted(source.names(OPTIMIZER)) if OPTIMIZER in source.parts else ():
        fqn, _, state = name.rpartition("/")
        if state != STEP:
            shape_keys.setdefault(fqn, (OPTIMIZER, name))
    for part in (MASTER, WITHOUT_MASTERS, MODEL):
        shape_keys |= (
            {name: (part, name) for name in source.names(part)} if part in source.parts else {}
        )
    return shape_keys


def _apply_rules(
    plan: _PartPlan, source: Source, tensors: _NamedTensors, rules: Rules, renames: Renames
) -> None:
    """Plan what becomes of the tensors under the rules."""
    matches: dict[tuple[int, tuple[str, ...]], list[tuple[RuleMatch, str]]] = {}
    for name, key in tensors.keys.items():
        match, is_alias = rules.match(name), name in tensors.alias_keys
        if match is not None:
            plan.used.add(match.rule_index)
        if match is not None and match.rule.pads_only:
            _add(
                plan,
                tensors,
                name,
                Renamed(key),
                alias_only=is_alias,
                pad=_pad_dims(source, tensors, match.rule, name),
            )
        elif match is not None:
            matches.setdefault((match.rule_index, match.targets), []).append((match, name))
        elif renames.unmatched == "keep" or (renames.unmatched == "error" and is_alias):
            _add(plan, tensors, name, Renamed(key), alias_only=is_alias)
        elif renames.unmatched == "error":
            plan.problems.append(f"{tensors.part}:{tensors.stored_name(name)}: no rule matches")
    plan.problems += [f"{tensors.part}: {problem}" for problem in _uneven_stacks(matches)]
    for (_, targets), matched in matches.items():
        if not matched[0][0].rule.drop:
            _add_outputs(plan, source, tensors, targets, matched)


def _pad_dims(source: Source, tensors: _NamedTensors, rule: Rule, name: str) -> tuple[int, ...]:
    """Dims along which an output may grow. State pads only if it has its parameter's shape."""
    shape_key = tensors.shape_keys.get(name)
    if not rule.pad or tensors.state == STEP or shape_key is None:
        return ()
    shape, stored_shape = (
        source.specs(key[0], [key[1]])[key[1]].shape for key in (shape_key, tensors.keys[name])
    )
    return rule.pad if tensors.state is None or shape == stored_shape else ()


def _uneven_stacks(
    matches: Mapping[tuple[int, tuple[str, ...]], Sequence[tuple[RuleMatch, str]]],
) -> Iterator[str]:
    """Describe stacks of one rule with different numbers: a last layer that lacks a tensor."""
    first: dict[int, tuple[str, set[str]]] = {}
    for (rule_index, targets), matched in matches.items():
        rule, layers = matched[0][0].rule, {match.layer for match, _ in matched}
        if rule.stack is None or rule.partial or rule.drop:
            continue
        first_target, first_layers = first.setdefault(rule_index, (targets[0], layers))
        if layers != first_layers:
            differing = ", ".join(sorted(layers ^ first_layers))
            yield (
                f"{targets[0]} stacks {len(layers)} tensors, {first_target} {len(first_layers)}; "
                f"add {differing} to both, or set `partial = true`"
            )


def _add_outputs(
    plan: _PartPlan,
    source: Source,
    tensors: _NamedTensors,
    targets: Sequence[str],
    matched: Sequence[tuple[RuleMatch, str]],
) -> None:
    """Plan the outputs of one rule for one set of target names."""
    rule, part, state = matched[0][0].rule, tensors.part, tensors.state
    rows, problems = _stack_rows(
        rule, matched, f"{part}:{', '.join(map(tensors.stored_name, targets))}"
    )
    if problems:
        plan.problems += problems
        return
    shape_key = None if state is None else tensors.shape_keys.get(rows[0][0])
    if rule.unstack is not None and state is not None and shape_key is None:
        stored_name = tensors.stored_name(rows[0][0])
        plan.problems.append(
            f"{part}:{stored_name}: the number of unstacked tensors is unknown; expected its "
            "parameter, or other state of it"
        )
        return
    output = RuleOutput(
        rule,
        tuple(tuple(tensors.keys[name] for name in row) for row in rows),
        0,
        state=state,
        shape_key=shape_key,
    )
    shape_rows = [
        [tensors.shape_keys.get(name, tensors.keys[name]) for name in row] for row in rows
    ]
    alias_only = all(name in tensors.alias_keys for row in rows for name in row)
    for name, expr in _output_exprs(source, output, targets, shape_rows):
        _add(
            plan,
            tensors,
            name,
            expr,
            alias_only=alias_only,
            pad=_pad_dims(source, tensors, rule, rows[0][0]),
        )


def _stack_rows(
    rule: Rule, matched: Sequence[tuple[RuleMatch, str]], output_names: str
) -> tuple[list[list[str]], list[str]]:
    """Return the names that a rule matched, by number and pattern, and what is wrong with them."""
    names_by_layer: dict[str, dict[int, list[str]]] = {}
    for match, name in matched:
        names_by_layer.setdefault(match.layer, {}).setdefault(match.pattern_index, []).append(name)
    invalid = [
        layer for layer in names_by_layer if not layer.isdecimal() or str(int(layer)) != layer
    ]
    if invalid:
        return [], [
            f"{output_names}: got {invalid[0]!r} as stack index of {names_by_layer[invalid[0]]}, "
            "expected a number"
        ]
    duplicates = [
        names
        for names_by_pattern in names_by_layer.values()
        for names in names_by_pattern.values()
        if len(names) > 1
    ]
    if duplicates:
        return [], [
            f"{output_names}: {' and '.join(names)} get the same name" for names in duplicates
        ]
    order = sorted(names_by_layer, key=int)
    over = rule.stack or Over(over="")
    expected = [str(over.start + position * over.step) for position in range(len(order))]
    if order != expected:
        missing_layers = sorted(set(expected) - set(order), key=int)
        return [], [
            f"{output_names}: {', '.join(missing_layers)} is missing in a stack of "
            f"{', '.join(order)}"
        ]
    patterns = rule.match or rule.regex
    missing = [
        (layer, index)
        for layer in order
        for index in range(len(patterns))
        if index not in names_by_layer[layer]
    ]
    if missing:
        layer, index = missing[0]
        sibling = next(iter(names_by_layer[layer].values()))[0]
        return [], [f"{output_names}: no tensor matches {patterns[index]} to accompany {sibling}"]
    return [
        [names_by_layer[layer][index][0] for index in range(len(patterns))] for layer in order
    ], []


def _output_exprs(
    source: Source, output: RuleOutput, targets: Sequence[str], shape_rows: Sequence[Sequence[Key]]
) -> Iterator[tuple[str, Expr]]:
    rule = output.rule
    for target_index, target in enumerate(targets):
        if only_renames(rule):
            yield target, Renamed(output.rows[0][0])
        elif rule.unstack is None:
            yield target, replace(output, target=target_index)
        else:
            names = unstacked_names(source, rule, rule.unstack, target, shape_rows)
            for index, name in enumerate(names):
                yield name, replace(output, target=target_index, index=index)


def _add(
    plan: _PartPlan,
    tensors: _NamedTensors,
    name: str,
    expr: Expr,
    *,
    alias_only: bool,
    pad: tuple[int, ...] = (),
) -> None:
    """Add an output. `name` is the name that rules see."""
    name = tensors.stored_name(name)
    if name in plan.exprs:
        sources = [
            f"{part}:{stored_name}"
            for stored_name, part in (
                (key[1], key[0]) for key in (*plan.exprs[name].stored, *expr.stored)
            )
        ]
        plan.problems.append(
            f"{tensors.part}:{name}: is the new name of {' and of '.join(dict.fromkeys(sources))}"
        )
        return
    plan.exprs[name] = expr
    if pad:
        plan.pads[name] = pad
    if alias_only:
        plan.alias_only.add(name)


def _resolve_aliases(plan: _PartPlan) -> tuple[dict[str, Expr], dict[str, str]]:
    """Return tensors and aliases. A name that comes only from an alias stays an alias."""
    first_names: dict[Expr, str] = {}
    for name in sorted(plan.exprs, key=lambda name: (name in plan.alias_only, name)):
        first_names.setdefault(plan.exprs[name], name)
    aliases = {
        name: first_names[plan.exprs[name]]
        for name in plan.alias_only
        if first_names[plan.exprs[name]] != name
    }
    return {name: expr for name, expr in plan.exprs.items() if name not in aliases}, aliases

"""Rename rules on a source: which of its tensors each rule has, what they become, and what else is called by their names.

How a tensor could be lost without a word: no rule has it, two become one name, a layer of a stack is missing. Each is an error that lists
the names, before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format.renames import Over, Renames, Rule, captures, filled
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS
from unified_ckpt.views.derived import Formula, Recut, Renamed
from unified_ckpt.views.rule_outputs import COUNT, Product, made_of


@dataclass(frozen=True, slots=True)
class _Match:
    """`number`: of the rule; `targets`: the names that it makes, with a hole left for the number that it unstacks; `layer`: the number
    that it stacks; `pattern`: which of its patterns it is."""

    number: int
    rule: Rule
    targets: tuple[str, ...]
    layer: str
    pattern: int


class _Rules:
    """Some rules of a file, by their numbers in it."""

    def __init__(self, numbered: Sequence[tuple[int, Rule]]) -> None:
        self._tried = [
            (number, rule, index, one)
            for number, rule in numbered
            for index, one in enumerate(rule.patterns())
        ]

    def match(self, name: str) -> _Match | None:
        """The first that has this name. A rule that only pads makes the name itself."""
        for number, rule, index, pattern in self._tried:
            found = pattern.fullmatch(name)
            if found is not None:
                values = captures(found)
                layer = values.pop(rule.stack.over) if rule.stack is not None else "0"
                targets = (
                    (name,)
                    if rule.pads_only
                    else tuple(filled(target.name, values) for target in rule.to)
                )
                return _Match(number, rule, targets, layer, index)
        return None


@dataclass(frozen=True, slots=True)
class _Members:
    """Tensors of a part, by the names that rules are for. `others`: those of them that are aliases; `leaders`: what has the shape of
    each; `state`: None for tensors that have the names themselves."""

    part: str
    keys: Mapping[str, Key]
    others: Mapping[str, Key]
    leaders: Mapping[str, Key]
    state: str | None = None

    def stored(self, name: str) -> str:
        return name if self.state is None else f"{name}/{self.state}"


@dataclass(slots=True)
class _Plan:
    """What becomes of a part. `foreign`: names that only aliases have led to; `used`: rules by number; `pads`: dims, by name."""

    made: dict[str, Formula] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    pads: dict[str, tuple[int, ...]] = field(default_factory=dict)


def renamed(source: Source, renames: Renames, *, where: str = "rules") -> Recut:
    """The source by the rules. FormatError listing what they leave in doubt. `where`: the rules' file, for people."""
    plans = {part: _part_plan(source, part, renames) for part in source.parts}
    problems = [problem for plan in plans.values() for problem in plan.problems]
    used = {number for plan in plans.values() for number in plan.used}
    rules = _rules_of(renames, MODEL)
    used |= {match.number for match in map(rules.match, source.said().modules) if match is not None}
    for number, rule in enumerate(renames.rules):
        if number not in used and not rule.optional:
            problems.append(
                f"rule {number + 1} ({', '.join((*rule.match, *rule.regex))}): matches no tensor; `optional = true` allows that"
            )
    if problems:
        raise FormatError(listed(f"{where}: does not fit the checkpoint", problems))
    settled = {
        part: _settled(plan) for part, plan in plans.items() if plan.made or not source.names(part)
    }
    made, aliases = (
        {part: made for part, (made, _) in settled.items()},
        {part: aliases for part, (_, aliases) in settled.items()},
    )
    pads = {
        (part, aliases.get(part, {}).get(name, name)): dims
        for part, plan in plans.items()
        for name, dims in plan.pads.items()
    }
    return Recut(source, made, aliases=aliases, said=_said(source, renames, pads))


def _rules_of(renames: Renames, part: str) -> _Rules:
    return _Rules(
        [
            (number, rule)
            for number, rule in enumerate(renames.rules)
            if rule.parts is None or part in rule.parts
        ]
    )


def _part_plan(source: Source, part: str, renames: Renames) -> _Plan:
    plan = _Plan()
    keys = {name: (part, name) for name in sorted(source.names(part))}
    if part == OPTIMIZER:
        _plan_optimizer(plan, source, keys, renames)
    else:
        others = {
            name: (part, of)
            for name, of in sorted(source.aliases(part).items())
            if name not in keys
        }
        _assign(
            plan,
            source,
            _Members(part, keys | others, others, keys | others),
            _rules_of(renames, part),
            renames,
        )
    return plan


def _plan_optimizer(plan: _Plan, source: Source, keys: Mapping[str, Key], renames: Renames) -> None:
    """Rules of its own first; the rest of the state follows the parameters."""
    own = _Rules(
        [
            (number, rule)
            for number, rule in enumerate(renames.rules)
            if rule.parts is not None and OPTIMIZER in rule.parts
        ]
    )
    told = {name: key for name, key in keys.items() if own.match(name) is not None}
    _assign(plan, source, _Members(OPTIMIZER, told, {}, keys), own, renames)
    states: dict[str, dict[str, Key]] = {}
    for name in keys.keys() - told.keys():
        fqn, _, state = name.rpartition("/")
        states.setdefault(state, {})[fqn] = keys[name]
    follow, leaders = _rules_of(renames, MODEL), _leaders(source)
    for state, members in sorted(states.items()):
        _assign(
            plan,
            source,
            _Members(OPTIMIZER, dict(sorted(members.items())), {}, leaders, state),
            follow,
            renames,
        )


def _leaders(source: Source) -> dict[str, Key]:
    """A tensor with the shape of each parameter that has state."""
    found: dict[str, Key] = {}
    for name in sorted(source.names(OPTIMIZER)) if OPTIMIZER in source.parts else ():
        fqn, _, state = name.rpartition("/")
        if state != COUNT:
            found.setdefault(fqn, (OPTIMIZER, name))
    for part in (MASTER, WITHOUT_MASTERS, MODEL):
        found |= {name: (part, name) for name in source.names(part)} if part in source.parts else {}
    return found


def _assign(
    plan: _Plan, source: Source, members: _Members, rules: _Rules, renames: Renames
) -> None:
    """What becomes of the members by the rules."""
    found: dict[tuple[int, tuple[str, ...]], list[tuple[_Match, str]]] = {}
    for name, key in members.keys.items():
        match, is_alias = rules.match(name), name in members.others
        if match is not None:
            plan.used.add(match.number)
        if match is not None and match.rule.pads_only:
            _put(
                plan,
                members,
                name,
                Renamed(key),
                foreign=is_alias,
                pad=_pad(source, members, match.rule, name),
            )
        elif match is not None:
            found.setdefault((match.number, match.targets), []).append((match, name))
        elif renames.unmatched == "keep" or (renames.unmatched == "error" and is_alias):
            _put(plan, members, name, Renamed(key), foreign=is_alias)
        elif renames.unmatched == "error":
            plan.problems.append(f"{members.part}:{members.stored(name)}: no rule has it")
    plan.problems += [f"{members.part}: {problem}" for problem in _uneven(found)]
    for (_, targets), matched in found.items():
        if not matched[0][0].rule.drop:
            _produce(plan, source, members, targets, matched)


def _pad(source: Source, members: _Members, rule: Rule, name: str) -> tuple[int, ...]:
    """The dims along which what a rule makes of this tensor may grow: of state only where it has its parameter's shape."""
    leader = members.leaders.get(name)
    if not rule.pad or members.state == COUNT or leader is None:
        return ()
    shape, own = (
        source.specs(key[0], [key[1]])[key[1]].shape for key in (leader, members.keys[name])
    )
    return rule.pad if members.state is None or shape == own else ()


def _uneven(
    found: Mapping[tuple[int, tuple[str, ...]], Sequence[tuple[_Match, str]]],
) -> Iterator[str]:
    """Stacks of one rule that have not the same numbers: a layer at the end that lacks a tensor is seen by nothing else."""
    first: dict[int, tuple[str, set[str]]] = {}
    for (number, targets), matched in found.items():
        rule, layers = matched[0][0].rule, {match.layer for match, _ in matched}
        if rule.stack is None or rule.partial or rule.drop:
            continue
        other, known = first.setdefault(number, (targets[0], layers))
        if layers != known:
            apart = ", ".join(sorted(layers ^ known))
            yield f"{targets[0]} is stacked of {len(layers)}, {other} of {len(known)}; needed both of {apart}, or `partial = true`"


def _produce(
    plan: _Plan,
    source: Source,
    members: _Members,
    targets: Sequence[str],
    matched: Sequence[tuple[_Match, str]],
) -> None:
    """The tensors that one rule makes of what it has found for one set of names."""
    rule, part, state = matched[0][0].rule, members.part, members.state
    rows, problems = _rows(rule, matched, f"{part}:{', '.join(map(members.stored, targets))}")
    if problems:
        plan.problems += problems
        return
    leader = None if state is None else members.leaders.get(rows[0][0])
    if rule.unstack is not None and state is not None and leader is None:
        lost = members.stored(rows[0][0])
        plan.problems.append(
            f"{part}:{lost}: how many it becomes is not known; needed its parameter, or other state of it"
        )
        return
    product = Product(
        rule,
        tuple(tuple(members.keys[name] for name in row) for row in rows),
        0,
        state=state,
        leader=leader,
    )
    shaped = [[members.leaders.get(name, members.keys[name]) for name in row] for row in rows]
    foreign = all(name in members.others for row in rows for name in row)
    for name, formula in _formulas(source, product, targets, shaped):
        _put(
            plan,
            members,
            name,
            formula,
            foreign=foreign,
            pad=_pad(source, members, rule, rows[0][0]),
        )


def _rows(
    rule: Rule, members: Sequence[tuple[_Match, str]], what: str
) -> tuple[list[list[str]], list[str]]:
    """The tensors of a rule by number and pattern, and what is wrong with them. `what`: they become."""
    places: dict[str, dict[int, list[str]]] = {}
    for match, name in members:
        places.setdefault(match.layer, {}).setdefault(match.pattern, []).append(name)
    wrong = [layer for layer in places if not layer.isdecimal() or str(int(layer)) != layer]
    if wrong:
        return [], [
            f"{what}: {places[wrong[0]]} would be number {wrong[0]!r} of a stack; needed a number"
        ]
    twice = [names for of in places.values() for names in of.values() if len(names) > 1]
    if twice:
        return [], [f"{what}: {' and '.join(names)} have one name" for names in twice]
    order = sorted(places, key=int)
    over = rule.stack or Over(over="")
    wanted = [str(over.start + k * over.step) for k in range(len(order))]
    if order != wanted:
        lost = sorted(set(wanted) - set(order), key=int)
        return [], [
            f"{what}: number {', '.join(lost)} is missing of a stack that has {', '.join(order)}"
        ]
    patterns = rule.match or rule.regex
    missing = [
        (layer, index)
        for layer in order
        for index in range(len(patterns))
        if index not in places[layer]
    ]
    if missing:
        layer, index = missing[0]
        beside = next(iter(places[layer].values()))[0]
        return [], [f"{what}: nothing matches {patterns[index]} beside {beside}"]
    return [[places[layer][index][0] for index in range(len(patterns))] for layer in order], []


def _formulas(
    source: Source, product: Product, targets: Sequence[str], leaders: Sequence[Sequence[Key]]
) -> Iterator[tuple[str, Formula]]:
    rule = product.rule
    for number, target in enumerate(targets):
        if _only_renames(rule):
            yield target, Renamed(product.rows[0][0])
        elif rule.unstack is None:
            yield target, replace(product, target=number)
        else:
            for index in range(_count(source, rule, leaders)):
                yield (
                    filled(
                        target,
                        {rule.unstack.over: str(rule.unstack.start + index * rule.unstack.step)},
                    ),
                    replace(product, target=number, index=index),
                )


def _count(source: Source, rule: Rule, rows: Sequence[Sequence[Key]]) -> int:
    """How many tensors a rule unstacks. FormatError where the dim is not there."""
    shapes = {key: source.specs(key[0], [key[1]])[key[1]].shape for row in rows for key in row}
    shape, dim = (
        made_of(rule, rows, shapes, power=1).shape,
        rule.unstack.dim if rule.unstack is not None else 0,
    )
    if not -len(shape) <= dim < len(shape):
        raise FormatError(
            f"{':'.join(rows[0][0])}: unstack of dim {dim} of shape {shape}; needed one of its {len(shape)} dims"
        )
    return shape[dim]


def _put(
    plan: _Plan,
    members: _Members,
    name: str,
    formula: Formula,
    *,
    foreign: bool,
    pad: tuple[int, ...] = (),
) -> None:
    """`name`: as rules have it."""
    name = members.stored(name)
    if name in plan.made:
        sources = [
            f"{of}:{one}"
            for one, of in ((key[1], key[0]) for key in (*plan.made[name].stored, *formula.stored))
        ]
        plan.problems.append(
            f"{members.part}:{name}: becomes the name of {' and of '.join(dict.fromkeys(sources))}"
        )
        return
    plan.made[name] = formula
    if pad:
        plan.pads[name] = pad
    if foreign:
        plan.foreign.add(name)


def _settled(plan: _Plan) -> tuple[dict[str, Formula], dict[str, str]]:
    """Tensors, and aliases: names that only aliases led to, of what is made under another name as well."""
    first: dict[Formula, str] = {}
    for name in sorted(plan.made, key=lambda name: (name in plan.foreign, name)):
        first.setdefault(plan.made[name], name)
    aliases = {
        name: first[plan.made[name]] for name in plan.foreign if first[plan.made[name]] != name
    }
    return {name: formula for name, formula in plan.made.items() if name not in aliases}, aliases


# ---- what else has names


def _said(source: Source, renames: Renames, pads: Mapping[Key, Sequence[int]]) -> Said:
    """Param groups and plain optimizer state under the new names. FormatError where parameters that become one differ in them."""
    said = source.said()
    leaders, rules = _leaders(source), _rules_of(renames, MODEL)

    def become(fqn: str) -> list[str]:
        match = rules.match(fqn)
        if match is None:
            return [] if renames.unmatched == "drop" else [fqn]
        unstack = match.rule.unstack
        if unstack is None:
            return list(match.targets)
        count = _count(source, match.rule, [[leaders[fqn]]]) if fqn in leaders else 0
        numbers = [str(unstack.start + index * unstack.step) for index in range(count)]
        return [
            filled(target, {unstack.over: number}) for target in match.targets for number in numbers
        ]

    owners: dict[str, int] = {}
    groups = []
    for number, group in enumerate(said.groups):
        names = list(dict.fromkeys(name for fqn in group["names"] for name in become(fqn)))
        for name in names:
            other = said.groups[owners.setdefault(name, number)]
            if other["options"] != group["options"]:
                raise FormatError(
                    f"{name}: is made of parameters whose hyperparameters differ; needed one param group for all of them"
                )
        groups.append({**group, "names": [name for name in names if owners[name] == number]})
    scalars: dict[str, Mapping[str, Any]] = {}
    for fqn, state in said.scalars.items():
        for name in become(fqn):
            if scalars.setdefault(name, state) != state:
                raise FormatError(
                    f"{name}: is made of parameters whose optimizer state {', '.join(state)} differs; needed equal values"
                )
    modules = {
        name: value
        for fqn, value in said.modules.items()
        for name in _module_names(fqn, rules, renames)
    }
    return replace(
        said, groups=groups, scalars=scalars, modules=modules, pads={**said.pads, **pads}
    )


def _module_names(fqn: str, rules: _Rules, renames: Renames) -> Sequence[str]:
    """What becomes of the state that a module keeps beside tensors. FormatError where more than its name would change."""
    match = rules.match(fqn)
    if match is None:
        return [] if renames.unmatched == "drop" else [fqn]
    if not match.rule.drop and not _only_renames(match.rule):
        raise FormatError(
            f"{fqn}: is a module's own state, no tensor, and a rule does more than rename it; needed one before that drops it"
        )
    return match.targets


def _only_renames(rule: Rule) -> bool:
    joins = (
        rule.concat is not None
        or rule.stack is not None
        or rule.unstack is not None
        or rule.split is not None
    )
    return not joins and not rule.steps and not any(target.steps for target in rule.to)

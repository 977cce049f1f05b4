"""Whether saved optimizer state is what the target's next step reads. Reads step counts, no other bytes.

How state could be lost: another class's state lies beside what the step reads, and the step starts afresh, or raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from unified_ckpt.core.geometry import whole
from unified_ckpt.engine.match import names_of
from unified_ckpt.engine.source import Said, Source
from unified_ckpt.runtime.optimizer_rules import COUNTER, StateRule, class_name, state_rule
from unified_ckpt.runtime.optimizer_target import RUNTIME_OPTIONS, OptimizerTarget, saved_groups
from unified_ckpt.runtime.optimizers import is_master
from unified_ckpt.runtime.state import OPTIMIZER
from unified_ckpt.runtime.tensors import TORCH_DTYPES

Aliases = Mapping[str, Mapping[str, str]]


def misfits(target: OptimizerTarget, source: Source, said: Said, aliases: Aliases, *, current: bool) -> list[str]:
    """A sentence for each param group whose saved state its next step cannot go on from; `target.left` has its parameters.

    `current`: the optimizer's own hyperparameters are kept. Moves step counts to where the next step reads them.
    """
    problems = []
    states: dict[str, set[str]] = {fqn: set(state) for fqn, state in said.scalars.items()}
    for key in target.tensors:
        fqn, _, name = key.rpartition("/")
        states.setdefault(fqn, set()).add(name)
    for number, (optimizer, group) in enumerate(target.groups()):
        saved = saved_groups(target.names, group, said.groups)
        options = dict(saved[0]["options"]) if saved else {}
        kinds = sorted({one["optimizer"] for one in saved if one.get("optimizer")})
        chosen = {**group, **(options if not current else {})}
        problem = _state_misfit(target, optimizer, chosen, states, options, kinds)
        if not problem and kinds not in ([], [class_name(optimizer)]) and not _is_proved(target, optimizer, chosen, states):
            problem = "" if current and not _stored(target, group, states) else _option_misfit(optimizer, options, kinds)
        if not problem:
            problem = _count_in_group(target, number, optimizer, group, states, options, source, said, aliases)
        if problem:
            problems.append(problem)
            target.left.update(target.names[id(param)] for param in group["params"])
    return problems


def _stored(target: OptimizerTarget, group: Mapping[str, Any], states: Mapping[str, set[str]]) -> list[str]:
    """The parameters of a group that have state in the checkpoint."""
    return [fqn for fqn in (target.names[id(param)] for param in group["params"]) if states.get(fqn)]


def _rule(optimizer: Optimizer, param: torch.Tensor, options: Mapping[str, Any]) -> StateRule | None:
    """The rule; of a class that is not known, what the optimizer has now."""
    rule = state_rule(optimizer, param, options)
    existing = {key for key, value in optimizer.state.get(param, {}).items() if not is_master(key, value, param)}
    return rule if rule is not None or not existing else StateRule(frozenset(existing))


def _state_misfit(
    target: OptimizerTarget,
    optimizer: Optimizer,
    chosen: Mapping[str, Any],
    states: Mapping[str, set[str]],
    options: Mapping[str, Any],
    kinds: Sequence[str],
) -> str:
    """`chosen`: the group with the options that it will have; `options`: those saved."""
    own = class_name(optimizer)
    for param in chosen["params"]:
        fqn = target.names[id(param)]
        rule, saved = _rule(optimizer, param, chosen), states.get(fqn, set())
        if rule is None or not saved or (state_rule(optimizer, param, chosen) is None and kinds in ([], [own])):
            continue
        if COUNTER in rule.required - saved and COUNTER in options:
            target.steps[fqn] = float(options[COUNTER])
            saved = saved | {COUNTER}
        stray = saved - rule.required - rule.optional - ({COUNTER} if rule.counts_in_group else set())
        if stray or rule.required - saved:
            reads = f"{own} reads {', '.join(sorted(rule.required or rule.optional))}"
            has = f"the checkpoint has {', '.join(sorted(saved))} of {' and '.join(kinds) or 'another optimizer'}"
            return f"optimizer:{fqn}: {has}; {reads}; {_remedy(kinds)}"
    return ""


def _remedy(kinds: Sequence[str]) -> str:
    return f"load into {' or '.join(kinds) or 'the class that was saved'}, or leave the optimizer out with LoadOptions(parts=...)"


def _is_proved(target: OptimizerTarget, optimizer: Optimizer, chosen: Mapping[str, Any], states: Mapping[str, set[str]]) -> bool:
    """Whether the names of the saved state show that it is what this class reads."""
    params = (param for param in chosen["params"] if states.get(target.names[id(param)]))
    return any((rule := _rule(optimizer, param, chosen)) is not None and rule.required for param in params)


def _option_misfit(optimizer: Optimizer, options: Mapping[str, Any], kinds: Sequence[str]) -> str:
    lacking = sorted(optimizer.defaults.keys() - options.keys() - set(RUNTIME_OPTIONS))
    if not lacking:
        return ""
    own = class_name(optimizer)
    return f"optimizer: the checkpoint's is {' and '.join(kinds)}, without {', '.join(lacking)} of {own}; {_remedy(kinds)}"


def _count_in_group(
    target: OptimizerTarget,
    number: int,
    optimizer: Optimizer,
    group: Mapping[str, Any],
    states: Mapping[str, set[str]],
    options: Mapping[str, Any],
    source: Source,
    said: Said,
    aliases: Aliases,
) -> str:
    """Fills `target.group_steps`, from the parameters' counts or the group's own, which is state and no hyperparameter."""
    if not any((rule := state_rule(optimizer, param, group)) is not None and rule.counts_in_group for param in group["params"]):
        return ""
    counts: dict[int, str] = {}
    for param in group["params"]:
        fqn = target.names[id(param)]
        if COUNTER in said.scalars.get(fqn, {}):
            counts.setdefault(int(said.scalars[fqn][COUNTER]), fqn)
        elif COUNTER in states.get(fqn, ()):
            names = (f"{name}/{COUNTER}" for name in names_of(fqn, OPTIMIZER, OPTIMIZER, source, aliases))
            key = next(name for name in names if name in source.names(OPTIMIZER))
            spec = source.specs(OPTIMIZER, {key})[key]
            body = bytearray(source.read(OPTIMIZER, key, whole(spec.shape)))
            counts.setdefault(int(torch.frombuffer(body, dtype=TORCH_DTYPES[spec.dtype]).max()), fqn)
    if len(counts) > 1:
        (first, one), (second, other) = list(counts.items())[:2]
        return f"optimizer: {one} is at step {first}, {other} at step {second}; {class_name(optimizer)} has one count for its group"
    if counts:
        target.group_steps[number] = next(iter(counts))
    elif COUNTER in options:
        target.group_steps[number] = int(options[COUNTER])
    elif stored := _stored(target, group, states):
        return f"optimizer:{stored[0]}: the checkpoint has no step count, which {class_name(optimizer)} reads; {_remedy(())}"
    return ""

"""Whether saved optimizer state is what the target's next step reads. Reads step counts, no other bytes.

How state could be lost: another class's state lies beside what the step reads, and the step starts afresh, or raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from unified_ckpt.core.sharding.boxes import whole
from unified_ckpt.engine.load.match import TensorNames
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.runtime.torch_state.flatten import OPTIMIZER
from unified_ckpt.runtime.torch_state.optimizer_rules import (
    COUNTER,
    MASTER_KEYS,
    StateRule,
    class_name,
    state_rule,
)
from unified_ckpt.runtime.torch_state.optimizer_target import (
    RUNTIME_OPTIONS,
    OptimizerTarget,
    saved_groups,
)
from unified_ckpt.runtime.torch_state.optimizers import is_master
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

Aliases = Mapping[str, Mapping[str, str]]


def misfits(
    target: OptimizerTarget, source: Source, said: Said, aliases: Aliases, *, current: bool
) -> list[str]:
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
        options = saved[0]["options"] if saved else {}
        one = _Group(
            optimizer,
            chosen=dict(group) if current else {**group, **options},
            saved_options=options,
            kinds=sorted({part["optimizer"] for part in saved if part.get("optimizer")}),
            states={
                target.names[id(param)]: states.get(target.names[id(param)], set())
                for param in group["params"]
            },
        )
        problem = _state_misfit(one, target.steps) or _class_misfit(one, current=current)
        if not problem and one.counts_in_group:
            counts = _counts(one, source, said, aliases)
            problem = _count_misfit(one, counts)
            target.group_steps.update((number, count) for count in counts)
        if problem:
            problems.append(problem)
            target.left.update(one.states)
    return problems


@dataclass(frozen=True, slots=True)
class _Group:
    """A param group. `chosen`: with the options that it will have; `saved_options`, `kinds`: those saved, and the classes that they are of;
    `states`: by parameter, the names of its saved state."""

    optimizer: Optimizer
    chosen: Mapping[str, Any]
    saved_options: Mapping[str, Any]
    kinds: Sequence[str]
    states: Mapping[str, set[str]]

    @property
    def name(self) -> str:
        return class_name(self.optimizer)

    @property
    def remedy(self) -> str:
        if self.kinds == [self.name]:
            return "give it the saved hyperparameters, or leave the optimizer out with LoadOptions(parts=...)"
        saved = " or ".join(self.kinds) or "the class that was saved"
        return f"load into {saved}, or leave the optimizer out with LoadOptions(parts=...)"

    @property
    def counts_in_group(self) -> bool:
        rules = (state_rule(self.optimizer, param, self.chosen) for param in self.chosen["params"])
        return any(rule is not None and rule.counts_in_group for rule in rules)

    def rules(self) -> Iterator[tuple[str, StateRule]]:
        """The rule for each parameter with saved state; of a class that is not known, what the optimizer has now."""
        for (fqn, saved), param in zip(self.states.items(), self.chosen["params"], strict=True):
            rule = state_rule(self.optimizer, param, self.chosen)
            if rule is None and self.kinds not in ([], [self.name]):
                existing = self.optimizer.state.get(param, {}).items()
                names = frozenset(
                    key for key, value in existing if not is_master(key, value, param)
                )
                rule = StateRule(names) if names else None
            if saved and rule is not None:
                yield fqn, rule


def _state_misfit(group: _Group, steps: dict[str, float]) -> str:
    """Fills `steps` with counts of the saved group that this class keeps by parameter."""
    for fqn, rule in group.rules():
        saved = group.states[fqn]
        if COUNTER in rule.required - saved and COUNTER in group.saved_options:
            steps[fqn] = float(group.saved_options[COUNTER])
            saved = saved | {COUNTER}
        stray = (
            saved - rule.required - rule.optional - ({COUNTER} if rule.counts_in_group else set())
        )
        if group.kinds == [group.name]:
            stray = set()  # what a job keeps there itself
        if stray or rule.required - saved:
            has = f"the checkpoint has {', '.join(sorted(saved))} of {' and '.join(group.kinds) or 'another optimizer'}"
            reads = sorted(rule.required or rule.optional - set(MASTER_KEYS))
            return f"optimizer:{fqn}: {has}; {group.name} reads {', '.join(reads)}; {group.remedy}"
    return ""


def _class_misfit(group: _Group, *, current: bool) -> str:
    """Where state names prove nothing: another class, whose state or hyperparameters the checkpoint lacks."""
    if group.kinds in ([], [group.name]):
        return ""
    rules = [rule for _, rule in group.rules()]
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(group.optimizer).__mro__}
    moved = {kind.rpartition(".")[2] for kind in group.kinds} == {type(group.optimizer).__name__}
    if any(group.states.values()) and not rules and not moved and not names.issuperset(group.kinds):
        return (
            f"optimizer: the checkpoint's state is of {' and '.join(group.kinds)}, and what {group.name} reads is not known before its "
            f"first step; {group.remedy}, or step it once before the load"
        )
    if any(rule.required for rule in rules) or (current and not any(group.states.values())):
        return ""
    lacking = sorted(
        group.optimizer.defaults.keys() - group.saved_options.keys() - set(RUNTIME_OPTIONS)
    )
    if not lacking:
        return ""
    return f"optimizer: the checkpoint's is {' and '.join(group.kinds)}, without {', '.join(lacking)} of {group.name}; {group.remedy}"


def _counts(group: _Group, source: Source, said: Said, aliases: Aliases) -> dict[int, str]:
    """Step counts in the checkpoint, each with a parameter: by parameter, or of the saved group. They are state, no hyperparameters."""
    counts: dict[int, str] = {}
    names_of = TensorNames(source, aliases)
    for fqn, state in group.states.items():
        if COUNTER in said.scalars.get(fqn, {}):
            counts.setdefault(int(said.scalars[fqn][COUNTER]), fqn)
        elif COUNTER in state:
            names = (f"{name}/{COUNTER}" for name in names_of(fqn, OPTIMIZER, OPTIMIZER))
            key = next(name for name in names if name in source.names(OPTIMIZER))
            spec = source.specs(OPTIMIZER, {key})[key]
            body = bytearray(source.read(OPTIMIZER, key, whole(spec.shape)))
            counts.setdefault(
                int(torch.frombuffer(body, dtype=TORCH_DTYPES[spec.dtype]).max()), fqn
            )
    if not counts and COUNTER in group.saved_options:
        counts[int(group.saved_options[COUNTER])] = next(iter(group.states), "")
    return counts


def _count_misfit(group: _Group, counts: Mapping[int, str]) -> str:
    stored = next((fqn for fqn, state in group.states.items() if state), None)
    if not counts and stored is not None:
        return f"optimizer:{stored}: the checkpoint has no step count, which {group.name} reads; {group.remedy}"
    if len(counts) < 2:
        return ""
    (first, one), (second, other) = list(counts.items())[:2]
    return f"optimizer: {one} is at step {first}, {other} at step {second}; {group.name} has one count for its group; {group.remedy}"

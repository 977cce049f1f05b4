"""Whether saved optimizer state is what the target's next step reads. Reads step counts, no other
bytes.

How state could be lost: another class's state lies beside what the step reads, and the step starts
afresh, or raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.engine.load.match import TensorNames
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.runtime.torch_state.flatten import OPTIMIZER
from unified_ckpt.runtime.torch_state.optimizer_rules import (
    MASTER_KEYS,
    STEP,
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


def state_mismatches(
    target: OptimizerTarget,
    source: Source,
    metadata: SourceMetadata,
    aliases: Aliases,
    *,
    keep_current: bool,
) -> list[str]:
    """A sentence for each param group whose saved state its next step cannot go on from;
    `target.left` has its parameters.

    `keep_current`: the optimizer's own hyperparameters are kept. Moves step counts to where the
    next step reads them.
    """
    problems = []
    states: dict[str, set[str]] = {fqn: set(state) for fqn, state in metadata.scalars.items()}
    for key in target.tensors:
        fqn, _, name = key.rpartition("/")
        states.setdefault(fqn, set()).add(name)
    for number, (optimizer, group) in enumerate(target.groups()):
        saved = saved_groups(target.names, group, metadata.groups)
        options = saved[0]["options"] if saved else {}
        group_state = _GroupState(
            optimizer,
            effective=dict(group) if keep_current else {**group, **options},
            saved_options=options,
            saved_classes=sorted({part["optimizer"] for part in saved if part.get("optimizer")}),
            states={
                target.names[id(param)]: states.get(target.names[id(param)], set())
                for param in group["params"]
            },
        )
        problem = _state_mismatch(group_state, target.param_steps) or _class_mismatch(
            group_state, keep_current=keep_current
        )
        if not problem and group_state.counts_in_group:
            counts = _step_counts(group_state, source, metadata, aliases)
            problem = _step_count_mismatch(group_state, counts)
            target.group_steps.update((number, count) for count in counts)
        if problem:
            problems.append(problem)
            target.unchanged.update(group_state.states)
    return problems


@dataclass(frozen=True, slots=True)
class _GroupState:
    """A param group. `effective`: with the options that it will have; `saved_options`,
    `saved_classes`: those saved, and the classes that they are of;
    `states`: by parameter, the names of its saved state."""

    optimizer: Optimizer
    effective: Mapping[str, Any]
    saved_options: Mapping[str, Any]
    saved_classes: Sequence[str]
    states: Mapping[str, set[str]]

    @property
    def name(self) -> str:
        return class_name(self.optimizer)

    @property
    def remedy(self) -> str:
        if self.saved_classes == [self.name]:
            return "give it the saved hyperparameters, or leave the optimizer out with LoadOptions(parts=...)"
        saved = " or ".join(self.saved_classes) or "the class that was saved"
        return f"load into {saved}, or leave the optimizer out with LoadOptions(parts=...)"

    @property
    def counts_in_group(self) -> bool:
        rules = (
            state_rule(self.optimizer, param, self.effective) for param in self.effective["params"]
        )
        return any(rule is not None and rule.step_in_group for rule in rules)

    def rules(self) -> Iterator[tuple[str, StateRule]]:
        """The rule for each parameter with saved state; of a class that is not known, what the
        optimizer has now.
        """
        for (fqn, saved), param in zip(self.states.items(), self.effective["params"], strict=True):
            rule = state_rule(self.optimizer, param, self.effective)
            if rule is None and self.saved_classes not in ([], [self.name]):
                existing = self.optimizer.state.get(param, {}).items()
                names = frozenset(
                    key for key, value in existing if not is_master(key, value, param)
                )
                rule = StateRule(names) if names else None
            if saved and rule is not None:
                yield fqn, rule


def _state_mismatch(group: _GroupState, steps: dict[str, float]) -> str:
    """Fills `steps` with counts of the saved group that this class keeps by parameter."""
    for fqn, rule in group.rules():
        saved = group.states[fqn]
        if STEP in rule.required - saved and STEP in group.saved_options:
            steps[fqn] = float(group.saved_options[STEP])
            saved = saved | {STEP}
        unused = saved - rule.required - rule.optional - ({STEP} if rule.step_in_group else set())
        if group.saved_classes == [group.name]:
            unused = set()  # what a job keeps there itself
        if unused or rule.required - saved:
            description = f"the checkpoint has {', '.join(sorted(saved))} of {' and '.join(group.saved_classes) or 'another optimizer'}"
            read_names = sorted(rule.required or rule.optional - set(MASTER_KEYS))
            return f"optimizer:{fqn}: {description}; {group.name} reads {', '.join(read_names)}; {group.remedy}"
    return ""


def _class_mismatch(group: _GroupState, *, keep_current: bool) -> str:
    """Where state names prove nothing: another class, whose state or hyperparameters the checkpoint
    lacks.
    """
    if group.saved_classes in ([], [group.name]):
        return ""
    rules = [rule for _, rule in group.rules()]
    class_names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(group.optimizer).__mro__}
    same_basename = {cls.rpartition(".")[2] for cls in group.saved_classes} == {
        type(group.optimizer).__name__
    }
    if (
        any(group.states.values())
        and not rules
        and not same_basename
        and not class_names.issuperset(group.saved_classes)
    ):
        return (
            f"optimizer: the checkpoint's state is of {' and '.join(group.saved_classes)}, and what {group.name} reads is not known before its "
            f"first step; {group.remedy}, or step it once before the load"
        )
    if any(rule.required for rule in rules) or (keep_current and not any(group.states.values())):
        return ""
    missing_options = sorted(
        group.optimizer.defaults.keys() - group.saved_options.keys() - set(RUNTIME_OPTIONS)
    )
    if not missing_options:
        return ""
    return f"optimizer: the checkpoint's is {' and '.join(group.saved_classes)}, without {', '.join(missing_options)} of {group.name}; {group.remedy}"


def _step_counts(
    group: _GroupState, source: Source, metadata: SourceMetadata, aliases: Aliases
) -> dict[int, str]:
    """Step counts in the checkpoint, each with a parameter: by parameter, or of the saved group.
    They are state, no hyperparameters.
    """
    counts: dict[int, str] = {}
    names_of = TensorNames(source, aliases)
    for fqn, state in group.states.items():
        if STEP in metadata.scalars.get(fqn, {}):
            counts.setdefault(int(metadata.scalars[fqn][STEP]), fqn)
        elif STEP in state:
            names = (f"{name}/{STEP}" for name in names_of(fqn, OPTIMIZER, OPTIMIZER))
            key = next(name for name in names if name in source.names(OPTIMIZER))
            spec = source.specs(OPTIMIZER, {key})[key]
            buffer = bytearray(source.read(OPTIMIZER, key, full_box(spec.shape)))
            counts.setdefault(
                int(torch.frombuffer(buffer, dtype=TORCH_DTYPES[spec.dtype]).max()), fqn
            )
    if not counts and STEP in group.saved_options:
        counts[int(group.saved_options[STEP])] = next(iter(group.states), "")
    return counts


def _step_count_mismatch(group: _GroupState, counts: Mapping[int, str]) -> str:
    stored_fqn = next((fqn for fqn, state in group.states.items() if state), None)
    if not counts and stored_fqn is not None:
        return f"optimizer:{stored_fqn}: the checkpoint has no step count, which {group.name} reads; {group.remedy}"
    if len(counts) < 2:
        return ""
    (first_step, first_fqn), (second_step, second_fqn) = list(counts.items())[:2]
    return f"optimizer: {first_fqn} is at step {first_step}, {second_fqn} at step {second_step}; {group.name} has one count for its group; {group.remedy}"

"""Check that the target optimizer's next step can use the saved state.

State could be lost if another optimizer class loads it: the next step would start afresh or
raise. Reads step counts and no other data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.engine.load.match import TensorNames
from unified_ckpt.engine.source.protocol import Source, SourceMetadata, read_box
from unified_ckpt.engine.source.rank_values import has_tensor
from unified_ckpt.engine.source.value_paths import value_name
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.runtime.torch_state.flatten import ParamRef
from unified_ckpt.runtime.torch_state.optimizer_rules import (
    MASTER_KEYS,
    RUNTIME_OPTIONS,
    STEP,
    SavedGroups,
    StateRule,
    class_name,
    state_rule,
)
from unified_ckpt.runtime.torch_state.optimizer_target import OptimizerTarget
from unified_ckpt.runtime.torch_state.optimizers import SHARED, is_master
from unified_ckpt.runtime.torch_state.tensors import torch_dtype

Aliases = Mapping[str, Mapping[str, str]]


def state_mismatches(
    target: OptimizerTarget,
    source: Source,
    metadata: SourceMetadata,
    aliases: Aliases,
    *,
    use_current: bool,
) -> list[str]:
    """Return one sentence for each param group whose saved state the next step cannot use.

    Adds the group's parameters to `target.unchanged` and moves step counts to where the optimizer
    reads them. `use_current`: the optimizer keeps its own hyperparameters.
    """
    problems = []
    states = {
        fqn: {name for name in state if not name.startswith(SHARED)}
        for fqn, state in metadata.scalars.items()
    }
    for key in target.tensors:
        fqn, _, name = key.rpartition("/")
        states.setdefault(fqn, set()).add(name)
    saved_groups = SavedGroups(metadata.groups)
    for number, (optimizer, group) in enumerate(target.groups()):
        fqns = [target.names[id(param)] for param in group["params"]]
        saved = saved_groups.with_any(fqns)
        options = saved[0]["options"] if saved else {}
        group_state = _GroupState(
            optimizer,
            effective=dict(group) if use_current else {**group, **options},
            saved_options=options,
            saved_classes=sorted({part["optimizer"] for part in saved if part.get("optimizer")}),
            states={fqn: states.get(fqn, set()) for fqn in fqns},
        )
        problem = _state_mismatch(group_state, target.param_steps) or _class_mismatch(
            group_state, use_current=use_current
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
    """A param group and its saved state.

    `effective`: the options after the load; `saved_options`, `saved_classes`: the saved ones and
    the optimizer classes they belong to; `states`: names of saved state, by parameter.
    """

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
            return (
                "load the saved hyperparameters, or leave the optimizer out with "
                "LoadOptions(parts=...)"
            )
        saved = " or ".join(self.saved_classes) or "the class that was saved"
        return f"load into {saved}, or leave the optimizer out with LoadOptions(parts=...)"

    @property
    def counts_in_group(self) -> bool:
        rules = (
            state_rule(self.optimizer, param, self.effective) for param in self.effective["params"]
        )
        return any(rule is not None and rule.step_in_group for rule in rules)

    def rules(self) -> Iterator[tuple[str, StateRule]]:
        """Yield the state rule of each parameter with saved state.

        For an unknown optimizer class, the rule is the state that the optimizer has now.
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
    """Describe state that the optimizer needs or cannot use; fill `steps` from the saved group."""
    for fqn, rule in group.rules():
        saved = group.states[fqn]
        if STEP in rule.required - saved and STEP in group.saved_options:
            steps[fqn] = float(group.saved_options[STEP])
            saved = saved | {STEP}
        unused = saved - rule.required - rule.optional - ({STEP} if rule.step_in_group else set())
        if group.saved_classes == [group.name]:
            unused = set()  # the job's own additions
        if unused or rule.required - saved:
            description = (
                f"the checkpoint has {', '.join(sorted(saved))} of "
                f"{' and '.join(group.saved_classes) or 'another optimizer'}"
            )
            read_names = sorted(rule.required or rule.optional - set(MASTER_KEYS))
            return (
                f"optimizer:{fqn}: {description}; {group.name} reads {', '.join(read_names)}; "
                f"{group.remedy}"
            )
    return ""


def _class_mismatch(group: _GroupState, *, use_current: bool) -> str:
    """Describe another optimizer class whose needs the state names alone cannot show."""
    if group.saved_classes in ([], [group.name]):
        return ""
    rules = [rule for _, rule in group.rules()]
    class_names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(group.optimizer).__mro__}
    saved_basenames = {cls.rpartition(".")[2] for cls in group.saved_classes}
    is_known = class_names.issuperset(group.saved_classes) or saved_basenames == {
        type(group.optimizer).__name__  # the class moved to another module
    }
    if any(group.states.values()) and not rules and not is_known:
        return (
            f"optimizer: the checkpoint's state is of {' and '.join(group.saved_classes)}; the "
            f"state of {group.name} is unknown before its first step; {group.remedy}, or step it "
            "once before the load"
        )
    if any(rule.required for rule in rules) or (use_current and not any(group.states.values())):
        return ""
    missing_options = sorted(
        group.optimizer.defaults.keys() - group.saved_options.keys() - set(RUNTIME_OPTIONS)
    )
    if not missing_options:
        return ""
    return (
        f"optimizer: the checkpoint's is {' and '.join(group.saved_classes)}, without "
        f"{', '.join(missing_options)} of {group.name}; {group.remedy}"
    )


def _step_counts(
    group: _GroupState, source: Source, metadata: SourceMetadata, aliases: Aliases
) -> dict[int, str]:
    """Return {step count: a parameter that has it}, from parameters or from the saved group.

    Step counts are state, not hyperparameters.
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
            buffer = read_box(source, (OPTIMIZER, key), full_box(spec.shape))
            steps = torch.frombuffer(buffer, dtype=torch_dtype(spec.dtype))
            counts.setdefault(int(steps.max()), fqn)
    if not counts and STEP in group.saved_options:
        counts[int(group.saved_options[STEP])] = next(iter(group.states), "")
    return counts


def _step_count_mismatch(group: _GroupState, counts: Mapping[int, str]) -> str:
    stored_fqn = next((fqn for fqn, state in group.states.items() if state), None)
    if not counts and stored_fqn is not None:
        return (
            f"optimizer:{stored_fqn}: the checkpoint has no step count, which {group.name} "
            f"reads; {group.remedy}"
        )
    if len(counts) < 2:
        return ""
    (first_step, first_fqn), (second_step, second_fqn) = list(counts.items())[:2]
    return (
        f"optimizer: {first_fqn} is at step {first_step}, {second_fqn} at step {second_step}; "
        f"{group.name} has one step count per group; {group.remedy}"
    )


def unplaced_state(
    metadata: SourceMetadata, refs: Mapping[str, ParamRef], unplaced: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield (parameter, sentence) for tensors in values that belong to other ranks.

    In values of sharded parameters, these are shards without a layout: those of another rank would
    be wrong. `unplaced`: names of the values.
    """
    for fqn, state in metadata.scalars.items() if unplaced else ():
        is_sharded = fqn in refs and not refs[fqn].tensor.sharding.is_whole
        for key, value in state.items():
            name = value_name((OPTIMIZER, fqn, key))
            if is_sharded and name in unplaced and has_tensor(value):
                yield (
                    fqn,
                    f"{name}: each rank of the save held other tensors, and this job has another "
                    "layout; load it in the layout of the save",
                )

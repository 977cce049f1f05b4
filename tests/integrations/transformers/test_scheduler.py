"""Schedulers whose optimizer has other param groups than at the save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from unified_ckpt.integrations.transformers.scheduler import regroup_state

RATES = {"a": 0.1, "b": 0.1, "c": 0.3}  # by parameter


def optimizer(*groups: str) -> tuple[torch.optim.Optimizer, dict[int, str], list[dict[str, Any]]]:
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in RATES}
    sgd = torch.optim.SGD(
        [
            {"params": [parameters[n] for n in names], "lr": RATES[names[0]] if names else 0.5}
            for names in groups
        ],
        momentum=0.9,
    )
    return (
        sgd,
        {id(p): name for name, p in parameters.items()},
        [{"names": list(names)} for names in groups],
    )


def sequence(target: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(
        target,
        [ConstantLR(target, factor=0.5, total_iters=2), StepLR(target, 2), StepLR(target, 3)],
        milestones=[2, 5],
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda optim: StepLR(optim, 2, gamma=0.5),
        lambda optim: LambdaLR(optim, [lambda step: 0.9**step] * len(optim.param_groups)),
        lambda optim: CyclicLR(
            optim, [0.01] * len(optim.param_groups), [group["lr"] for group in optim.param_groups]
        ),
        sequence,
    ],
    ids=["step", "lambda", "cyclic", "sequence"],
)
@pytest.mark.parametrize(
    ("before", "after"), [("ab|c", "a|c|b"), ("c|a|b", "ab|c"), ("ab|c", "c|ab|")]
)
def test_each_parameter_keeps_its_rate(
    make: Callable[[Any], LRScheduler], before: str, after: str
) -> None:
    first, _, groups = optimizer(*before.split("|"))
    stopped = make(first)
    for _ in range(3):
        first.step()
        stopped.step()
    other, names, _ = optimizer(*after.split("|"))
    resumed = make(other)
    saved = {
        n: group
        for group, entry in zip(first.param_groups, groups, strict=True)
        for n in entry["names"]
    }
    resumed.load_state_dict(regroup_state(stopped.state_dict(), other, names, groups))
    for group in other.param_groups:  # loading an optimizer assigns groups by name
        if group["params"]:
            group["lr"] = saved[names[id(group["params"][0])]]["lr"]
    for _ in range(4):
        for optim, scheduler in ((first, stopped), (other, resumed)):
            optim.step()
            scheduler.step()
        actual = {
            names[id(p)]: group["lr"] for group in other.param_groups for p in group["params"]
        }
        expected = {
            n: group["lr"]
            for group, entry in zip(first.param_groups, groups, strict=True)
            for n in entry["names"]
        }
        assert actual == pytest.approx(expected)


def test_list_not_per_group_is_unchanged() -> None:
    """Two milestones, two groups."""
    first, _, groups = optimizer("ab", "c")
    state = sequence(first).state_dict()
    other, names, _ = optimizer("c", "ab")
    regrouped = regroup_state(state, other, names, groups)
    assert regrouped["_milestones"] == [2, 5]
    assert regrouped["_schedulers"][2]["base_lrs"] == [0.3, 0.1]


def test_same_groups_are_unchanged() -> None:
    first, names, groups = optimizer("ab", "c")
    state = ReduceLROnPlateau(first).state_dict()
    assert regroup_state(state, first, names, groups) == state

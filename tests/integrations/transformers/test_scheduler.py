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
    made = torch.optim.SGD(
        [
            {"params": [parameters[n] for n in names], "lr": RATES[names[0]] if names else 0.5}
            for names in groups
        ],
        momentum=0.9,
    )
    return (
        made,
        {id(p): name for name, p in parameters.items()},
        [{"names": list(names)} for names in groups],
    )


def sequence(of: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(
        of,
        [ConstantLR(of, factor=0.5, total_iters=2), StepLR(of, 2), StepLR(of, 3)],
        milestones=[2, 5],
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda of: StepLR(of, 2, gamma=0.5),
        lambda of: LambdaLR(of, [lambda step: 0.9**step] * len(of.param_groups)),
        lambda of: CyclicLR(
            of, [0.01] * len(of.param_groups), [group["lr"] for group in of.param_groups]
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
    one, _, groups = optimizer(*before.split("|"))
    stopped = make(one)
    for _ in range(3):
        one.step()
        stopped.step()
    other, names, _ = optimizer(*after.split("|"))
    resumed = make(other)
    saved = {
        n: group
        for group, told in zip(one.param_groups, groups, strict=True)
        for n in told["names"]
    }
    resumed.load_state_dict(regroup_state(stopped.state_dict(), other, names, groups))
    for group in other.param_groups:  # a load of the optimizer does so by names
        if group["params"]:
            group["lr"] = saved[names[id(group["params"][0])]]["lr"]
    for _ in range(4):
        for optim, scheduler in ((one, stopped), (other, resumed)):
            optim.step()
            scheduler.step()
        found = {names[id(p)]: group["lr"] for group in other.param_groups for p in group["params"]}
        needed = {
            n: group["lr"]
            for group, told in zip(one.param_groups, groups, strict=True)
            for n in told["names"]
        }
        assert found == pytest.approx(needed)


def test_list_not_per_group_is_unchanged() -> None:
    """Two milestones, two groups."""
    one, _, groups = optimizer("ab", "c")
    state = sequence(one).state_dict()
    other, names, _ = optimizer("c", "ab")
    found = regroup_state(state, other, names, groups)
    assert found["_milestones"] == [2, 5]
    assert found["_schedulers"][2]["base_lrs"] == [0.3, 0.1]


def test_same_groups_are_unchanged() -> None:
    one, names, groups = optimizer("ab", "c")
    state = ReduceLROnPlateau(one).state_dict()
    assert regroup_state(state, one, names, groups) == state

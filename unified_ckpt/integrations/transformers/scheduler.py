"""A learning rate scheduler's state for other param groups than it was saved with.

The Trainer makes a group for each mesh that parameters lie on, so another layout can have more
groups or fewer; a scheduler keeps lists with an entry for each, and torch takes them as they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# What torch's schedulers keep for each param group.
_PER_GROUP = {
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
}


def regroup_state(
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The state with an entry for each group of the optimizer: that of the saved group which its
    parameters were in.

    `names`: id of a parameter -> its name; `saved`: the saved groups, their parameters under
    "names".
    """
    group_of = {name: index for index, group in enumerate(saved) for name in group["names"]}
    group_indices = []
    for index, group in enumerate(optimizer.param_groups):
        saved_groups = {
            group_of[names[id(parameter)]]
            for parameter in group["params"]
            if names.get(id(parameter)) in group_of
        }
        group_indices.append(
            min(saved_groups, default=min(index, len(saved) - 1))
        )  # one without parameters: any will do
    return _select_groups(state, group_indices, len(saved))


def _select_groups(
    state: Mapping[str, Any], group_indices: Sequence[int], count: int
) -> dict[str, Any]:
    selected = dict(state)
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, list) and len(value) == count:
            selected[key] = [value[number] for number in group_indices]
        elif key == "_schedulers":  # of one that is made of several
            selected[key] = [_select_groups(scheduler, group_indices, count) for scheduler in value]
    return selected

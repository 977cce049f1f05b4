"""Converts the state of a learning rate scheduler to other param groups than it was saved with.

The Trainer makes one group per mesh on which parameters lie, so another layout may have more groups
or fewer. A scheduler stores lists with one entry per group, and torch loads them unchecked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unified_ckpt.integrations.run_state import PER_GROUP_KEYS


def regroup_state(
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the state with one entry per group of the optimizer: that of the saved group that held
    its parameters.

    `names`: id of a parameter -> its name. `saved`: the saved groups, with parameter names under
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
        # a group without parameters: any
        group_indices.append(min(saved_groups, default=min(index, len(saved) - 1)))
    return _select_groups(state, group_indices, len(saved))


def _select_groups(
    state: Mapping[str, Any], group_indices: Sequence[int], count: int
) -> dict[str, Any]:
    selected = dict(state)
    for key, value in state.items():
        if key in PER_GROUP_KEYS and isinstance(value, list) and len(value) == count:
            selected[key] = [value[number] for number in group_indices]
        elif key == "_schedulers":  # composed schedulers
            selected[key] = [_select_groups(scheduler, group_indices, count) for scheduler in value]
    return selected

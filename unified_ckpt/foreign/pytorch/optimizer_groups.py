"""Parses the param groups of a torch optimizer's state dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.restricted_pickle.archive import ArchivedTensor
from unified_ckpt.runtime.torch_state.names import strip_wrappers
from unified_ckpt.views.shards import ShardedTensor, single_shard


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A param group of a checkpoint.

    `state`: of each parameter, in order. `names`: of these parameters, if the file has them.
    """

    options: Mapping[str, Any]
    state: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...] | None


def archived_tensor(tensor: ArchivedTensor, file: str) -> ShardedTensor:
    """Return a tensor of a file as a single shard. FormatError if it cannot be read."""
    if tensor.problem:
        raise FormatError(f"got {tensor.problem}, expected a whole dense tensor")
    return single_shard(tensor.dtype, tensor.shape, tensor.load, file)


def is_optimizer_state(value: Any) -> bool:
    """Return whether the value is the state dict of an optimizer."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
    )


def param_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a torch param group, whose `params` are names, as `SourceMetadata` has it."""
    options = {key: value for key, value in group.items() if key != "params"}
    return {"names": list(group.get("params", ())), "options": options}


def groups_by_options(params: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Group parameters, given with their options, by equal options."""
    groups: list[dict[str, Any]] = []
    for name, options in params:
        group = next((group for group in groups if group["options"] == options), None)
        if group is None:
            groups.append({"names": [name], "options": dict(options)})
        else:
            group["names"].append(name)
    return groups


def other_entries(state_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what an optimizer's state dict holds beside state and groups, as a few classes do."""
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}


def parse_groups(path: str, state_dict: Any) -> list[SavedGroup]:
    """Return the groups of an optimizer's state dict.

    FormatError if it is none, or has state that belongs to no group.
    """
    if not is_optimizer_state(state_dict):
        raise FormatError(
            f"{path}: expected an optimizer state dict with `state` and `param_groups`"
        )
    state, group_keys = state_dict["state"], list[Any]()
    groups: list[SavedGroup] = []
    for number, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise FormatError(f"{path}: param group {number}: expected a list of params")
        keys = group["params"]
        group_keys += keys
        unexpected = next(
            (key for key in keys if not isinstance(state.get(key, {}), Mapping)), None
        )
        if unexpected is not None:
            raise FormatError(
                f"{path}: state of parameter {unexpected}: got "
                f"{type(state[unexpected]).__name__}, expected a dict"
            )
        names = group.get("param_names")
        if not names:
            names = keys if all(isinstance(key, str) for key in keys) else None
        if names is not None and len(names) != len(keys):
            raise FormatError(
                f"{path}: param group {number}: got {len(names)} names for {len(keys)} params"
            )
        entries = tuple(state.get(key, {}) for key in keys)
        if any(hasattr(value, "untyped_storage") for entry in entries for value in entry.values()):
            raise AssertionError(f"{path}: got tensors of torch, expected archived ones")
        excluded = ("params", "param_names")
        options = {key: value for key, value in group.items() if key not in excluded}
        fqns = tuple(map(strip_wrappers, names)) if names is not None else None
        groups.append(SavedGroup(options, entries, fqns))
    raise_if_any(
        FormatError,
        f"{path}: state that belongs to no param group",
        sorted(map(str, set(state) - set(group_keys))),
    )
    if len(set(group_keys)) != len(group_keys):
        raise FormatError(f"{path}: a parameter occurs twice in the param groups")
    return groups

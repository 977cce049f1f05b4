"""Finds the optimizers that hold the state of a wrapper, and what else its `state_dict()` has.

`state_dict()` is what an optimizer says its state is. A wrapper whose param groups are those of the
optimizers that it holds is taken apart into them. Other entries of its `state_dict()` are stored as
they are, and only its `load_state_dict` restores them. What is neither is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.errors import CheckpointError, LayoutError, MismatchError
from unified_ckpt.format import codec
from unified_ckpt.runtime.torch_state.optimizer_rules import class_name, group_params, same_value
from unified_ckpt.runtime.torch_state.shards.optimizer_views import (
    Slices,
    is_zero,
    view_of,
    zero_view,
)
from unified_ckpt.runtime.torch_state.tensors import local_tensor

# Names the further entries of a `state_dict()` in a checkpoint: {"class", "names", "entries"}.
ENTRIES = "//state_dict"
_STATE, _GROUPS = "state", "param_groups"
_MAX_OBJECTS = 10_000  # that `_holds_other_tensors` visits
_REMEDY = (
    "pass the optimizers that it holds as a list, or store all of it as one value for all ranks: "
    "extra={'optimizer': optimizer} without optimizer="
)
# Keys of `state_dict()` that neither `state` nor `param_groups` hold, once the optimizer has state.
_UNSAVED_KEYS = WeakKeyDictionary[Any, tuple[str, ...]]()


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper without state of its own, such as Accelerate's."""
    inner: Any = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer) or inner is optimizer:
        return optimizer
    is_view = inner.param_groups is optimizer.param_groups and inner.state is optimizer.state
    return unwrap_optimizer(inner) if is_view else optimizer


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that hold the state of a wrapper or a composite; else itself.

    They are its attributes, or in a list, tuple or dict among these, and their param groups are
    those of the wrapper. LayoutError if the wrapper has groups of its own for the same parameters
    (nothing shows which of the two a step reads). A view of a ZeroRedundancyOptimizer.
    """
    if is_zero(optimizer):
        return [zero_view(optimizer)]
    held = [item for item in _held_optimizers(optimizer) if item is not optimizer]
    groups = getattr(optimizer, _GROUPS, None)
    if not held:
        return [optimizer]
    inner = [leaf for item in held for leaf in inner_optimizers(item)]
    inner = list({id(leaf): leaf for leaf in inner}.values())
    inner_groups = [group for leaf in inner for group in leaf.param_groups]
    if groups is None or {id(group) for group in groups} == {id(group) for group in inner_groups}:
        return inner
    params = {id(param) for group in groups for param in group["params"]}
    if params != {id(param) for group in inner_groups for param in group["params"]}:
        return [optimizer]
    kinds = ", ".join(sorted({type(leaf).__name__ for leaf in inner}))
    raise LayoutError(
        f"{type(optimizer).__name__}: got param groups of its own beside those of the optimizers "
        f"that it holds ({kinds}); pass these as a list instead: optimizer=[...]"
    )


def _held_optimizers(optimizer: Any) -> Iterator[Any]:
    for value in list(getattr(optimizer, "__dict__", {}).values()):
        items: Iterable[Any] = (value,)
        if isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, list | tuple):
            items = value
        yield from filter(_is_optimizer, items)


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, Optimizer):
        return True
    names = ("param_groups", "state", "step", "state_dict")
    return not isinstance(value, type | nn.Module | torch.Tensor) and all(
        hasattr(value, name) for name in names
    )


def state_dict_entries(optimizer: Any, inner: Sequence[Any]) -> dict[str, Any]:
    """Return the entries of `state_dict()` that the state and groups of `inner` do not contain.

    `inner`: as `inner_optimizers` returns it. Calls `state_dict` of classes that override it: once
    there is state, and then at each save if there are entries. LayoutError for what cannot be
    stored, or could not be restored.
    """
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    overrides = getattr(type(optimizer), "state_dict", None) is not Optimizer.state_dict
    has_state_of_inner = len(inner) == 1 and getattr(optimizer, "state", None) is inner[0].state
    if (has_state_of_inner and not (overrides or hooks)) or is_zero(optimizer):
        return {}
    # TransformerEngine's scales state there, which is saved as it is.
    if hasattr(optimizer, "name_to_dtype_map") or not hasattr(optimizer, "state_dict"):
        return {}
    keys = _UNSAVED_KEYS.get(optimizer)
    state_dict = {} if keys == () else optimizer.state_dict()
    if keys is None:
        keys = _unsaved_keys(optimizer, state_dict, inner)
        if any(leaf.state for leaf in inner):
            _UNSAVED_KEYS[optimizer] = keys
    entries = {key: state_dict[key] for key in keys if key in state_dict}
    try:
        codec.encode(entries, f"{type(optimizer).__name__}.state_dict()")
    except CheckpointError as error:
        raise LayoutError(f"{error}; {_REMEDY}") from error
    return entries


def _unsaved_keys(
    optimizer: Any, state_dict: Mapping[str, Any], inner: Sequence[Any]
) -> tuple[str, ...]:
    """Return the keys of entries with anything that `inner` does not hold.

    LayoutError if that is in the state or the groups of an optimizer without inner ones.
    """
    held = _HeldValues(inner)
    unsaved = [(path, value) for path, value in _leaves(state_dict) if not held.has(path, value)]
    keys = tuple(dict.fromkeys(path[0] for path, _ in unsaved))
    misplaced = [(path, value) for path, value in unsaved if path[0] in (_STATE, _GROUPS)]
    if inner[0] is not optimizer or not misplaced:
        return keys
    # Tensors that it computes from its state, such as decoded ones, are saved by that state.
    computed = all(isinstance(value, torch.Tensor) for _, value in misplaced)
    if computed and not _holds_other_tensors(optimizer):
        return tuple(key for key in keys if key not in (_STATE, _GROUPS))
    path, _ = misplaced[0]
    raise LayoutError(
        f"{type(optimizer).__name__}: its state_dict() has {'.'.join(map(str, path))}, which its "
        f"`{path[0]}` lacks; {_REMEDY}"
    )


class _HeldValues:
    """The values in the state and the groups of optimizers, by the last name of their path."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._tensors, self._by_name = dict[int, Any](), dict[str, list[Any]]()
        for optimizer in optimizers:
            states = [dict(optimizer.state), *optimizer.param_groups]
            for path, value in _leaves(states):
                if isinstance(value, torch.Tensor):
                    self._tensors[id(value)] = self._tensors[id(local_tensor(value))] = value
                self._by_name.setdefault(_last_name(path), []).append(value)

    def has(self, path: tuple[Any, ...], value: Any) -> bool:
        """Return whether `value`, at this path of a state dict, is one of these or a copy."""
        if isinstance(value, torch.Tensor) and id(value) in self._tensors:
            return True
        parts = [part for key in path for part in str(key).split(".")]
        if not {_STATE, _GROUPS} & set(parts):
            return False
        name = _last_name(path)
        return name in ("params", "param_names") or any(
            _same(value, other) for other in self._by_name.get(name, ())
        )


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) of what is no container; a list of plain values is one value."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and any(
        isinstance(item, Mapping | list | tuple | torch.Tensor) for item in value
    ):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _last_name(path: tuple[Any, ...]) -> str:
    names = [key for key in path if isinstance(key, str)]
    return names[-1].rpartition(".")[2] if names else ""


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        kinds = [(item.dtype, item.shape, type(item)) for item in (value, other)]
        return kinds[0] == kinds[1] and torch.equal(local_tensor(value), local_tensor(other))
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return type(value) is type(other) and same_value(value, other)


def _holds_other_tensors(optimizer: Any) -> bool:
    """Return whether attributes reach tensors beside parameters, state and groups."""
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in (_STATE, _GROUPS, "defaults") and not name.startswith("_optimizer_")
    }
    states = [dict(optimizer.state), *optimizer.param_groups]
    known = {id(value) for _, value in _leaves(states)}
    known.update(id(param) for *_, param in group_params([optimizer]))
    queue, visited = list[Any](attributes.values()), set[int]()
    while queue and len(visited) < _MAX_OBJECTS:
        value = queue.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, torch.Tensor):
            if id(value) not in known:
                return True
        elif isinstance(value, Mapping):
            queue += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            queue += value
        elif not isinstance(value, type | nn.Module):
            queue += getattr(value, "__dict__", {}).values()
    return bool(queue)


def param_names(optimizers: Iterable[Any], names: Mapping[int, str]) -> list[str]:
    """Return the names of the parameters of optimizers, in their order. `names`: by id."""
    return [names[id(param)] for *_, param in group_params(optimizers)]


@dataclass(frozen=True, slots=True)
class RestoredEntries:
    """Entries of a checkpoint, with the object whose `load_state_dict` restores them.

    The state and the groups of its inner optimizers stay as they are.
    """

    optimizer: Any
    entries: Mapping[str, Any]

    def install(self) -> None:
        """Restore the entries. MismatchError if the class refuses them."""
        inner = inner_optimizers(self.optimizer)
        kept = [(leaf, dict(leaf.state), list(leaf.param_groups)) for leaf in inner]
        entries = copy.deepcopy(dict(self.entries))
        try:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), **entries})
        except Exception as error:
            raise MismatchError(
                f"{class_name(self.optimizer)}: its load_state_dict() refuses the saved "
                f"{', '.join(entries)}: {error}"
            ) from error
        finally:  # the call may have copied or cast them
            for leaf, state, groups in kept:
                leaf.state.clear()
                leaf.state.update(state)
                leaf.param_groups[:] = groups


@dataclass(frozen=True, slots=True)
class EntryMatch:
    """The entries of a checkpoint by what a load does with them.

    `problems`: one sentence for each object whose entries cannot be restored. `unused`: one for
    each entry that no object takes.
    """

    restored: Sequence[RestoredEntries] = ()
    problems: Sequence[str] = ()
    unused: Sequence[str] = ()


def match_entries(
    optimizers: Sequence[Any],
    names: Mapping[int, str],
    scalars: Mapping[str, Mapping[str, Any]],
    slices: Slices,
) -> EntryMatch:
    """Match further entries of `state_dict()` in a checkpoint with the objects that have them.

    `optimizers`: wrappers, not their inner ones. `names`: of parameters, by id. `scalars`: of the
    checkpoint. `slices`: of FSDP1's parameters. Tensors in entries do not say whose they are: the
    order of parameters must be the saved one.
    """
    saved = [state[ENTRIES] for state in scalars.values() if ENTRIES in state]
    restored, problems, used = list[RestoredEntries](), list[str](), set[int]()
    for owner in optimizers:
        inner = inner_optimizers(owner)
        fqns = param_names([view_of(leaf, slices) for leaf in inner], names)
        name = class_name(owner)
        records = [
            record
            for record in saved
            if record["class"] == name and not set(fqns).isdisjoint(record["names"])
        ]
        used.update(map(id, records))
        for record in records[:1]:
            has_tensors = _has(record["entries"], torch.Tensor)
            if has_tensors and (problem := _misfit(owner, record, fqns)):
                problems.append(f"optimizer: {problem}")
            else:
                restored.append(RestoredEntries(owner, record["entries"]))
        if not records and (entries := state_dict_entries(owner, inner)):
            problems.append(
                f"optimizer: the checkpoint lacks {', '.join(entries)} of {name}, expected the "
                "entries of its state_dict()"
            )
    unused = [
        f"optimizer: {', '.join(record['entries'])} of {record['class']} is not loaded, as no such "
        "optimizer is here"
        for record in saved
        if id(record) not in used
    ]
    return EntryMatch(restored, problems, unused)


def _misfit(owner: Any, record: Mapping[str, Any], fqns: Sequence[str]) -> str | None:
    """Return why tensors in these entries are not those of the owner's parameters, or None."""
    name, entries = class_name(owner), ", ".join(record["entries"])
    if record["names"] != fqns:
        return (
            f"the checkpoint has {entries} of {name} in another order of parameters; "
            "create it with the saved param groups"
        )
    current = owner.state_dict()
    sharded = [key for key in record["entries"] if _has(current.get(key), DTensor)]
    if sharded:
        return (
            f"{name}: got DTensors in {', '.join(sharded)} of its state_dict(), expected plain "
            "tensors; load into parameters that are no DTensors"
        )
    return None


def _has(value: object, kind: type) -> bool:
    return any(isinstance(leaf, kind) for _, leaf in _leaves(value))

"""Stateful objects in a caller's tree of values: schedulers, data loaders, random generators."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from unified_ckpt.errors import FormatError
from unified_ckpt.format import codec
from unified_ckpt.format.codec import Path, path_text
from unified_ckpt.runtime.torch_state.rng import GeneratorState, RandomStates, is_generator


@dataclass(frozen=True, slots=True)
class NamedObject:
    """A stateful object and its path in the tree."""

    path: Path
    target: Any

    @property
    def label(self) -> str:
        """The path as text: `("extra", "a", 0)` is "extra:a[0]"."""
        rest = path_text(("", *self.path[1:])).removeprefix(".")
        return f"{self.path[0]}:{rest}" if rest else str(self.path[0])

    @property
    def is_random(self) -> bool:
        """Whether it is the state of random generators."""
        return isinstance(self.target, RandomStates | GeneratorState)


def stateful_objects(value: Any, root: str) -> list[NamedObject]:
    """Return the stateful objects in a tree of dicts, lists and tuples, random states last.

    Random generators are included as `GeneratorState`; they come last because other objects may
    draw numbers. Raises FormatError for a module with sharded parameters.
    """
    objects = list(_iter_objects(value, (root,), set()))
    for named in objects:
        if isinstance(named.target, nn.Module) and any(
            isinstance(param, DTensor) for param in named.target.parameters()
        ):
            raise FormatError(
                f"{path_text(named.path)}: is a module with sharded parameters; save it "
                "with `parts` instead"
            )
    return sorted(objects, key=attrgetter("is_random"))


def _iter_objects(value: Any, path: Path, ancestors: set[int]) -> Iterator[NamedObject]:
    """Yield objects below `value`. `ancestors`: ids of enclosing containers, to end at cycles."""
    if _is_stateful(value):
        yield NamedObject(path, value)
    elif is_generator(value):
        yield NamedObject(path, GeneratorState(value))
    elif (
        type(value) in (*codec.MAPPINGS, *codec.SEQUENCES)
        and id(value) not in ancestors
        and len(path) <= codec.MAX_DEPTH
    ):
        for key, item in _items(value):
            yield from _iter_objects(item, (*path, key), ancestors | {id(value)})


def _is_stateful(value: Any) -> bool:
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(map(callable, methods))


def _items(value: Any) -> Collection[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def replace_with_states(value: Any, root: str) -> Any:
    """Return the tree with each object replaced by its state. Containers are copied, states not."""
    return replace_at_paths(
        value, root, {named.path: _state_of(named) for named in stateful_objects(value, root)}
    )


def _state_of(named: NamedObject) -> Any:
    location, class_name = path_text(named.path), type(named.target).__name__
    try:
        state = named.target.state_dict()
    except Exception as error:
        raise FormatError(
            f"{location}: {class_name}.state_dict() raised {type(error).__name__}: {error}"
        ) from error
    if state is None:
        raise FormatError(
            f"{location}: {class_name}.state_dict() returned None, expected the state"
        )
    return state


def replace_at_paths(value: Any, root: str, states: Mapping[Path, Any]) -> Any:
    """Return the tree with these states at their paths; unaffected subtrees are shared."""
    prefixes = {path[:length] for path in states for length in range(1, len(path))}
    return _replace_below(value, (root,), states, prefixes)


def _replace_below(
    value: Any, path: Path, states: Mapping[Path, Any], prefixes: Collection[Path]
) -> Any:
    if path in states:
        return states[path]
    if path not in prefixes:
        return value
    items = [
        (key, _replace_below(item, (*path, key), states, prefixes)) for key, item in _items(value)
    ]
    if isinstance(value, tuple):
        return tuple(item for _, item in items)
    clone = copy.copy(value)
    for key, item in items:
        clone[key] = item
    return clone

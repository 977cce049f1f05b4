"""The leaves of a nested state dict, under the flat keys of torch.distributed.checkpoint.

A dict is always divided, a list if it holds dicts or tensors. All else is a leaf, tuples too. A key
is the path joined by dots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.torch_state.shards.shards import Shards

KeyPath = tuple[str | int, ...]  # keys of dicts as text, positions in lists as ints


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of a state dict. `container[key]` holds it."""

    path: KeyPath
    value: Any
    container: Any
    key: Any

    @property
    def name(self) -> str:
        """The flat key."""
        return flat_key(self.path)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor of any class."""
        return is_tensor(self.value)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of any class, or declares boxes of one."""
    return isinstance(value, torch.Tensor | Shards)


def flat_key(path: Sequence[str | int]) -> str:
    """Return a path as a flat key."""
    return ".".join(map(str, path))


def leaves(state_dict: Mapping[Any, Any], *, flattens: bool = True) -> list[Leaf]:
    """Return the leaves in order. Without `flattens`, they are the values of the dict itself.

    FormatError if two paths have one key.
    """
    found = list(_leaves_below(state_dict, (), flattens))
    raise_if_any(
        FormatError,
        "the state dict has several values of one flat key; rename all but one",
        [name for name, count in Counter(leaf.name for leaf in found).items() if count > 1],
    )
    return found


def _leaves_below(container: Any, path: KeyPath, flattens: bool) -> Iterator[Leaf]:
    for key, value in _items(container):
        inner = (*path, key if isinstance(container, list) else str(key))
        if flattens and is_divided(value):
            yield from _leaves_below(value, inner, flattens)
        else:
            yield Leaf(inner, value, container, key)


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, Mapping) else enumerate(container))


def is_divided(value: Any) -> bool:
    """Return whether the items of a value are leaves of their own."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(is_tensor(v) or is_divided(v) for v in value)


def without_leaves(container: Any, path: KeyPath, removed: set[KeyPath]) -> Any:
    """Return plain dicts and lists without some leaves, and without dicts that then are empty.

    A list has None in their place. Keys are text.
    """
    if isinstance(container, Mapping):
        kept = {}
        for key, value in container.items():
            inner = (*path, str(key))
            if inner in removed:
                continue
            if not is_divided(value):
                kept[str(key)] = value
            elif (rest := without_leaves(value, inner, removed)) or not value:
                kept[str(key)] = rest
        return kept
    rest = []
    for number, value in enumerate(container):
        inner = (*path, number)
        is_removed = inner in removed
        if is_divided(value):
            value = without_leaves(value, inner, removed)
            is_removed = not value
        rest.append(None if is_removed else value)
    return rest if any(item is not None for item in rest) else []

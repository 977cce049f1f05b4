"""Limits the size and depth of unpickled values.

A pickle may refer to one object any number of times. Thirty nested lists that each hold the
previous one twice take 200 bytes, and have a billion branches to traverse. Printing, comparing or
hashing them takes as long. While a pickle is read, and wherever its size was not checked, code does
so only with what `expect_type` returned.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.restricted_pickle.placeholders import Placeholder

MAX_BRANCHES = 100_000_000  # a list of 1,000 names shared by 16,384 ranks has 16 million
MAX_DEPTH = 200  # functions that traverse a tree are recursive, and Python stops at 1,000 calls

_T = TypeVar("_T")


def expect_type(value: Any, expected: type[_T]) -> _T:
    """Return a value of this type, such as str. TypeError, without the value, for another one."""
    if not isinstance(value, expected):
        raise TypeError(f"got {type(value).__name__}, expected {expected.__name__}")
    return value


def to_ints(numbers: Iterable[Any]) -> tuple[int, ...]:
    """Return whole numbers as plain ints. TypeError, without the value, for anything else."""
    return tuple(map(int, map(operator.index, numbers)))  # the index of a bool is a bool


def check_tree_size(value: Any) -> None:
    """Raise FormatError for a value with cycles, or over `MAX_BRANCHES` or `MAX_DEPTH`.

    Visit each object once.
    """
    measured: dict[int, tuple[int, int]] = {}  # id -> (branches, levels) of finished nodes
    in_progress: set[int] = set()
    stack = [value]
    while stack:
        node = stack[-1]
        if id(node) in measured:
            stack.pop()
            continue
        children = child_nodes(node)
        containers = [child for child in children if isinstance(child, _CONTAINERS)]
        if id(node) not in in_progress:
            in_progress.add(id(node))
            stack += [child for child in containers if id(child) not in measured]
            if any(id(child) in in_progress for child in containers):
                raise FormatError("has an object that contains itself, expected a tree")
        else:
            in_progress.discard(id(node))
            branches = (
                1
                + len(children)
                - len(containers)
                + sum(measured[id(child)][0] for child in containers)
            )
            levels = 1 + max((measured[id(child)][1] for child in containers), default=0)
            if branches > MAX_BRANCHES or levels > MAX_DEPTH:
                raise FormatError(
                    f"got {branches} branches on {levels} levels, expected at most {MAX_BRANCHES} "
                    f"on {MAX_DEPTH}"
                )
            measured[id(node)] = branches, levels
            stack.pop()


_SEQUENCES = (list, tuple, set, frozenset, deque)
_CONTAINERS = (dict, *_SEQUENCES, Placeholder)


def child_nodes(node: Any) -> list[Any]:
    """Return what a container or a placeholder holds; [] for other values."""
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, _SEQUENCES):
        return list(node)
    return [node.args, node.state] if isinstance(node, Placeholder) else []

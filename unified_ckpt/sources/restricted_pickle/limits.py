"""What a pickle holds, as a tree. A pickle may name one object any number of times: thirty lists,
each of the one before twice, are a gigabyte of branches from two hundred bytes, and whoever goes
through them never ends.
"""

from __future__ import annotations

from typing import Any

from unified_ckpt.errors import FormatError
from unified_ckpt.sources.restricted_pickle.stubs import Placeholder

MAX_BRANCHES = 100_000_000  # branches; a list of 1,000 names that 16,384 ranks share is 16 million
MAX_DEPTH = (
    200  # levels; what goes through a tree calls itself at each, and Python ends at 1,000 calls
)


def check_tree_size(value: Any) -> None:
    """FormatError for what holds itself, or has more than `MAX_BRANCHES` branches or `MAX_DEPTH`
    levels. It looks at each object once.
    """
    measured: dict[int, tuple[int, int]] = {}  # branches and levels of those that are done
    in_progress: set[int] = set()
    stack = [value]
    while stack:
        node = stack[-1]
        if id(node) in measured:
            stack.pop()
            continue
        children = _children(node)
        containers = [child for child in children if isinstance(child, _CONTAINERS)]
        if id(node) not in in_progress:
            in_progress.add(id(node))
            stack += [child for child in containers if id(child) not in measured]
            if any(id(child) in in_progress for child in containers):
                raise FormatError("has an object that holds itself; needed a tree")
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
                    f"has {branches} branches on {levels} levels; needed at most {MAX_BRANCHES} on {MAX_DEPTH}"
                )
            measured[id(node)] = branches, levels
            stack.pop()


_CONTAINERS = (dict, list, tuple, set, frozenset, Placeholder)


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, (list, tuple, set, frozenset)):
        return list(node)
    return [node.args, node.state] if isinstance(node, Placeholder) else []

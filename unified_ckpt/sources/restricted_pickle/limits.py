"""What a pickle holds, as a tree. A pickle may name one object any number of times: thirty lists, each of the one before twice, are a
gigabyte of branches from two hundred bytes, and whoever goes through them never ends."""

from __future__ import annotations

from typing import Any

from unified_ckpt.errors import FormatError
from unified_ckpt.sources.restricted_pickle.stubs import Stub

MANY = 100_000_000  # branches; a list of 1,000 names that 16,384 ranks share is 16 million
DEEP = 200  # levels; what goes through a tree calls itself at each, and Python ends at 1,000 calls


def check_tree(found: Any) -> None:
    """FormatError for what holds itself, or has more than `MANY` branches or `DEEP` levels. It looks at each object once."""
    known: dict[int, tuple[int, int]] = {}  # branches and levels of those that are done
    open_: set[int] = set()
    todo = [found]
    while todo:
        one = todo[-1]
        if id(one) in known:
            todo.pop()
            continue
        held = _held(one)
        inside = [inner for inner in held if isinstance(inner, _HOLDERS)]
        if id(one) not in open_:
            open_.add(id(one))
            todo += [inner for inner in inside if id(inner) not in known]
            if any(id(inner) in open_ for inner in inside):
                raise FormatError("has an object that holds itself; needed a tree")
        else:
            open_.discard(id(one))
            branches = 1 + len(held) - len(inside) + sum(known[id(inner)][0] for inner in inside)
            levels = 1 + max((known[id(inner)][1] for inner in inside), default=0)
            if branches > MANY or levels > DEEP:
                raise FormatError(
                    f"has {branches} branches on {levels} levels; needed at most {MANY} on {DEEP}"
                )
            known[id(one)] = branches, levels
            todo.pop()


_HOLDERS = (dict, list, tuple, set, frozenset, Stub)


def _held(one: Any) -> list[Any]:
    if isinstance(one, dict):
        return [*one.keys(), *one.values()]
    if isinstance(one, (list, tuple, set, frozenset)):
        return list(one)
    return [one.args, one.state] if isinstance(one, Stub) else []

"""Folds tensors that differ only in numbers, and draws them as a tree of their names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from unified_ckpt.cli.display.text import printable
from unified_ckpt.core.intervals import to_intervals
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import human_size

Index = int | str

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Line:
    """Tensors of one pattern. `path` is their name, `("layers", "{0..3}", "weight")`.

    `columns` are shown to its right.
    """

    path: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(slots=True)
class _Node:
    lines: list[Line] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)


def collapse(tensors: Mapping[str, tuple[str, int]]) -> Iterator[Line]:
    """Fold tensors, which come in the order of `tree_key`, into lines.

    `tensors`: a text about each, and its bytes. Equal ones fold: numbers between dots to `{0..31}`,
    the states of a parameter to `{exp_avg,exp_avg_sq}`.
    """
    groups: dict[tuple[tuple[str | None, ...], bool, str, int], list[tuple[Index, ...]]] = {}
    for name, (text, nbytes) in tensors.items():
        components = _split_name(name)
        index: list[Index | None] = [*map(_parse_number, components)]
        if "/" in name:
            index[-1] = components[-1]
        pattern = tuple(c if i is None else None for c, i in zip(components, index, strict=True))
        group = groups.setdefault((pattern, "/" in name, text, nbytes), [])
        group.append(tuple(i for i in index if i is not None))
    for (pattern, has_state, text, nbytes), indexes in groups.items():
        for folded in _fold(indexes):
            texts = iter(map(_set_text, folded))
            path = [component if component is not None else next(texts) for component in pattern]
            if has_state:
                path[-2:] = ["/".join(path[-2:])]
            size = human_size(nbytes) + (" each" if prod(map(len, folded)) > 1 else "")
            yield Line(tuple(path), (text, size))


def tree(lines: Iterable[Line]) -> Iterator[tuple[str, ...]]:
    """Yield rows to print: a branch with its label, and the columns to its right."""
    root = _Node()
    for line in lines:
        node = root
        for component in _tree_path(line.path):
            node = node.children.setdefault(component, _Node())
        node.lines.append(line)
    return _draw_node(root, "")


def spec_text(spec: TensorSpec) -> str:
    """Describe a spec: `BF16 [4096, 4096]`."""
    return f"{spec.dtype} {list(spec.shape)}"


def tree_key(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Return the sort key of a tree: by component, with numbers between dots by value."""
    numbers = ((_parse_number(component), component) for component in _split_name(name))
    return tuple(
        (True, 0, component) if number is None else (False, number, "")
        for number, component in numbers
    )


def _split_name(name: str) -> list[str]:
    """Split a name at its dots and at its last slash."""
    fqn, slash, state = name.rpartition("/")
    return [*fqn.split("."), state] if slash else name.split(".")


def _parse_number(component: str) -> int | None:
    """Return the integer that a component is, if it has no sign and no leading zeros."""
    return int(component) if _NUMBER.fullmatch(component) else None


def _fold(indexes: Iterable[tuple[Index, ...]]) -> list[tuple[tuple[Index, ...], ...]]:
    """Write index tuples as products.

    `[(0, 1), (0, 2), (3, 1), (3, 2)]` -> `[((0, 3), (1, 2))]`.
    """
    rests: dict[Index, list[tuple[Index, ...]]] = {}
    for index in indexes:
        if not index:
            return [()]
        rests.setdefault(index[0], []).append(index[1:])
    grouped: dict[tuple[tuple[Index, ...], ...], list[Index]] = {}
    for first_index, rest in rests.items():
        grouped.setdefault(tuple(rest), []).append(first_index)
    return [(tuple(values), *folded) for rest, values in grouped.items() for folded in _fold(rest)]


def _set_text(values: tuple[Index, ...]) -> str:
    """Describe a set of numbers or of states: `7`, `{0..31}`, `{0,1,5..9}`, `{exp_avg,step}`."""
    spans = to_intervals(value for value in values if isinstance(value, int))
    texts = [
        f"{a}..{b - 1}" if b - a > 2 else ",".join(map(str, range(a, b))) for a, b in spans
    ] or [*map(str, values)]
    return f"{{{','.join(texts)}}}" if len(values) > 1 else texts[0]


def _tree_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line's path in the tree; a module's name stays with that of its tensor."""
    if len(path) < 2 or path[-2].startswith("{") or _parse_number(path[-2]) is not None:
        return path
    return *path[:-2], f"{path[-2]}.{path[-1]}"


def _draw_node(node: _Node, indent: str) -> Iterator[tuple[str, ...]]:
    for number, (label, child) in enumerate(node.children.items()):
        while not child.lines and len(child.children) == 1:
            (component, child), *_ = child.children.items()
            label = f"{label}.{component}"
        is_last = number == len(node.children) - 1
        branch = f"{indent}{'└─' if is_last else '├─'} {printable(label)}"
        yield from ((branch, *line.columns) for line in child.lines or [Line((), ())])
        yield from _draw_node(child, indent + ("   " if is_last else "│  "))

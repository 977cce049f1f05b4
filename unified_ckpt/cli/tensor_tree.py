"""Tensor names for people: one line for tensors that differ only in numbers, and lines as a tree of their dotted names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from unified_ckpt.cli.text import human, plain
from unified_ckpt.core.sharding.shardings import TensorSpec

Index = int | str


@dataclass(frozen=True, slots=True)
class Line:
    """Tensors that are alike. `steps`: their name between its dots, `("layers", "{0..3}", "weight")`; `cells`: what to say of each."""

    steps: tuple[str, ...]
    cells: tuple[str, ...]


@dataclass(slots=True)
class _Node:
    lines: list[Line] = field(default_factory=list)
    inner: dict[str, _Node] = field(default_factory=dict)


def collapse(specs: Mapping[str, TensorSpec]) -> list[Line]:
    """Lines for tensors that come in `natural` order.

    Numbers between dots fold to `{0..31}`, the states of a parameter to `{exp_avg,exp_avg_sq}`.
    """
    alike: dict[tuple[tuple[str | None, ...], bool, TensorSpec], list[tuple[Index, ...]]] = {}
    for name, spec in specs.items():
        template: list[str | None] = [*_steps(name)]
        index: list[Index] = []
        for i, step in enumerate(template):
            number = _number(step or "")
            if number is not None or (i == len(template) - 1 and "/" in name):
                template[i] = None
                index.append(step or "" if number is None else number)
        alike.setdefault((tuple(template), "/" in name, spec), []).append(tuple(index))
    lines = []
    for (pattern, has_state, spec), found in alike.items():
        for folded in _fold(found):
            texts = iter(map(_set_text, folded))
            steps = [step if step is not None else next(texts) for step in pattern]
            if has_state:
                state = steps.pop()
                steps[-1] += f"/{state}"
            size = human(spec.nbytes) + (" each" if prod(map(len, folded)) > 1 else "")
            lines.append(Line(tuple(steps), (spec_text(spec), size)))
    return lines


def tree(lines: Iterable[Line]) -> list[tuple[str, tuple[str, ...]]]:
    """Rows to print: a branch with its label, and the cells to its right."""
    root = _Node()
    for line in lines:
        node = root
        for step in _branch(line.steps):
            node = node.inner.setdefault(step, _Node())
        node.lines.append(line)
    rows: list[tuple[str, tuple[str, ...]]] = []
    _draw(root, "", rows)
    return rows


def table(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Rows as text, cells in columns."""
    width = max((len(label) for label, cells in rows if cells), default=0)
    columns = [
        max(len(cell) for cell in column)
        for column in zip(*(cells for _, cells in rows if len(cells) > 1), strict=False)
    ]
    texts = []
    for label, cells in rows:
        padded = [
            cell.ljust(columns[i]) if i < len(columns) and len(cells) > 1 else cell
            for i, cell in enumerate(cells)
        ]
        texts.append("  ".join([label.ljust(width), *padded]).rstrip() if cells else label)
    return texts


def spec_text(spec: TensorSpec) -> str:
    """`BF16 [4096, 4096]`."""
    return f"{spec.dtype} {list(spec.shape)}"


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key: numbers between dots by value."""
    numbers = ((_number(step), step) for step in _steps(name))
    return tuple(
        (True, 0, step) if number is None else (False, number, "") for number, step in numbers
    )


def _steps(name: str) -> list[str]:
    """The name between its dots; what follows the last slash is a step of its own."""
    fqn, slash, state = name.rpartition("/")
    return [*fqn.split("."), state] if slash else name.split(".")


def _number(step: str) -> int | None:
    """The number that a step is, as people write it: without sign and leading zeros."""
    if (
        not step.isdigit()
        or not step.isascii()
        or len(step) > 9
        or (step[0] == "0" and step != "0")
    ):
        return None
    return int(step)


def _fold(found: Iterable[tuple[Index, ...]]) -> list[tuple[tuple[Index, ...], ...]]:
    """Index tuples as products of index sets: `[(0, 1), (0, 2), (3, 1), (3, 2)]` -> `[((0, 3), (1, 2))]`."""
    rests: dict[Index, list[tuple[Index, ...]]] = {}
    for index in found:
        if not index:
            return [()]
        rests.setdefault(index[0], []).append(index[1:])
    firsts: dict[tuple[tuple[Index, ...], ...], list[Index]] = {}
    for first, rest in rests.items():
        firsts.setdefault(tuple(rest), []).append(first)
    return [(tuple(values), *inner) for rest, values in firsts.items() for inner in _fold(rest)]


def _set_text(values: Sequence[Index]) -> str:
    """`7`, `{0..31}`, `{0,1,5..9}`."""
    spans: list[list[Index]] = []
    for value in values:
        if spans and isinstance(value, int) and spans[-1][-1] == value - 1:
            spans[-1].append(value)
        else:
            spans.append([value])
    texts = [
        f"{span[0]}..{span[-1]}" if len(span) > 2 else ",".join(map(str, span)) for span in spans
    ]
    return f"{{{','.join(texts)}}}" if len(values) > 1 else texts[0]


def _branch(steps: tuple[str, ...]) -> tuple[str, ...]:
    """The steps of a line in the tree: a module's name stays with that of its tensor."""
    if len(steps) < 2 or steps[-2].startswith("{") or _number(steps[-2]) is not None:
        return steps
    return *steps[:-2], f"{steps[-2]}.{steps[-1]}"


def _draw(node: _Node, indent: str, rows: list[tuple[str, tuple[str, ...]]]) -> None:
    for number, (label, inner) in enumerate(node.inner.items()):
        while not inner.lines and len(inner.inner) == 1:
            (step, inner), *_ = inner.inner.items()
            label = f"{label}.{step}"
        last = number == len(node.inner) - 1
        branch = f"{indent}{'└─' if last else '├─'} {plain(label)}"
        rows.extend((branch, line.cells) for line in inner.lines or [Line((), ())])
        _draw(inner, indent + ("   " if last else "│  "), rows)

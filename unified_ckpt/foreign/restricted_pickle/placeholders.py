"""Placeholders for pickled objects whose classes are not imported."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class Placeholder:
    """Stands in for an object: holds the `args` of its creation and its pickled `state`."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Placeholder:
        """Keep the arguments: the class that they were meant for is never called."""
        instance = super().__new__(cls)
        instance.args, instance.state = args, None
        return instance

    def __init__(self, *args: Any) -> None:
        """Do nothing: some pickles only call `__new__`, which sets everything."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class FieldsPlaceholder:
    """Stands in for a plain dataclass.

    The C unpickler creates it and fills its `__dict__`, as a file may have millions.
    """


def placeholder_class(name: str, *, base: type = Placeholder) -> type:
    """Create a placeholder class with the name that messages should show."""
    return type(name.rpartition(".")[2], (base,), {})


def enum_member(enum: Any, name: Any) -> Placeholder:
    """Stand in for `getattr`, by which Python 3.11.0 to 3.11.3 pickles the members of an enum.

    TypeError for any other use.
    """
    if not (isinstance(enum, type) and issubclass(enum, Placeholder) and isinstance(name, str)):
        raise TypeError("calls getattr, expected only members of an enum")
    return enum(name)


# In pickles of protocol 2, as torch.save's are, built-in functions are of the second module.
GETATTR = {f"{module}.getattr": enum_member for module in ("builtins", "__builtin__")}

# Classes that only hold their arguments; training scripts save them in their settings.
NAMESPACE_CLASSES = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    *(
        f"pathlib{inner}.{kind}"
        for inner in ("", "._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    ),
)


_SEQUENCES = (list, tuple, deque)


def to_plain(value: Any) -> Any:
    """Convert a tree: namespaces become dicts, paths strings, and enum members their values."""
    if isinstance(value, Placeholder):
        if value.state is not None:
            return to_plain(value.state)
        if type(value).__name__.endswith("Path"):
            return os.path.join(*map(str, value.args or ["."]))
        values = [to_plain(item) for item in value.args]
        return values[0] if len(values) == 1 else values or {}
    if isinstance(value, type) and issubclass(value, Placeholder):
        return value.__name__
    if isinstance(value, dict):
        items = {key: to_plain(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # a Counter of a scheduler
    return _like(value, map(to_plain, value)) if type(value) in _SEQUENCES else value


def _like(sequence: Any, items: Iterable[Any]) -> Any:
    """Return a sequence of the same type with other items."""
    return deque(items, sequence.maxlen) if type(sequence) is deque else type(sequence)(items)


def replace_leaves(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Return a tree with `convert(leaf)` for each leaf of a kind. What has none is shared."""
    converted: dict[int, Any] = {}

    def visit(node: Any) -> Any:
        if id(node) not in converted:  # a node may have many parents
            converted[id(node)] = convert(node) if isinstance(node, kind) else rebuild(node)
        return converted[id(node)]

    def rebuild(node: Any) -> Any:
        if isinstance(node, dict):
            values = {key: visit(item) for key, item in node.items()}
            unchanged = all(values[key] is item for key, item in node.items())
            return node if unchanged else type(node)(values)
        if type(node) in _SEQUENCES:
            items = [visit(item) for item in node]
            unchanged = all(map(operator.is_, items, node))
            return node if unchanged else _like(node, items)
        if isinstance(node, Placeholder):
            args, state = visit(node.args), visit(node.state)
            if args is not node.args or state is not node.state:
                node = type(node)(*args)
                node.state = state
        return node

    try:
        return visit(value)
    finally:
        converted.clear()  # the functions refer to each other, and would keep the tensors alive

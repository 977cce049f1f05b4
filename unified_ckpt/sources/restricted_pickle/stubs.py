"""What stands in for objects of classes that are not imported, when a pickle is read."""

from __future__ import annotations

import os
from typing import Any


class Placeholder:
    """Stands in for an object of a class that is not imported: `args` it was made with, `state` it
    was given.
    """

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Placeholder:
        instance = super().__new__(cls)
        instance.args, instance.state = args, None
        return instance

    def __init__(self, *args: Any) -> None:
        """`__new__` has done it: some pickles call that only."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class FieldsPlaceholder:
    """Stands in for a plain dataclass, of which there may be millions: C's reader makes it and
    fills its `__dict__` by itself.
    """


def placeholder_class(name: str, *, base: type = Placeholder) -> type:
    """A class of its own for one name, as messages show it."""
    return type(name.rpartition(".")[2], (base,), {})


# Classes that only hold what they are given, which scripts put among their settings.
NAMESPACE_CLASSES = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    *(
        f"pathlib{inner}.{kind}"
        for inner in ("", "._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    ),
)


def to_plain(value: Any) -> Any:
    """A tree with dicts for stubs of namespaces, and text for those of paths."""
    if isinstance(value, Placeholder):
        is_path = type(value).__name__.endswith("Path")
        return (
            os.path.join(*map(str, value.args or ["."]))
            if is_path
            else to_plain(dict(value.state or {}))
        )
    if type(value) is dict:
        return {key: to_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_plain, value))
    return value

"""Errors that name the file, for whatever a damaged file raises in a reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.runtime.storage.regular_files import open_binary

# RuntimeError includes RecursionError.
DAMAGE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    OSError,
    StopIteration,
)


@contextmanager
def parsing(path: str, expected: str) -> Iterator[None]:
    """Raise FormatError for what a damaged value raises within: `path` is not what is expected."""
    try:
        yield
    except (*DAMAGE_ERRORS, NotFoundError) as error:
        raise FormatError(f"{path}: expected {expected}: {error!r}") from error


def set_nested(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Set a value in a tree of dicts, under these keys."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def read_text(path: str) -> str:
    """Return a small text file, such as one that names the latest step, without outer blanks."""
    with open_binary(path) as file:
        return file.read().decode(errors="replace").strip()

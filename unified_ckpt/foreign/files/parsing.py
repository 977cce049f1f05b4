"""Errors that name the file, for whatever a damaged file raises in a reader."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.runtime.storage.regular_files import is_file, is_folder, is_shortage, open_binary

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
        if is_shortage(error):
            raise
        raise FormatError(f"{path}: expected {expected}: {error!r}") from error


def expect_dict(value: Any, path: str, expected: str = "a dict") -> Mapping[Any, Any]:
    """Return a value that must be a dict. FormatError names the path and what is `expected`."""
    if not isinstance(value, Mapping):
        raise FormatError(f"{path}: got {type(value).__name__}, expected {expected}")
    return value


def set_nested(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Set a value in a tree of dicts, under these keys."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def read_text(path: str) -> str:
    """Return a small text file, such as one that names the latest step, without outer blanks."""
    with open_binary(path) as file:
        return file.read().decode(errors="replace").strip()


def step_folder(
    root: str, pointer: str, folder_name: Callable[[int], str], *, others: Collection[str] = ()
) -> str:
    """Return the folder of the step that a pointer file names; `root` itself without the file.

    `others`: folders that it may name instead of a number. FormatError for anything else,
    IncompleteError if the folder does not exist.
    """
    path = os.path.join(root, pointer)
    if not is_file(path):
        return root
    step = read_text(path)
    if not re.fullmatch("[0-9]{1,18}", step) and step not in others:
        expected = " or ".join(["a step number", *others])
        raise FormatError(f"{path}: got {step[:40]!r}, expected {expected}")
    folder = os.path.join(root, step if step in others else folder_name(int(step)))
    if not is_folder(folder):
        raise IncompleteError(
            f"{path}: names step {step}, but {folder} does not exist; pass the folder of an "
            "existing step"
        )
    return folder

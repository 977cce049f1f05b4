"""Errors that name the file, for whatever a damaged file raises in a reader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


def read_text(path: str) -> str:
    """Return a small text file, such as one that names the latest step, without outer blanks."""
    with open_binary(path) as file:
        return file.read().decode(errors="replace").strip()

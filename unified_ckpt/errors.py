"""Every error that the library raises on purpose.

CheckpointError
  x LayoutError      the slices of the ranks do not form whole tensors
  x FormatError      a file or a value is invalid
  x OptionError      an option has an unknown name or a wrong value; also a ValueError
  x IntegrityError   bytes have changed since they were written
  x NotFoundError    there is no checkpoint; also a FileNotFoundError and a ValueError
  x IncompleteError  files or tensors are missing
  x MismatchError    the checkpoint does not fit the target
  x StorageError     the storage failed
  x MissingPackageError  an optional package is not installed; also an ImportError
  x RankError        another rank failed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

_Result = TypeVar("_Result")


class CheckpointError(Exception):
    """Base class of the errors of saves, loads and checks."""


class LayoutError(CheckpointError):
    """The slices of the ranks do not form whole tensors.

    There is a gap, an overlap, a slice outside the shape, or replicas differ.
    """


class FormatError(CheckpointError):
    """A file or a value is invalid, or a file has a newer format."""


class OptionError(CheckpointError, ValueError):
    """An option has an unknown name or a wrong value, or two options exclude each other."""


class IntegrityError(CheckpointError):
    """Bytes have changed since they were written: wrong size or wrong digest."""


class NotFoundError(CheckpointError, FileNotFoundError, ValueError):
    """There is no checkpoint at this path.

    Lightning raises FileNotFoundError for such a path, Hugging Face's Trainer and Accelerate raise
    ValueError. Scripts that catch these continue to work. `errno` is None.
    """


class IncompleteError(CheckpointError):
    """Files or tensors are missing; the text lists them."""


class MismatchError(CheckpointError):
    """The checkpoint and the target differ in names, shapes or dtypes. The target is unchanged.

    `missing`: names that only the target has. `unexpected`: names that only the checkpoint has.
    `wrong`: a sentence for each tensor of another shape or dtype.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        wrong: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.wrong = tuple(wrong)


class StorageError(CheckpointError):
    """A file operation failed; the text names the file and the operation."""


class MissingPackageError(CheckpointError, ImportError):
    """An optional package is not installed; the text says how to install it."""


class RankError(CheckpointError):
    """Another rank failed. The text is the same on every rank and names the rank and its error."""


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Start the text of a CheckpointError that is raised within with `prefix`, a place."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{prefix}: {error}") from error


def describe_error(error: BaseException) -> str:
    """Return an error as text: ours as it is, any other with its class; some have no text."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def result_or_error(function: Callable[[], _Result]) -> _Result | Exception:
    """Return the result of a function, or the error that it raises.

    For a step before a collective: all ranks then raise the error of one together.
    """
    try:
        return function()
    except Exception as error:
        return error

"""Every error that the library raises on purpose, in one tree."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """Any failure of a save, a load or a check. Catch this one to catch them all."""


class LayoutError(CheckpointError):
    """The ranks' claims do not add up to whole tensors: a gap, an unequal overlap, a piece outside
    the shape, replicas that differ.
    """


class FormatError(CheckpointError):
    """A file or a value is not valid in this format, or is newer than this library reads."""


class IntegrityError(CheckpointError):
    """Bytes are not the ones that were written: wrong size or wrong digest."""


class NotFoundError(CheckpointError):
    """There is no checkpoint at this path."""


class IncompleteError(CheckpointError):
    """No complete copy exists: says which tensors and which files are missing."""


class MismatchError(CheckpointError):
    """The checkpoint and the target differ in names, shapes or dtypes. Nothing was written to the
    target.

    `missing`: wanted, not in the checkpoint. `unexpected`: in the checkpoint, wanted by no rank.
    `wrong`: one sentence for each tensor whose shape or dtype differs.
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
    """The storage refused or failed: which file, which range, which attempt."""


class RankError(CheckpointError):
    """Another rank failed. The text is the same on every rank and names the rank and its error."""

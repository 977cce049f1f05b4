"""An error as text for the other ranks, and back: the same class and words on each of them."""

from __future__ import annotations

import json

from unified_ckpt import errors
from unified_ckpt.errors import CheckpointError, MismatchError, RankError


def encode_error(error: BaseException, *, rank: int, world: int) -> str:
    """An error as text for the other ranks. Errors of our tree keep their class; any other becomes
    a RankError.
    """
    is_own_class = isinstance(error, CheckpointError)
    text = str(error) if is_own_class else f"{type(error).__name__}: {error}"
    prefix = (
        f"rank {rank}: "
        if world > 1 and not isinstance(error, RankError) and not getattr(error, "named", False)
        else ""
    )
    lists = (
        [error.missing, error.unexpected, error.wrong] if isinstance(error, MismatchError) else []
    )
    return json.dumps(
        {
            "kind": type(error).__name__ if is_own_class else "RankError",
            "text": prefix + text,
            "lists": lists,
        }
    )


def decode_error(text: str) -> CheckpointError:
    """The inverse: the same class and text on every rank."""
    fields = json.loads(text)
    error_class = getattr(errors, fields["kind"], RankError)
    if error_class is MismatchError:
        missing, unexpected, wrong = fields["lists"]
        return MismatchError(fields["text"], missing=missing, unexpected=unexpected, wrong=wrong)
    error: CheckpointError = error_class(fields["text"])
    return error

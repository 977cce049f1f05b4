"""Encodes errors as text for other ranks, and decodes them to the same class and text."""

from __future__ import annotations

import json

from unified_ckpt import errors
from unified_ckpt.errors import CheckpointError, MismatchError, RankError, describe_error
from unified_ckpt.runtime.comm.error_spread import Spread, spread_of


def encode_error(error: BaseException, *, rank: int, world: int) -> str:
    """Encode an error as text. Our own classes are kept; any other becomes a RankError."""
    is_checkpoint_error = isinstance(error, CheckpointError)
    kind = type(error).__name__ if is_checkpoint_error else "RankError"
    text = describe_error(error)
    names_rank = spread_of(error) in (Spread.PARTIAL, Spread.SHARED)
    if world > 1 and not isinstance(error, RankError) and not names_rank:
        text = f"rank {rank}: {text}"
    lists = {}
    if isinstance(error, MismatchError):
        lists = {"missing": error.missing, "unexpected": error.unexpected, "wrong": error.wrong}
    return json.dumps({"kind": kind, "text": text, "lists": lists})


def decode_error(text: str) -> CheckpointError:
    """Decode the error: the inverse of `encode_error`."""
    fields = json.loads(text)
    error_class = getattr(errors, fields["kind"], RankError)
    error: CheckpointError = error_class(fields["text"], **fields["lists"])
    return error

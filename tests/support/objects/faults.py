"""What happens to requests on a bad day."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "error",  # an answer with `status` and `code`; the request has no effect
    "error in 200",  # the same in the body of an answer whose status is 200
    "reset before the body",
    "reset in the body",
    "reset after the body",  # the request has no effect
    "lost answer",  # it has an effect
    "late",  # answered after `seconds`, with an effect
    "short",  # half of the answer's body
    "stalled",  # half of the answer's body, and the connection ends after `seconds`
    "wrong",  # one byte of the answer's body is changed
]


@dataclass
class Fault:
    """What happens to the next `times` requests of an operation."""

    operation: str
    kind: Kind
    times: int = 1
    status: int = 500
    code: str = "InternalError"
    seconds: float = 0.0

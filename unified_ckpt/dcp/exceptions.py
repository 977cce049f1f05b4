"""Raises the errors of a call as torch.distributed.checkpoint does, with ours as the cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from traceback import StackSummary, extract_tb
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from unified_ckpt.errors import CheckpointError, describe_error
from unified_ckpt.session import Session

_Result = TypeVar("_Result")
_FAILED_RANK = re.compile(r"rank (\d+): ")  # starts the error of one rank on all ranks


class DcpError(CheckpointError, CheckpointException):
    """A failed call of `unified_ckpt.dcp`, equal on all ranks. The cause is the error itself.

    `failures`: the error by the rank that failed; by this rank, if several did.
    """

    def __init__(
        self, message: str, failures: Mapping[int, tuple[BaseException, StackSummary]]
    ) -> None:
        CheckpointException.__init__(self, message, dict(failures))

    def __str__(self) -> str:
        return str(self.args[0])


def dcp_error(error: BaseException, session: Session) -> DcpError:
    """Return an error of a call on this rank as one that callers of either library catch."""
    text = describe_error(error)
    failed = _FAILED_RANK.match(text)
    comm = session.topologies.comm if session.topologies is not None else None
    rank = int(failed[1]) if failed else 0 if comm is None else comm.rank
    kind = f"{type(error).__name__}: " if isinstance(error, CheckpointError) else ""
    raised = DcpError(f"{kind}{text}", {rank: (error, extract_tb(error.__traceback__))})
    raised.__cause__ = error
    return raised


def call_as_dcp(function: Callable[[], _Result], session: Session) -> _Result:
    """Return the result of a function. DcpError for any error that it raises."""
    try:
        return function()
    except Exception as error:
        raise dcp_error(error, session) from error

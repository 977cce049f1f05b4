"""Ranks as threads that call `unified_ckpt.dcp`, each with a session over the ranks of a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from tests.support.harness import set_comm, try_ranks
from unified_ckpt.dcp import state_dict_loader, state_dict_saver
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.session import Session

_Result = TypeVar("_Result")


def try_dcp_ranks(world: int, function: Callable[[int], _Result]) -> list[_Result | BaseException]:
    """Call `function` with the rank, on ranks whose calls of `dcp` are of one group.

    Returns what each rank returned or raised.
    """
    sessions = threading.local()

    def session_of(*_: Any, **__: Any) -> Session:
        with suppress(Exception):  # as `dcp.sessions` does
            sessions.own.wait()
        own: Session = sessions.own
        return own

    def run(comm: Comm) -> _Result:
        sessions.own = Session()
        set_comm(sessions.own, comm)
        try:
            return function(comm.rank)
        finally:
            with suppress(Exception):
                sessions.own.close()

    with pytest.MonkeyPatch.context() as patch:
        for module in (state_dict_saver, state_dict_loader):
            patch.setattr(module, "session_of", session_of)
        return try_ranks(world, run)


def run_dcp_ranks(world: int, function: Callable[[int], _Result]) -> list[_Result]:
    """Call `function` with the rank and return the results. Raises the first rank's error."""
    results = try_dcp_ranks(world, function)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]

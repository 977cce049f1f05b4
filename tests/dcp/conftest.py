"""Closes the sessions of `unified_ckpt.dcp` after each test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from unified_ckpt.dcp import sessions


@pytest.fixture(autouse=True)
def closed_sessions() -> Iterator[None]:
    yield
    while sessions._SESSIONS:
        _, session = sessions._SESSIONS.popitem()
        with suppress(Exception):  # that of a save that failed, which its Future has
            session.close()

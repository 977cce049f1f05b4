"""Each test has Accelerate for itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.integrations.accelerates import Job


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Reset Accelerate, which keeps state per process, also that of a Trainer."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()


@pytest.fixture(scope="module")
def straight() -> Job:
    """Three uninterrupted epochs of six steps."""
    return Job().run(3)

"""A pytest plugin that attaches the engine to every Accelerator of Accelerate's tests."""

from __future__ import annotations

import functools
from typing import Any

import accelerate

from unified_ckpt.integrations.accelerate import attach


def pytest_configure() -> None:
    """Patch the class, which all modules share."""
    accelerate.Accelerator.__init__ = _attached(accelerate.Accelerator.__init__)  # type: ignore[method-assign]


def _attached(init: Any) -> Any:
    @functools.wraps(init)
    def wrapped(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        init(accelerator, *args, **kwargs)
        attach(accelerator)

    return wrapped

"""A pytest plugin that adds the callback to every Trainer of transformers' tests."""

from __future__ import annotations

import functools
from typing import Any

import transformers

from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback


def pytest_configure() -> None:
    """Patch the class, which all modules share."""
    transformers.Trainer.__init__ = _with_callback(transformers.Trainer.__init__)  # type: ignore[method-assign]


def _with_callback(init: Any) -> Any:
    @functools.wraps(init)
    def wrapped(trainer: Any, *args: Any, **kwargs: Any) -> None:
        init(trainer, *args, **kwargs)
        callback = UnifiedCheckpointCallback()
        callback.attach(trainer)
        trainer.add_callback(callback)

    return wrapped

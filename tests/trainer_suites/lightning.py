"""A pytest plugin that makes the two changes of docs/guide/trainers.md in Lightning's tests: the
callback in every Trainer, and our `load_from_checkpoint` for folders.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback, load_from_checkpoint


def pytest_configure() -> None:
    """Patch both packages of Lightning."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        trainer = importlib.import_module(package).Trainer
        trainer.__init__ = _with_callback(trainer.__init__)
        for module in ("module", "datamodule"):
            core = importlib.import_module(f"{package}.core.{module}")
            core._load_from_checkpoint = _with_folders(core._load_from_checkpoint)


def _with_callback(init: Any) -> Any:
    @functools.wraps(init)
    def wrapped(trainer: Any, *args: Any, callbacks: Any = None, **kwargs: Any) -> None:
        items = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        init(trainer, *args, callbacks=[*items, UnifiedCheckpointCallback()], **kwargs)

    return wrapped


def _with_folders(load: Any) -> Any:
    def wrapped(cls: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(checkpoint_path, str | os.PathLike) and os.path.isdir(checkpoint_path):
            kwargs |= dict(zip(("map_location", "hparams_file"), args, strict=False))
            return load_from_checkpoint(
                cls,
                checkpoint_path,
                **{key: value for key, value in kwargs.items() if value is not None},
            )
        return load(cls, checkpoint_path, *args, **kwargs)

    return wrapped

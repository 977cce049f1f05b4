"""A pytest plugin that makes the changes of docs/guide/lightning.md in Lightning's tests: the
callback in every Trainer, and for folders our `load_from_checkpoint`, and `uc.open` where a test
reads what a checkpoint contains.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from lightning.fabric.utilities import cloud_io
from lightning.pytorch import Trainer
from lightning.pytorch.core import datamodule, module

import unified_ckpt as uc
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback, load_from_checkpoint


def pytest_configure() -> None:
    """Patch the package that the tests import. Importing the other one renames its loggers."""
    Trainer.__init__ = _with_callback(Trainer.__init__)
    for core in (module, datamodule):
        core._load_from_checkpoint = _with_modules(core._load_from_checkpoint)
    torch.load = _with_contents(torch.load)
    cloud_io._load = _with_contents(cloud_io._load)


def _with_callback(init: Any) -> Any:
    @functools.wraps(init)
    def wrapped(trainer: Any, *args: Any, callbacks: Any = None, **kwargs: Any) -> None:
        items = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        init(trainer, *args, callbacks=[*items, UnifiedCheckpointCallback()], **kwargs)

    return wrapped


def _with_modules(load: Any) -> Any:
    def wrapped(cls: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_folder(checkpoint_path):
            return load(cls, checkpoint_path, *args, **kwargs)
        kwargs |= dict(zip(("map_location", "hparams_file", "strict"), args, strict=False))
        kwargs.pop("weights_only", None)  # nothing is pickled
        present = {name: value for name, value in kwargs.items() if value is not None}
        return load_from_checkpoint(cls, checkpoint_path, **present)

    return wrapped


def _with_contents(load: Any) -> Any:
    def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_folder(path):
            return load(path, *args, **kwargs)
        with uc.open(path) as source:
            model = source["model"]
            state_dict = {name: model[name][...] for name in model}
            return {**source.extra["lightning"], "state_dict": state_dict}

    return wrapped


def _is_folder(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and os.path.isdir(path)

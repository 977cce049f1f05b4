"""Which strategies can be saved, and what to use in place of others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from unified_ckpt.errors import CheckpointError, LayoutError

_LOG = logging.getLogger("unified_ckpt")
_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_REMEDIES = {
    "FSDPStrategy": "ModelParallelStrategy (FSDP2)",
    "DeepSpeedStrategy": "ModelParallelStrategy (FSDP2), or Lightning's own checkpoints",
}


def check_supported(strategy: Any) -> None:
    """Raise LayoutError for a strategy that cannot be saved. Compares names, because two packages
    have the same classes.
    """
    class_names = [base.__name__ for base in type(strategy).__mro__]
    refused = next((name for name in class_names if name in _REMEDIES), None)
    if refused or not set(class_names) & set(_SUPPORTED):
        name = refused or class_names[0]
        remedy = _REMEDIES.get(name, f"one of {', '.join(_SUPPORTED)}")
        raise LayoutError(f"UnifiedCheckpointCallback: got {name}; use {remedy}")
    plugin = type(strategy.checkpoint_io).__name__
    if plugin != "TorchCheckpointIO":
        _LOG.warning(
            "UnifiedCheckpointCallback: %s is used only for checkpoints of stock Lightning",
            plugin,
        )


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise CheckpointError for ModelCheckpoints that a root in a bucket cannot serve."""
    if any(getattr(callback, "save_last", None) == "link" for callback in callbacks):
        raise CheckpointError(
            "ModelCheckpoint(save_last='link'): got it with a root in a bucket, which has no "
            "links; use save_last=True"
        )
    folders = {getattr(callback, "dirpath", None) for callback in callbacks} - {None}
    if len(folders) > 1:
        raise CheckpointError(
            f"ModelCheckpoint(dirpath): got {len(folders)} folders with a root in a bucket, "
            "expected one; their files would have the same names"
        )

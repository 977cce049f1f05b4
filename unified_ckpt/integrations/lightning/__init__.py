"""Unified checkpoints for Lightning. Knows its objects; decides no file layout."""

from __future__ import annotations

from unified_ckpt.integrations.lightning.callback import (
    UnifiedCheckpointCallback,
    load_from_checkpoint,
)

__all__ = ["UnifiedCheckpointCallback", "load_from_checkpoint"]

"""Unified checkpoints for Hugging Face's Trainer. Knows its objects; decides no file layout."""

from __future__ import annotations

from unified_ckpt.integrations.transformers.callback import (
    UnifiedCheckpointCallback,
    UnifiedCheckpointMixin,
)
from unified_ckpt.integrations.transformers.hub_names import open_hub_names, open_model_names

__all__ = [
    "UnifiedCheckpointCallback",
    "UnifiedCheckpointMixin",
    "open_hub_names",
    "open_model_names",
]

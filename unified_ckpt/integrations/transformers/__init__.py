"""Saves and loads of Hugging Face's Trainer through `unified_ckpt`. Knows Hugging Face's Trainer's
objects; decides nothing about files.
"""

from __future__ import annotations

from unified_ckpt.integrations.transformers.callback import (
    UnifiedCheckpointCallback,
    UnifiedCheckpointMixin,
    open_hub_names,
    open_model_names,
)

__all__ = [
    "UnifiedCheckpointCallback",
    "UnifiedCheckpointMixin",
    "open_hub_names",
    "open_model_names",
]

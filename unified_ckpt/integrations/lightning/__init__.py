"""Saves and loads of Lightning through `unified_ckpt`. Knows Lightning's objects; decides nothing
about files.
"""

from __future__ import annotations

from unified_ckpt.integrations.lightning.callback import (
    UnifiedCheckpointCallback,
    load_from_checkpoint,
)

__all__ = ["UnifiedCheckpointCallback", "load_from_checkpoint"]

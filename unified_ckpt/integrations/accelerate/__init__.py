"""Unified checkpoints for Accelerate. Knows its objects; decides no file layout."""

from __future__ import annotations

from unified_ckpt.integrations.accelerate.calls import (
    attach,
    load_state,
    save_state,
    save_state_async,
)

__all__ = ["attach", "load_state", "save_state", "save_state_async"]

"""Unified checkpoints for Accelerate. Knows its objects; decides no file layout."""

from __future__ import annotations

from unified_ckpt.integrations.accelerate.calls import (
    after_step,
    attach,
    load_state,
    save_state,
    save_state_async,
)

__all__ = ["after_step", "attach", "load_state", "save_state", "save_state_async"]

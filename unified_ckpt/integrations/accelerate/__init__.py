"""Unified checkpoints for Accelerate. Knows its objects; decides no file layout."""

from __future__ import annotations

from unified_ckpt.integrations.accelerate.calls import (
    attach,
    load_state,
    save_state,
    save_state_async,
)
from unified_ckpt.integrations.accelerate.run import after_step

__all__ = ["after_step", "attach", "load_state", "save_state", "save_state_async"]

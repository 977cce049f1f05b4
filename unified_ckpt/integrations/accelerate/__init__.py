"""Saves and loads of Accelerate through `unified_ckpt`. Knows Accelerate's objects; decides nothing
about files.
"""

from __future__ import annotations

from unified_ckpt.integrations.accelerate.calls import (
    attach,
    load_state,
    save_state,
    save_state_async,
)

__all__ = ["attach", "load_state", "save_state", "save_state_async"]

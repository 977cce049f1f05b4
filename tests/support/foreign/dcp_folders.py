"""Folders of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp


def save_dcp(state: dict[str, Any], path: Path) -> Path:
    """Save by one process without a process group."""
    with warnings.catch_warnings(action="ignore"):  # "Saving without distributed" is intended
        dcp.save(state, checkpoint_id=str(path))
    return path

"""Recognizes Megatron-LM checkpoints by file names; does not import torch."""

from __future__ import annotations

from unified_ckpt.foreign.dcp.detect import DCP_METADATA
from unified_ckpt.foreign.files.listing import PathListing

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"


def is_megatron(listing: PathListing) -> bool:
    """Return whether this is a root with a tracker, or a step of rank folders or torch_dist."""
    has_rank_folders = any(
        name.startswith("mp_rank_") and not name.endswith(".pt") for name in listing.entries
    )
    return (
        MEGATRON_TRACKER in listing.entries
        or has_rank_folders
        or {DCP_METADATA, "metadata.json"} <= listing.entries
    )

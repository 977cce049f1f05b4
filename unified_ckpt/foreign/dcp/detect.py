"""Recognizes folders of torch.distributed.checkpoint by file names; does not import torch."""

from __future__ import annotations

from unified_ckpt.foreign.files.listing import PathListing

DCP_METADATA = ".metadata"
LIGHTNING_META = "meta.pt"  # the remaining state of Lightning's sharded checkpoints


def is_dcp(listing: PathListing) -> bool:
    """Return whether this is a folder of torch.distributed.checkpoint."""
    return DCP_METADATA in listing.entries


def is_lightning(listing: PathListing) -> bool:
    """Return whether this is a sharded checkpoint of Lightning."""
    return {DCP_METADATA, LIGHTNING_META} <= listing.entries

"""Recognizes nanotron checkpoints by file names; does not import torch."""

from __future__ import annotations

from unified_ckpt.foreign.files.listing import PathListing

NANOTRON_LATEST, NANOTRON_META = "latest.txt", "checkpoint_metadata.json"


def is_nanotron(listing: PathListing) -> bool:
    """Return whether this is a step, or a root of steps."""
    return not listing.entries.isdisjoint((NANOTRON_LATEST, NANOTRON_META))

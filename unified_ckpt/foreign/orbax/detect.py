"""Recognizes Orbax and MaxText checkpoints by file names; does not import torch."""

from __future__ import annotations

import os
from collections.abc import Collection

from unified_ckpt.foreign.files.listing import PathListing
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder, probe

ORBAX_TREE, ORBAX_STEP = "_METADATA", "_CHECKPOINT_METADATA"  # in an item, and in a step
ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"


def list_orbax_items(path: str, entries: Collection[str]) -> list[str]:
    """Return the folders of an Orbax step that hold a tree of arrays."""
    return sorted(name for name in entries if probe(is_file, os.path.join(path, name, ORBAX_TREE)))


def is_orbax(listing: PathListing) -> bool:
    """Return whether this is an Orbax item, a step, or a root of steps."""
    if listing.entries & {ORBAX_TREE, ORBAX_STEP} or list_orbax_items(
        listing.path, [name for name in listing.entries if "." not in name]
    ):
        return True
    return any(
        _is_orbax_step(os.path.join(listing.path, name))
        for name in listing.entries
        if name[-1:].isdigit() or ORBAX_UNFINISHED in name
    )


def _is_orbax_step(path: str) -> bool:
    return is_file(os.path.join(path, ORBAX_STEP)) or bool(
        list_orbax_items(path, list_folder(path))
    )

"""Detects FlexCheckpoint folders by file names; does not import torch.

A group folder is what one `paddle.distributed.save_state_dict` writes: `<id>.metadata` and a data
file `<rank>_<id>` of each rank. A step of PaddleFormers has a group folder for each part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from unified_ckpt.foreign.files.listing import PathListing
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.storage.regular_files import list_folder

EMA = "ema"
PART_FOLDERS = {
    "model_state": MODEL,
    "optimizer_state": OPTIMIZER,
    "master_weight": MASTER,
    "ema_state": EMA,
}
METADATA_FILE = re.compile(r"([0-9]{1,18})\.metadata")
DATA_FILE = re.compile(r"[0-9]{1,18}_([0-9]{1,18})\.(?:distcp|safetensors)")
LOCK_SUFFIX = ".lock"  # beside a metadata file that is being written


def is_flex(listing: PathListing) -> bool:
    """Return whether a folder is a group folder or a step; interrupted saves count."""
    return not listing.is_file and (
        _is_group(listing.entries) or bool(group_folders(listing.path, listing.entries))
    )


def group_folders(path: str, entries: Collection[str]) -> dict[str, str]:
    """Return the group folders of a step, by part."""
    return {
        part: os.path.join(path, name)
        for name, part in PART_FOLDERS.items()
        if name in entries and any(map(_is_of_group, list_folder(os.path.join(path, name))))
    }


def has_metadata(entries: Collection[str]) -> bool:
    """Return whether a folder has a metadata file, or one that is being written."""
    return any(METADATA_FILE.fullmatch(entry.removesuffix(LOCK_SUFFIX)) for entry in entries)


def _is_of_group(entry: str) -> bool:
    file = entry.removesuffix(LOCK_SUFFIX)
    return bool(METADATA_FILE.fullmatch(file) or DATA_FILE.fullmatch(entry))


def _is_group(entries: Collection[str]) -> bool:
    data_files = [entry for entry in entries if DATA_FILE.fullmatch(entry)]
    return any(file.endswith(".distcp") for file in data_files) or (
        bool(data_files) and has_metadata(entries)
    )

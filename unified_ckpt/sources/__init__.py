"""Checkpoints in formats of others: which one a path holds, and it as a Source.

A folder with our manifest, or of Hugging Face's weights alone, is none of these: the engine reads it itself.
"""

from __future__ import annotations

import os

from unified_ckpt.engine.checkpoint import open_path
from unified_ckpt.engine.source import Source
from unified_ckpt.format import names
from unified_ckpt.runtime.storage import is_url
from unified_ckpt.sources.marks import BIN, BIN_INDEX, DCP_METADATA


def format_of(path: str) -> str | None:
    """The format of a local path that somebody else wrote; None for ours, for Hugging Face's safetensors, and for what is not known."""
    if is_url(path):
        return None
    if os.path.isfile(path):
        return "torch" if path.endswith((".pt", ".pth", ".bin", ".ckpt")) else None
    found = set(os.listdir(path)) if os.path.isdir(path) else set()
    if names.MANIFEST in found or names.index_name("model") in found or names.file_name("model", number=1, count=1) in found:
        return None
    if DCP_METADATA in found:
        return "dcp"
    return "huggingface-bin" if found & {BIN, BIN_INDEX} else None


def open_any(path: str) -> Source:
    """The checkpoint at a path, in any format. NotFoundError, FormatError or IncompleteError where there is none that can be read."""
    place = os.path.abspath(local(path))
    match format_of(local(path)):  # what needs torch is imported here: `inspect` of our own folders starts without
        case "dcp":
            from unified_ckpt.sources.dcp import open_dcp

            return open_dcp(place)
        case "torch":
            from unified_ckpt.sources.torch_files import open_torch_file

            return open_torch_file(place)
        case "huggingface-bin":
            from unified_ckpt.sources.torch_files import open_bin_folder

            return open_bin_folder(place)
    return open_path(path, hold=True)


def local(path: str) -> str:
    """A local path without the scheme that it may have."""
    return path.removeprefix("file://")

"""Whether torch.distributed.checkpoint was the last to save to a folder.

It writes into a folder of ours, of which it replaces only the `.metadata`; we replace folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.storage.regular_files import is_file, open_binary

_METADATA = ".metadata"
_DCP_FILE = re.compile(r"\.metadata(\.tmp)?|__[0-9]+(_[0-9]+\.distcp|\.metadata)")
_PICKLE = b"\x80"  # starts every pickle, and no text


def is_dcp_folder(path: str) -> bool:
    """Return whether torch.distributed.checkpoint was the last to save to a local folder."""
    metadata = os.path.join(path, _METADATA)
    if not is_file(metadata):
        return False
    with open_binary(metadata) as file:
        return file.read(len(_PICKLE)) == _PICKLE


def dcp_files(entries: Iterable[str]) -> frozenset[str]:
    """Return the entries that torch.distributed.checkpoint writes."""
    return frozenset(filter(_DCP_FILE.fullmatch, entries))


def check_last_save(path: str) -> None:
    """Raise FormatError for a local checkpoint of ours that is not the last save in its folder."""
    if is_dcp_folder(path):
        raise FormatError(
            f"{path}: got a later save of torch.distributed.checkpoint in the folder, expected "
            "none; load that save with unified_ckpt.dcp.load or SourceOptions(format='dcp'), or "
            f"remove its {_METADATA} to read the earlier one"
        )

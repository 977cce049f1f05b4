"""Detects PaddleNLP folders by file names and, where needed, the first bytes of headers.

Hugging Face uses some of the same file names. Does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from unified_ckpt.errors import CheckpointError
from unified_ckpt.foreign.files.listing import PathListing
from unified_ckpt.format import names
from unified_ckpt.format.header import header_nbytes, parse_header
from unified_ckpt.runtime.storage.regular_files import open_binary

PEFT = "peft_model"
PICKLED_TRAINER_STATE = "trainer_state.bin"  # of PaddleFormers 1.2 and later
_PADDLE_INDEXES = frozenset(
    {names.index_name("optimizer"), names.index_name("master_weights"), names.index_name(PEFT)}
)
_LEGACY_MODEL = re.compile(r"model_state(\.[a-z0-9_]+)?\.pdparams")
_MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PART_FILE = re.compile(r"(model|optimizer|master_weights|peft_model).*\.safetensors")
_NUMPY_HEADER = b'{"__metadata__":{"format":"np"}'


def part_file(part: str) -> re.Pattern[str]:
    """Return a pattern for a part's safetensors files: single, numbered, or one per rank."""
    return re.compile(rf"{part}(-\d{{5}}-of-\d{{5}}|([._](tp|pp|shard|moe)\d+)*)\.safetensors")


def is_legacy(entries: Collection[str]) -> bool:
    """Return whether a folder has pickled PaddleNLP weights."""
    return any(_LEGACY_MODEL.fullmatch(entry) for entry in entries)


def is_paddle(listing: PathListing) -> bool:
    """Return whether a folder without a unified manifest is PaddleNLP's.

    Headers are read only if Hugging Face could have written all of the names.
    """
    if names.DIGESTS in listing.entries:  # an incomplete unified checkpoint
        return False
    return is_legacy(listing.entries) or _is_saved_by_numpy(listing.path, listing.entries)


def _is_saved_by_numpy(path: str, entries: Collection[str]) -> bool:
    """Return whether headers show Paddle: it writes "np" into most, Hugging Face "pt" into all.

    A damaged header shows nothing. If an index has a Paddle name, all headers are read, and if
    none is valid the name decides: read as Hugging Face, the rest of the folder would be transposed
    weights without optimizer. PaddleFormers also writes "pt" into adapters, whose index nobody else
    writes.
    """
    if names.index_name(PEFT) in entries:
        return True
    has_paddle_index = not _PADDLE_INDEXES.isdisjoint(entries)
    pattern = _PART_FILE if has_paddle_index else _MODEL_FILE
    all_verdicts = (
        _has_numpy_header(os.path.join(path, entry))
        for entry in sorted(entries)
        if pattern.fullmatch(entry)
    )
    readable = (verdict for verdict in all_verdicts if verdict is not None)
    if not has_paddle_index:
        return next(readable, False)
    verdicts = list(readable)
    return any(verdicts) or not verdicts


def _has_numpy_header(path: str) -> bool | None:
    """Return whether a header says "np", or None if it is damaged."""
    try:
        with open_binary(path) as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = file.read(8 + len(_NUMPY_HEADER))
            if header_bytes[8:] == _NUMPY_HEADER:
                return True
            needed = header_nbytes(header_bytes, file_size=size, file=path)
            header_bytes += file.read(max(0, needed - len(header_bytes)))
            parse_header(header_bytes, file_size=size, file=path)
    except CheckpointError:  # opening the folder reports the file
        return None
    return False

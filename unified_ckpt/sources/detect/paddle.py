"""How a folder is known to be PaddleNLP's: by names, and where Hugging Face has those too, by the
first bytes of their files. No torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import names
from unified_ckpt.format.header import header_nbytes, parse_header
from unified_ckpt.runtime.storage.regular_files import open_binary

PEFT = "peft_model"
_PADDLE_INDEXES = frozenset(
    {names.index_name("optimizer"), names.index_name("master_weights"), names.index_name(PEFT)}
)
_LEGACY_MODEL = re.compile(r"model_state(\.[a-z0-9_]+)?\.pdparams")
_MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PART_FILE = re.compile(r"(model|optimizer|master_weights|peft_model).*\.safetensors")
_NUMPY_HEADER = b'{"__metadata__":{"format":"np"}'


def part_file(part: str) -> re.Pattern[str]:
    """The names of a part's safetensors files: those of one, of several, of ranks."""
    return re.compile(rf"{part}(-\d{{5}}-of-\d{{5}}|([._](tp|pp|shard|moe)\d+)*)\.safetensors")


def is_legacy(entries: Collection[str]) -> bool:
    return any(_LEGACY_MODEL.fullmatch(entry) for entry in entries)


def is_paddle(path: str, entries: Collection[str]) -> bool:
    """Of a folder without our manifest. A header is read only where Hugging Face could have written
    all names in it.
    """
    if names.DIGESTS in entries:  # ours, cut short
        return False
    return is_legacy(entries) or _is_saved_by_numpy(path, entries)


def _is_saved_by_numpy(path: str, entries: Collection[str]) -> bool:
    """PaddleNLP writes "np" into every header; Hugging Face writes "pt", and reads no "np".

    A damaged header tells nothing. Where the names of indexes are PaddleNLP's own every header is
    asked, and where none tells those names do: read as Hugging Face's, what is left of it would be
    turned weights without optimizer.
    """
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
    """None where the header is damaged."""
    try:
        with open_binary(path) as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = file.read(8 + len(_NUMPY_HEADER))
            if header_bytes[8:] == _NUMPY_HEADER:
                return True
            header_bytes += file.read(
                max(0, header_nbytes(header_bytes, file_size=size, file=path) - len(header_bytes))
            )
            parse_header(header_bytes, file_size=size, file=path)
    except CheckpointError:  # who opens the folder names it
        return None
    return False

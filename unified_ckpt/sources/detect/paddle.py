"""How a folder is known to be PaddleNLP's: by names, and where Hugging Face has those too, by the first bytes of their files. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import names
from unified_ckpt.format.header import header_nbytes, parse_header
from unified_ckpt.runtime.storage.regular_files import open_file

PEFT = "peft_model"
_OWN = frozenset(
    {names.index_name("optimizer"), names.index_name("master_weights"), names.index_name(PEFT)}
)
_LEGACY = re.compile(r"model_state(\.[a-z0-9_]+)?\.pdparams")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_ANY = re.compile(r"(model|optimizer|master_weights|peft_model).*\.safetensors")
_NUMPY = b'{"__metadata__":{"format":"np"}'


def part_file(part: str) -> re.Pattern[str]:
    """The names of a part's safetensors files: those of one, of several, of ranks."""
    return re.compile(rf"{part}(-\d{{5}}-of-\d{{5}}|([._](tp|pp|shard|moe)\d+)*)\.safetensors")


def is_legacy(entries: Collection[str]) -> bool:
    return any(_LEGACY.fullmatch(entry) for entry in entries)


def is_paddle(path: str, entries: Collection[str]) -> bool:
    """Of a folder without our manifest. A header is read only where Hugging Face could have written all names in it."""
    if names.DIGESTS in entries:  # ours, cut short
        return False
    return is_legacy(entries) or _saved_by_numpy(path, entries)


def _saved_by_numpy(path: str, entries: Collection[str]) -> bool:
    """PaddleNLP writes "np" into every header; Hugging Face writes "pt", and reads no "np".

    A damaged header tells nothing. Where the names of indexes are PaddleNLP's own every header is asked, and where none tells those names
    do: read as Hugging Face's, what is left of it would be turned weights without optimizer.
    """
    own = not _OWN.isdisjoint(entries)
    kind = _ANY if own else _WEIGHTS
    headers = (
        _is_numpys(os.path.join(path, entry)) for entry in sorted(entries) if kind.fullmatch(entry)
    )
    told = (one for one in headers if one is not None)
    if not own:
        return next(told, False)
    by = list(told)
    return any(by) or not by


def _is_numpys(path: str) -> bool | None:
    """None where the header is damaged."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8 + len(_NUMPY))
            if head[8:] == _NUMPY:
                return True
            head += file.read(max(0, header_nbytes(head, file_size=size, file=path) - len(head)))
            parse_header(head, file_size=size, file=path)
    except CheckpointError:  # who opens the folder names it
        return None
    return False

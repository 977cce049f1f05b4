"""How a folder is known to be PaddleNLP's: by names, and where Hugging Face has those too, by the first bytes of one file. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from unified_ckpt.format import names

PEFT = "peft_model"
_OWN = frozenset({names.index_name("optimizer"), names.index_name("master_weights"), names.index_name(PEFT)})
_LEGACY = re.compile(r"model_state(\.[a-z0-9_]+)?\.pdparams")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_ANY = re.compile(r"(model|optimizer|master_weights|peft_model).*\.safetensors")
_NUMPY = b'{"__metadata__":{"format":"np"}'


def is_legacy(entries: Collection[str]) -> bool:
    return any(_LEGACY.fullmatch(entry) for entry in entries)


def is_paddle(path: str, entries: Collection[str]) -> bool:
    """Of a folder without our manifest. A header is read only where Hugging Face could have written all names in it."""
    if names.DIGESTS in entries:  # ours, cut short
        return False
    return is_legacy(entries) or _saved_by_numpy(path, entries)


def _saved_by_numpy(path: str, entries: Collection[str]) -> bool:
    """PaddleNLP writes "np" into every header; Hugging Face writes "pt", and reads no "np". Without any file the names of indexes tell."""
    kind = _WEIGHTS if _OWN.isdisjoint(entries) else _ANY
    first = min((entry for entry in entries if kind.fullmatch(entry)), default=None)
    if first is None:
        return not _OWN.isdisjoint(entries)
    with open(os.path.join(path, first), "rb") as file:
        return file.read(8 + len(_NUMPY))[8:] == _NUMPY

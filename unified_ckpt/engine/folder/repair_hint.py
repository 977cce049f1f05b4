"""What an error proposes for a damaged folder: a command that works for this folder."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

from unified_ckpt.format.manifest_fields import FileRecord
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.storage.storage import LocalStorage

_COPY_AGAIN = "copy them into the folder again, such as by another download"


def index_hint(storage: Reader, files: Mapping[str, FileRecord]) -> str:
    """Return how to restore the index of a part that has these files. The folder has a manifest."""
    if not isinstance(storage, LocalStorage):
        return "copy it into the folder again"
    others = [name for name, file in files.items() if storage.size(name) != file.nbytes]
    if others:  # headers are missing too
        hint = files_hint(storage, has_manifest=True)
        return f"{others[0]} is missing or has another size too; {hint}"
    return f"`unified-ckpt verify {quote(storage.root)} --repair` rebuilds it from the headers"


def files_hint(storage: Reader, *, has_manifest: bool) -> str:
    """Return how to restore missing files. Only a manifest says what a repair has to restore."""
    if not (has_manifest and isinstance(storage, LocalStorage)):
        return _COPY_AGAIN
    command = f"unified-ckpt verify {quote(storage.root)} --repair --from COPY"
    return f"load another step, or restore them with `{command}`"

"""What an error proposes for a damaged folder: a command that works for this folder."""

from __future__ import annotations

from shlex import quote

from unified_ckpt.runtime.storage.storage import LocalStorage, Reader

_COPY_AGAIN = "copy them into the folder again, such as by another download"


def index_hint(storage: Reader) -> str:
    """Return how to restore the index of a part. The folder has a manifest."""
    if not isinstance(storage, LocalStorage):
        return "copy it into the folder again"
    return f"`unified-ckpt verify {quote(storage.root)} --repair` rebuilds it from the headers"


def files_hint(storage: Reader, *, has_manifest: bool) -> str:
    """Return how to restore missing files. Only a manifest says what a repair has to restore."""
    if not (has_manifest and isinstance(storage, LocalStorage)):
        return _COPY_AGAIN
    command = f"unified-ckpt verify {quote(storage.root)} --repair --from COPY"
    return f"load another step, or restore them with `{command}`"

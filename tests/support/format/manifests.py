"""Reads a manifest, or seals an edited one or index anew: wrong content with a right digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unified_ckpt.format.manifest import add_crc
from unified_ckpt.format.manifest_fields import IndexFile
from unified_ckpt.format.names import MANIFEST, index_name


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_text()))


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Apply `edit` to the folder's manifest and seal it anew."""
    manifest = manifest_of(folder)
    edit(manifest)
    (folder / MANIFEST).write_bytes(sealed(manifest))


def edit_index(folder: Path, part: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Apply `edit` to the part's index and seal it anew."""
    path = folder / index_name(part)
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
    edit_manifest(
        folder,
        lambda manifest: manifest["parts"][part].update(
            index=IndexFile.from_bytes(path.read_bytes()).model_dump()
        ),
    )


def sealed(manifest: dict[str, Any]) -> bytes:
    """Encode a manifest of these fields together with the digest of the bytes."""
    fields = {name: value for name, value in manifest.items() if name != "crc"}
    return add_crc(json.dumps({**fields, "crc": "0" * 16}).encode())

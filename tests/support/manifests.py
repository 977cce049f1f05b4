"""A manifest or an index that a test changes and seals anew: for tests of what it says, not of
bytes that are damaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unified_ckpt.format.manifest import IndexFile, add_crc
from unified_ckpt.format.names import MANIFEST, index_name


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """What `edit` makes of the folder's manifest is as if it had been written so."""
    told = json.loads((folder / MANIFEST).read_text())
    edit(told)
    (folder / MANIFEST).write_bytes(sealed(told))


def edit_index(folder: Path, part: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """What `edit` makes of the part's index is as if it had been written so."""
    path = folder / index_name(part)
    told = json.loads(path.read_text())
    edit(told)
    path.write_text(json.dumps(told))
    edit_manifest(
        folder,
        lambda manifest: manifest["parts"][part].update(
            index=IndexFile.from_bytes(path.read_bytes()).model_dump()
        ),
    )


def sealed(told: dict[str, Any]) -> bytes:
    """The bytes of a manifest with these fields, and the digest of those bytes."""
    fields = {name: value for name, value in told.items() if name != "crc"}
    return add_crc(json.dumps({**fields, "crc": "0" * 16}).encode())

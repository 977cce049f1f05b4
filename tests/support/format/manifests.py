"""Reads a manifest, or seals an edited one or index anew: wrong content with a right digest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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


def resealed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return files with each manifest among them sealed anew, as if they had been written so.

    `files`: by path. A manifest that is no JSON object of the right form stays.
    """
    sealed_files = dict(files)
    for path in [path for path in files if path.rpartition("/")[2] == MANIFEST]:
        folder = path.removesuffix(MANIFEST)
        bodies = {
            name.removeprefix(folder): files[name] for name in files if name.startswith(folder)
        }
        try:
            sealed_files[path] = sealed(with_records(json.loads(files[path]), bodies))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            continue
    return sealed_files


def with_records(fields: dict[str, Any], bodies: Mapping[str, bytes]) -> dict[str, Any]:
    """Return a manifest that records these files, by name, of those that it lists."""
    for part, entry in fields["parts"].items():
        if index_name(part) in bodies:
            entry["index"] = IndexFile.from_bytes(bodies[index_name(part)]).model_dump()
        for name in entry["files"].keys() & bodies.keys():
            entry["files"][name] = {
                "nbytes": len(bodies[name]),
                "header_crc": _header_crc(bodies[name]),
            }
        _record_whole(entry.get("exceptions"), bodies)
    for name in ("digests", "extra_file", "rank_extra", "rank_values"):
        _record_whole(fields.get(name), bodies)
    return fields


def _record_whole(record: dict[str, Any] | None, bodies: Mapping[str, bytes]) -> None:
    if not record or record["file"] not in bodies:
        return
    body = bodies[record["file"]]
    record |= IndexFile.from_bytes(body).model_dump()
    if "header_crc" in record:
        record["header_crc"] = _header_crc(body)


def _header_crc(body: bytes) -> str:
    return IndexFile.from_bytes(body[: 8 + int.from_bytes(body[:8], "little")]).crc

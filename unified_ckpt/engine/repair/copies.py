"""Opens folders of one save: the one to repair, and its sources."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import step_text
from unified_ckpt.errors import (
    FormatError,
    IncompleteError,
    IntegrityError,
    MismatchError,
    NotFoundError,
)
from unified_ckpt.format import header, names
from unified_ckpt.format.manifest import Manifest, has_valid_crc, parse_manifest
from unified_ckpt.format.manifest_fields import DigestFile
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.storage.storage import LocalStorage

Notes = dict[str, None]  # damage of the sources, one sentence each, without repetitions

_COPY_ADVICE = (
    "copy the whole folder from a copy of the same save, which for one node's folder may be in "
    f"another node's {names.REPLICAS}/, or merge the other nodes' folders with "
    "`unified-ckpt convert FOLDER... TARGET`"
)


@dataclass(frozen=True, slots=True)
class FolderCopy:
    """A folder with a valid manifest.

    `crcs`: the recorded CRC by file: of its header for a part's file, of all bytes for others.
    Copies that record the same CRC for a file have the same file.
    """

    storage: Reader
    manifest: Manifest
    crcs: Mapping[str, str]


def open_target(storage: LocalStorage) -> FolderCopy:
    """Open the folder to repair. Its own valid manifest is the root of all proof.

    IncompleteError or IntegrityError without one, FormatError for a staging folder or a manifest of
    another version.
    """
    if names.is_staging(os.path.split(storage.root)[1]) or names.SAVE_ID_FILE in storage.names():
        raise FormatError(
            f"{storage.root}: got an unfinished save, expected a committed checkpoint"
        )
    return _open_copy(storage, advice=_COPY_ADVICE)


def open_source(storage: Reader, target: FolderCopy) -> FolderCopy:
    """Open another folder. MismatchError for another save, else the errors of `open_target`."""
    source = _open_copy(storage, advice="leave this source out")
    manifest, expected = source.manifest, target.manifest
    if manifest.save_id != expected.save_id:
        raise MismatchError(
            f"{storage.root}: got save {manifest.save_id} ({step_text(manifest.step)}), "
            f"expected {expected.save_id} ({step_text(expected.step)}), as in "
            f"{target.storage.root}; pass a copy of the same save"
        )
    return source


def _open_copy(storage: Reader, *, advice: str) -> FolderCopy:
    file = f"{storage.root}/{names.MANIFEST}"
    try:
        body = storage.read(names.MANIFEST)
    except NotFoundError as error:
        storage.names()  # NotFoundError without a folder
        raise IncompleteError(
            f"{file}: is missing, expected a manifest that proves the folder's bytes; {advice}"
        ) from error
    if not has_valid_crc(body):
        raise IntegrityError(
            f"{file}: got a damaged manifest, expected one that proves the folder's bytes; {advice}"
        )
    manifest = parse_manifest(body, file=file)
    crcs = {file: record.crc for file, record in manifest.whole_files()}
    crcs |= {file: record.header_crc for file, record in manifest.part_files()}
    return FolderCopy(storage, manifest, crcs)


def parse_digests(body: bytes, record: DigestFile) -> dict[Key, Sequence[int]]:
    """Return block CRCs by part and name; empty if the algorithm is unknown."""
    if not record.is_supported:
        return {}
    entries = header.parse_header(body, file_size=len(body), file=record.file)
    crcs: dict[Key, Sequence[int]] = {}
    for key, entry in entries.items():
        part, _, name = key.partition(":")
        count = (entry.stop - entry.start) // 8
        crcs[part, name] = struct.unpack_from(f"<{count}Q", body, entry.start)
    return crcs

"""Reads the manifest of a checkpoint; `format/manifest.py` parses it."""

from __future__ import annotations

import os

from unified_ckpt.errors import FormatError, IntegrityError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, has_valid_crc, parse_manifest
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.roots import open_parent
from unified_ckpt.runtime.storage.storage import LocalStorage


def read_manifest_at(path: str) -> Manifest | None:
    """`read_manifest` by the checkpoint's path, or by its URL in a bucket."""
    if is_bucket_url(path):
        return read_manifest(*open_parent(path))
    parent, name = os.path.split(os.path.abspath(path))
    return read_manifest(LocalStorage(parent), name)


def read_manifest(storage: Storage, name: str) -> Manifest | None:
    """Return the manifest of the checkpoint `name`, None if there is no valid one.

    FormatError for an undamaged manifest that this version cannot read, StorageError for one that
    cannot be read now: both belong to a checkpoint.
    """
    file = f"{name}/{names.MANIFEST}"
    try:
        body = storage.read(file)
    except NotFoundError:
        return None
    try:
        return parse_manifest(body, file=storage.path(file)).at(storage.path(name))
    except (FormatError, IntegrityError):
        if has_valid_crc(body):
            raise
        return None

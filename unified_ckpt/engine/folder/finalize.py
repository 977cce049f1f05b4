"""Completes a staged folder: extra file, attached files, indexes, and the manifest last.

A folder could count as a checkpoint without being one if its manifest were durable before what it
lists. So everything else is written and synced first.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from unified_ckpt.engine.folder.backup import attached_files
from unified_ckpt.engine.folder.non_tensor_state import (
    MergedState,
    write_extra,
    write_rank_entries,
)
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.save_plan import StagedTensors
from unified_ckpt.errors import StorageError
from unified_ckpt.format import index, names
from unified_ckpt.format.manifest import FORMAT_VERSION, Manifest, Part, encode_manifest
from unified_ckpt.format.manifest_fields import DigestFile, IndexFile, NamedFile, RankExtraFile
from unified_ckpt.format.outliers import outliers_record
from unified_ckpt.runtime.storage.protocol import Storage

Attach = Callable[[str], object]  # adds files to the folder at this path


@dataclass(frozen=True, slots=True)
class StagedState:
    """What a checkpoint holds beside tensors.

    `digests` and `rank_extra` are the records of files that are written already.
    """

    merged: MergedState
    digests: DigestFile | None
    rank_extra: RankExtraFile | None


def manifest_fields(transaction: Transaction, *, started: float) -> dict[str, Any]:
    """Return the manifest's fields about a save that began at `started`, a monotonic time."""
    return {
        "save_id": transaction.save_id,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": transaction.collective.world,
        "seconds": round(time.monotonic() - started, 3),
        "versions": _versions(),
    }


def finalize_checkpoint(
    transaction: Transaction,
    tensors: StagedTensors,
    state: StagedState,
    fields: Mapping[str, Any],
    *,
    attach: Attach | None = None,
) -> None:
    """On the leader: write all that the folder lacks but its name, the manifest last.

    `fields`: the manifest's fields that describe neither tensors nor state.
    """
    storage, folder = transaction.storage, transaction.folder
    merged = state.merged
    extra = write_extra(storage, folder, merged)
    rank_values = write_rank_entries(storage, folder, merged.rank_entries)
    indexes = finalize_files(transaction, tensors, attach=attach)
    content = {
        **extra,
        "format_version": FORMAT_VERSION,
        "parts": {
            part: Part(
                files=dict(tensors.records.get(part, {})),
                index=indexes.get(part),
                total_nbytes=nbytes,
                aliases=merged.aliases.get(part, {}),
                encodings=dict(tensors.encodings.get(part, {})),
                exceptions=tensors.outliers.get(part),
            )
            for part, nbytes in sorted(tensors.nbytes.items())
        },
        "digests": state.digests,
        "rank_extra": state.rank_extra,
        "rank_values": rank_values,
        "objects": list(merged.objects),
    }
    write_manifest(storage, folder, Manifest(**{**fields, **content}))


def finalize_files(
    transaction: Transaction, tensors: StagedTensors, *, attach: Attach | None
) -> dict[str, IndexFile]:
    """On the leader: attach files, write the indexes, and sync all but the synced tensor files."""
    storage, folder = transaction.storage, transaction.folder
    if attach is not None:
        _attach_files(storage, folder, attach, parts=tensors.records)
    indexes = write_indexes(storage, folder, tensors)
    synced = {file for records in tensors.records.values() for file in records}
    for name in sorted(set(storage.entries(folder)) - synced - {names.SAVE_ID_FILE}):
        storage.sync_tree(f"{folder}/{name}")
        transaction.collective.heartbeat()
    return indexes


def _attach_files(storage: Storage, folder: str, attach: Attach, *, parts: Collection[str]) -> None:
    """Call the caller's `attach`. StorageError if it changes a file of the checkpoint."""
    before = {name: storage.version_token(f"{folder}/{name}") for name in storage.entries(folder)}
    with storage.local_folder(folder) as path:
        attach(path)
    index_names = (names.index_name(part) for part in parts)
    for name in sorted({*before, names.MANIFEST, *index_names}):
        if storage.version_token(f"{folder}/{name}") != before.get(name):
            raise StorageError(
                f"{storage.path(folder)}: `attach` changed {name}, a file of the checkpoint; "
                "write to another name"
            )


def write_indexes(storage: Storage, folder: str, tensors: StagedTensors) -> dict[str, IndexFile]:
    """Write one index per part, also where a part is one file; return the records by part."""
    records = {}
    for part, weight_map in tensors.weight_maps.items():
        body = index.encode_index(total_size=tensors.nbytes[part], weight_map=weight_map)
        storage.put(f"{folder}/{names.index_name(part)}", body)
        records[part] = IndexFile.from_bytes(body)
    return records


def write_outliers(transaction: Transaction, files: Mapping[str, bytes]) -> dict[str, NamedFile]:
    """Write the outliers files, given by part; return the records by part."""
    records = {}
    for part, body in files.items():
        records[part] = outliers_record(part, body)
        transaction.storage.put(f"{transaction.folder}/{records[part].file}", body)
    return records


def write_manifest(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Write the manifest, once all else is synced. The rename of the folder syncs it.

    It lists files that the engine did not write. Files that appear after it are the user's, and
    stay when the checkpoint is replaced.
    """
    manifest = manifest.model_copy(update={"attached": attached_files(storage, folder, manifest)})
    storage.sync_written(below=folder)
    storage.put(f"{folder}/{names.MANIFEST}", encode_manifest(manifest))


@cache  # each version is parsed from the package's METADATA file
def _versions() -> dict[str, str]:
    """Return the versions of Python, this package, torch and safetensors."""
    package_versions = {"python": platform.python_version()}
    for package in ("unified-ckpt", "torch", "safetensors"):
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            package_versions[package] = "unknown"
    return package_versions

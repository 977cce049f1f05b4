"""Opens a unified folder, or a plain Hugging Face model folder, as a Source."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder.folder import Folder, check_not_replaced
from unified_ckpt.engine.folder.if_exists import check_not_run_folder
from unified_ckpt.engine.folder.later_save import check_last_save
from unified_ckpt.engine.folder.repair_hint import index_hint
from unified_ckpt.engine.folder.stored_files import check_crc
from unified_ckpt.engine.source.protocol import ReadPolicy
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
)
from unified_ckpt.format import index
from unified_ckpt.format import names as format_names
from unified_ckpt.format.commit import parse_tombstone
from unified_ckpt.format.manifest import Manifest, Part, parse_manifest
from unified_ckpt.format.names import MODEL
from unified_ckpt.runtime.objects.known import KnownObjects, Version
from unified_ckpt.runtime.objects.reader import ObjectReader
from unified_ckpt.runtime.storage.locks import shared_lock
from unified_ckpt.runtime.storage.paths import absolute_path, is_url
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.storage.regular_files import is_file
from unified_ckpt.runtime.storage.roots import open_reader
from unified_ckpt.runtime.storage.storage import LocalStorage


def open_path(
    path: str,
    *,
    lock: bool,
    policy: ReadPolicy | None = None,
    known: KnownObjects | None = None,
) -> Folder:
    """Open the checkpoint at a local path or a URL, or one safetensors file.

    A folder on a disk that is replaced later is still read from the old one; reading a replaced one
    in a bucket is an error. `lock`: prevent its removal until it is closed; one rank of a job is
    enough. `known`: what another reader has learnt of this URL of a bucket. NotFoundError describes
    what was found instead.
    """
    storage, file = open_reader(absolute_path(path)), ""
    if isinstance(storage, LocalStorage):
        kind = storage.kind("")
        if kind is None:
            parent, name = os.path.split(storage.root)
            raise NotFoundError(
                f"{storage.root}: there is no such folder{_backup_hint(LocalStorage(parent), name)}"
            )
        if kind is not None and is_file(storage.root):  # also through a link, as in hub caches
            if not storage.root.endswith(".safetensors"):
                raise NotFoundError(f"{storage.root}: is a file, expected a checkpoint folder")
            parent, file = os.path.split(storage.root)
            storage = LocalStorage(parent)
    elif isinstance(storage, ObjectReader) and storage.root.endswith(".safetensors"):
        prefix, _, file = storage.prefix.rpartition("/")
        storage = ObjectReader(storage.store, prefix)
    if isinstance(storage, ObjectReader):
        storage.known = known or storage.known
    with ExitStack() as resources:
        resources.callback(storage.close)
        if isinstance(storage, LocalStorage):
            storage.open_handle()
            resources.callback(storage.directory.close)
            if lock:
                resources.enter_context(shared_lock(storage.root, directory=storage.directory))
        folder = _open_file(storage, file, policy) if file else open_folder(storage, policy)
        if folder.manifest is None:
            # A removal deletes the manifest first; what is left looks like plain weights.
            check_not_replaced(storage)
        folder.resources = resources.pop_all()
    return folder


def open_folder(
    storage: Reader, policy: ReadPolicy | None = None, *, manifest: Manifest | None = None
) -> Folder:
    """Open the checkpoint in a folder. `manifest`: its manifest, if the caller has read it.

    Raises NotFoundError if there is none, FormatError if the save is unfinished.
    """
    manifest = manifest or _read_manifest(storage)
    if manifest is not None:
        if isinstance(storage, ObjectReader):
            storage.pin(_versions(manifest))
        weight_maps = {
            part: read_index(storage, part, record)
            for part, record in manifest.parts.items()
            if not manifest.is_deleted(part, lambda file: storage.size(file) is not None)
        }
        return Folder(storage, manifest, weight_maps, policy)
    file_names = storage.names()
    _check_finished(storage, file_names)
    single = format_names.file_name(MODEL, number=1, count=1)
    if format_names.index_name(MODEL) in file_names:
        weight_map = index.parse_index(
            storage.read(format_names.index_name(MODEL)),
            file=f"{storage.root}/{format_names.index_name(MODEL)}",
        )
        if not index.is_stale(
            weight_map, single=single, file_names=file_names, folder=storage.root
        ):
            return _open_indexed(storage, weight_map, file_names)
    if single in file_names:
        return _open_model_file(storage, single, path=storage.root)
    check_not_run_folder(storage)
    raise NotFoundError(
        f"{storage.root}: holds no checkpoint: expected {format_names.MANIFEST}, "
        f"{format_names.index_name(MODEL)} or {single}"
        + ("; other formats are read from a disk" if is_url(storage.root) else "")
    )


def _read_manifest(storage: Reader) -> Manifest | None:
    """Return the manifest of a folder, None if there is none.

    IncompleteError if there is none because a commit is unfinished, FormatError if the save is not
    the last one in the folder.
    """
    has_file = storage.size(format_names.MANIFEST) is not None
    body = storage.read(format_names.MANIFEST) if has_file else b""
    if isinstance(storage, ObjectReader) and (not has_file or parse_tombstone(body)):
        storage.check_committed()
        return None
    if has_file and isinstance(storage, LocalStorage):
        check_last_save(storage.root)
    file = f"{storage.root}/{format_names.MANIFEST}"
    return parse_manifest(body, file=file).at(storage.root) if has_file else None


def _versions(manifest: Manifest) -> dict[str, Version]:
    """Return the objects that the manifest names, by file."""
    records = (*manifest.part_files(), *manifest.whole_files())
    etags = manifest.etags
    return {file: Version(etags[file], each.nbytes) for file, each in records if file in etags}


def read_index(storage: Reader, part: str, record: Part) -> Mapping[str, str]:
    """Return {tensor name: file name} of a part that was not deleted.

    Raises IncompleteError if the index is missing, IntegrityError if it was changed.
    """
    if record.index is None:
        return {}
    name = format_names.index_name(part)
    location = f"{storage.root}/{name}"
    try:
        body = storage.read(name)
    except NotFoundError as error:
        raise IncompleteError(
            f"{location}: is missing, expected the index of part {part}; "
            f"{index_hint(storage, record.files)}"
        ) from error
    try:
        check_crc(body, record.index.crc, f"{location}:")
    except IntegrityError as error:
        raise IntegrityError(f"{error}; {index_hint(storage, record.files)}") from None
    weight_map = index.parse_index(body, file=location)
    differing_files = sorted(set(weight_map.values()) ^ record.files.keys())
    if differing_files:
        raise IntegrityError(
            f"{location}: {differing_files[0]} is only in the manifest or only in the "
            "index, expected the same files in both"
        )
    return weight_map


def _check_finished(storage: Reader, file_names: Collection[str]) -> None:
    """Raise FormatError if a folder without a manifest is an unfinished save."""
    folder_name = storage.root.rstrip("/").rsplit("/", 1)[-1]
    if (
        format_names.is_staging(folder_name)
        or format_names.DIGESTS in file_names
        or format_names.SAVE_ID_FILE in file_names
    ):
        raise FormatError(
            f"{storage.root}: is an unfinished save: it has no {format_names.MANIFEST}, expected a "
            "committed checkpoint"
        )


def _open_file(storage: Reader, file: str, policy: ReadPolicy | None) -> Folder:
    """Open one file of a folder: of a checkpoint, its tensors there; of any other, a model."""
    path = f"{storage.root}/{file}"
    if storage.size(format_names.MANIFEST) is not None:
        whole = open_folder(storage, policy)
        weight_maps = {
            part: dict.fromkeys(tensors_by_file[file], file)
            for part in whole.parts
            if file in (tensors_by_file := whole.tensors_by_file(part))
        }
        if not weight_maps:
            raise FormatError(
                f"{path}: holds no tensors of a part of the checkpoint; pass {storage.root}"
            )
        manifest = _restrict(whole.require_manifest(), weight_maps, file)
        return Folder(storage, manifest, weight_maps, policy, path=path)
    _check_finished(storage, storage.names())
    return _open_model_file(storage, file, path=path)


def _open_model_file(storage: Reader, file: str, *, path: str) -> Folder:
    """Open a file of weights without a manifest, whose header says what it holds."""
    entries = Folder(storage, None, {}).header(file)
    return Folder(storage, None, {MODEL: dict.fromkeys(entries, file)}, path=path)


def _restrict(
    manifest: Manifest, weight_maps: Mapping[str, Mapping[str, str]], file: str
) -> Manifest:
    """Return the manifest of one file, as if the checkpoint had no others and no other nodes."""
    parts = {}
    for part, names in weight_maps.items():
        record = manifest.parts[part]
        files = {file: record.files[file]}
        aliases = {alias: name for alias, name in record.aliases.items() if name in names}
        parts[part] = record.model_copy(update={"files": files, "aliases": aliases})
    return manifest.model_copy(update={"parts": parts, "node_group": None})


def _open_indexed(
    storage: Reader, weight_map: Mapping[str, str], file_names: Collection[str]
) -> Folder:
    """Open a Hugging Face folder of several files.

    Tensors that a file holds and the index lacks are included, as transformers does. Raises
    FormatError for a tensor that the index assigns to another file.
    """
    all_names = dict(weight_map)
    folder = Folder(storage, None, {MODEL: all_names})
    for file in sorted(set(weight_map.values()) & set(file_names)):
        stale = sorted(
            name for name in folder.header(file) if all_names.setdefault(name, file) != file
        )
        if stale:
            raise FormatError(
                format_list(
                    f"{storage.root}/{file}: has tensors that the index assigns to other files",
                    stale,
                )
            )
    return folder


def _backup_hint(parent: LocalStorage, name: str) -> str:
    """Return a hint for an error: the path where an interrupted replacement left the checkpoint."""
    try:
        backups = [entry for entry in parent.names() if format_names.is_replaced(entry, name)]
    except CheckpointError:
        return ""
    return (
        f"; an interrupted replacement left a copy at {parent.path(backups[0])}: rename it back"
        if backups
        else ""
    )

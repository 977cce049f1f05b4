"""Removes checkpoints from a bucket, without locks. A crash leaves a whole checkpoint, or none and
a list of what is left to delete.

How a checkpoint could be lost, or mixed for a reader, and what prevents it:
- A save replaces the checkpoint meanwhile. So a name with a commit record, or with a save's list of
  uploads, is skipped; and the manifest and each file are deleted only with their ETags.
- The next save has files of the same bytes, and so the same ETags. So files are deleted only while
  there is neither a manifest nor a commit record. A process that sleeps between this check and the
  deletion, while another one saves, may still delete such a file: a load then names it.
- A reader has the manifest. It reads files only with the ETags that the manifest names, so it gets
  an error.
- The process is killed. So a list of the files comes first, and the next removal ends this one.
"""

from __future__ import annotations

from collections.abc import Mapping

from unified_ckpt.engine.folder.backup import engine_files
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.engine.folder.publish.commit import stored_save_id
from unified_ckpt.engine.folder.publish.conditions import delete_matching, read_object
from unified_ckpt.engine.folder.publish.newest import read_newest
from unified_ckpt.engine.folder.publish.uploads import OLD_UPLOAD_SECONDS
from unified_ckpt.format import names
from unified_ckpt.format.commit import RemovalRecord, encode_record, parse_record
from unified_ckpt.format.manifest import parse_manifest
from unified_ckpt.manager.steps.bucket import age_seconds, at_once
from unified_ckpt.runtime.objects.storage import ObjectStorage


def remove_objects(storage: ObjectStorage, name: str, *, save_id: str) -> bool:
    """Remove the checkpoint `name` if it is this save; False, with nothing changed, otherwise.

    Also returns False beside a save of this name. Files that no save wrote stay.
    """
    manifest_file = f"{name}/{names.MANIFEST}"
    body, etag = read_object(storage, manifest_file)
    if stored_save_id(body) != save_id or is_busy(storage, name):
        return False
    manifest = parse_manifest(body, file=storage.path(manifest_file)).at(storage.path(name))
    files = manifest.etags or _current_etags(storage, name, engine_files(manifest))
    record = RemovalRecord(save_id=save_id, manifest=etag, files=dict(files))
    entry = names.removal_name(name, save_id)
    storage.put(entry, encode_record(record))
    if not delete_matching(storage, manifest_file, etag):
        storage.remove_file(entry)
        return False
    newest, newest_etag = read_newest(storage)
    if newest is not None and newest.save_id == save_id:
        delete_matching(storage, names.NEWEST, newest_etag)
    finish_removal(storage, entry)
    return True


def finish_removal(storage: ObjectStorage, entry: str) -> None:
    """Delete the files of a removal. Its list stays if a save of its name is not published yet."""
    body, entry_etag = read_object(storage, entry)
    if not body:
        return
    record = parse_record(RemovalRecord, body, file=storage.path(entry))
    name = names.removing_name(entry)
    manifest, files = read_manifest(storage, name), record.files
    save_id = None if manifest is None else manifest.save_id
    if save_id == record.save_id:
        files = {}  # nothing was removed yet
    elif manifest is not None:  # what the next save has not replaced
        current = engine_files(manifest) | set(manifest.etags)
        files = {file: etag for file, etag in files.items() if file not in current}
    if _delete_files(storage, name, files, save_id=save_id):
        delete_matching(storage, entry, entry_etag)


def remove_broken_objects(storage: ObjectStorage, name: str) -> bool:
    """Remove the objects of a name that is no checkpoint; False, with nothing changed, beside a
    save.
    """
    if is_busy(storage, name):
        return False
    prefix = storage.key_prefix(name)
    objects = storage.store.list(prefix, recursive=True).objects
    files = {key.removeprefix(prefix): stat.etag for key, stat in objects.items()}
    damaged = files.pop(names.MANIFEST, "")
    if damaged and not delete_matching(storage, f"{name}/{names.MANIFEST}", damaged):
        return False
    return _delete_files(storage, name, files, save_id=None)


def is_busy(storage: ObjectStorage, name: str) -> bool:
    """Return whether a commit of this name is unfinished, or a save uploads to it."""
    if storage.version_token(names.commit_name(name)) is not None:
        return True
    listed = storage.store.list(storage.key(names.UPLOADS_PREFIX)).objects
    keys = [key for key in listed if names.uploading_name(key.rpartition("/")[2]) == name]
    stats = (storage.store.stat(key) for key in keys)
    return any(stat and age_seconds(stat.modified) < OLD_UPLOAD_SECONDS for stat in stats)


def _current_etags(storage: ObjectStorage, name: str, files: set[str]) -> dict[str, str]:
    """Return the ETags of a checkpoint whose manifest names none: a copy from a disk."""
    tokens = {file: storage.version_token(f"{name}/{file}") for file in files - {names.MANIFEST}}
    return {file: token for file, token in tokens.items() if isinstance(token, str)}


def _delete_files(
    storage: ObjectStorage, name: str, files: Mapping[str, str], *, save_id: str | None
) -> bool:
    """Delete files that have these ETags.

    The model's index goes first: other libraries open it. The digests go last: by them, the next
    save sees that the other files are ours.

    False once there is a commit record, or the manifest of another save than `save_id`, None for no
    manifest: the rest stays.
    """

    def delete(file: str) -> bool:
        if storage.version_token(names.commit_name(name)) is not None:
            return False
        manifest = read_manifest(storage, name)
        if (None if manifest is None else manifest.save_id) != save_id:
            return False
        delete_matching(storage, f"{name}/{file}", files[file])
        return True

    first, last = names.index_name(names.MODEL), names.DIGESTS
    groups = {first} & set(files), set(files) - {first, last}, {last} & set(files)
    return all(all(at_once(delete, sorted(group))) for group in groups)

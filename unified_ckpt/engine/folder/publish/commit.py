"""Commits saves to a bucket, and finishes commits that a process left unfinished.

How a checkpoint could be lost or mixed; `test_commit.py` has a test of each:
- Two jobs complete uploads of one name in turns. So a record at a fixed key comes first: whoever
  stores it commits, and others finish it before their own.
- A process is killed between two requests. So the record says all that is left to do, and every
  step of it may be repeated.
- A process sleeps between two requests, and wakes after later saves have committed. So it changes
  only what the record names: uploads by their id, manifests and files by their ETag.
- An upload seems completed because another object of its size has the key. Only ETags count.
- An upload is gone, so the commit cannot be finished. So a tombstone holds the manifest that it
  replaces, and `drop_commit` restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from unified_ckpt.core.text import first_items
from unified_ckpt.engine.folder.publish.conditions import (
    delete_matching,
    read_object,
    replace_matching,
    tries,
)
from unified_ckpt.engine.folder.publish.newest import update_newest
from unified_ckpt.errors import FormatError, IntegrityError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.commit import (
    CommitClaim,
    CommitRecord,
    Tombstone,
    encode_record,
    parse_commit,
    parse_tombstone,
)
from unified_ckpt.format.manifest import encode_manifest, has_valid_crc, parse_manifest
from unified_ckpt.format.manifest_fields import Record
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import (
    UploadGoneError,
    multipart_etag,
)
from unified_ckpt.runtime.threads import map_in_threads

_AT_ONCE = 32  # requests
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A commit of checkpoint `name` that is not finished. `etag`: of its record."""

    name: str
    record: CommitRecord
    etag: str


def read_pending(storage: ObjectStorage, name: str) -> PendingCommit | None:
    """Return the unfinished commit of a checkpoint, if there is one. FormatError if invalid."""
    return _parse_pending(storage, name, *read_object(storage, names.commit_name(name)))


def _parse_pending(
    storage: ObjectStorage, name: str, body: bytes, etag: str
) -> PendingCommit | None:
    file = storage.path(names.commit_name(name))
    record = parse_commit(body, file=file) if body else None
    return None if record is None else PendingCommit(name, record, etag)


def finish_pending(storage: ObjectStorage, name: str) -> bool:
    """Finish the unfinished commit of a checkpoint; False if there is none.

    Drops the claim of a save that is not certain, and a tombstone of no commit. StorageError if
    the commit cannot be finished, such as without the permission.
    """
    body, etag = read_object(storage, names.commit_name(name))
    pending = _parse_pending(storage, name, body, etag)
    if pending is not None:
        finish_commit(storage, pending)
        return True
    if body:
        delete_matching(storage, names.commit_name(name), etag)
    _restore_replaced(storage, name)
    return False


def drop_commit(storage: ObjectStorage, pending: PendingCommit) -> bool:
    """Remove a commit that cannot be finished: an upload of it is gone.

    Returns False if it was finished after all, by this process or by another one. The replaced
    checkpoint is restored if all its files are there. StorageError if a request fails: the record
    stays, and the call may be repeated.
    """
    name, record = pending.name, pending.record
    try:
        finish_commit(storage, pending)
        return False
    except UnfinishableError:
        pass
    keys = {file: storage.key(f"{name}/{file}") for file in record.files}
    for file, key in keys.items():  # from here on, no process that sleeps can complete one
        storage.store.abort(key, record.files[file].upload_id)
    try:
        finish_commit(storage, pending)  # another process may have completed all before
        return False
    except UnfinishableError:
        pass
    replaced = _restore_replaced(storage, name, committing=record.save_id)
    for file, commit_file in record.files.items():
        etag = multipart_etag(commit_file.etags)
        if etag and replaced.get(file) != etag:
            delete_matching(storage, f"{name}/{file}", etag)
    return _delete_record(storage, pending)


def _restore_replaced(
    storage: ObjectStorage, name: str, *, committing: str = ""
) -> Mapping[str, str]:
    """Put a manifest back in place of its tombstone; return the ETags that it names.

    Without `committing`, only if no commit is unfinished: a process has slept, and put the
    tombstone after its commit had ended. A manifest of missing files is not put back.
    """
    file = f"{name}/{names.MANIFEST}"
    body, etag = read_object(storage, file)
    tombstone = parse_tombstone(body)
    if tombstone is None or (committing and tombstone.committing != committing):
        return _read_etags(body, storage.path(name))
    if not committing and read_object(storage, names.commit_name(name))[0]:
        return {}  # the tombstone is of this commit
    replaced = tombstone.replaced.encode()
    etags = _read_etags(replaced, storage.path(name))
    stored = {each: storage.store.stat(storage.key(f"{name}/{each}")) for each in etags}
    if replaced and all(stat and stat.etag == etags[each] for each, stat in stored.items()):
        replace_matching(storage, file, replaced, etag)
        return etags
    delete_matching(storage, file, etag)
    return {}


def claim_commit(
    storage: ObjectStorage, name: str, uploads_id: str, *, attempt: int = 0
) -> str | None:
    """Take the key of the commit record; return the claim's ETag, None if another one has it.

    `attempt`: of these uploads, another number for each call.
    """
    return _put_unique(storage, name, CommitClaim(claimed_by=uploads_id, attempt=attempt), "")


def put_record(
    storage: ObjectStorage, name: str, record: CommitRecord, *, claim: str
) -> PendingCommit | None:
    """Make a save certain, in place of its claim. None if another process dropped the claim."""
    etag = _put_unique(storage, name, record, claim)
    return None if etag is None else PendingCommit(name, record, etag)


def _put_unique(storage: ObjectStorage, name: str, record: Record, etag: str) -> str | None:
    file, body = names.commit_name(name), encode_record(record)
    replace_matching(storage, file, body, etag)
    # Some stores let several writers win: the bytes that stay decide.
    stored, stored_etag = read_object(storage, file)
    return stored_etag if stored == body else None


def finish_commit(storage: ObjectStorage, pending: PendingCommit) -> bool:
    """Complete the files of a commit and publish its manifest.

    Returns False if another process has finished it; a later save may have followed. StorageError
    if it cannot be finished; the record stays.
    """
    return _Commit(storage, pending).finish()


class UnfinishableError(StorageError):
    """A commit cannot be finished: `drop_commit` removes it."""


class _FinishedElsewhereError(Exception):
    """The record is gone: another process has finished the commit."""


class _Commit:
    """The steps of one commit. Each may be repeated, by any process, at any time."""

    def __init__(self, storage: ObjectStorage, pending: PendingCommit) -> None:
        self._storage, self._record = storage, pending.record
        self._name, self._etag = pending.name, pending.etag
        self._manifest = f"{pending.name}/{names.MANIFEST}"

    def finish(self) -> bool:
        """As `finish_commit`."""
        record, storage = self._record, self._storage
        try:
            self._check_pending()
            update_newest(storage, self._name, record)  # before a listing shows the record
            if tombstone := self._put_tombstone():
                self._publish(self._complete_files(), tombstone)
            self._on_all(self._delete_replaced, record.replaced_files)
        except _FinishedElsewhereError:
            return False
        return _delete_record(storage, PendingCommit(self._name, record, self._etag))

    def _put_tombstone(self) -> str:
        """Put a tombstone over the replaced manifest, or where none is; return its ETag.

        Returns "" if the manifest of this save is there: another process has published it. No
        other one is valid while the record exists: a commit that slept may have put it.
        """
        save_id, counter = self._record.save_id, tries(self._storage, self._manifest)
        while True:
            next(counter)
            body, etag = read_object(self._storage, self._manifest)
            if stored_save_id(body) == save_id:
                return ""
            tombstone = parse_tombstone(body)
            if tombstone is not None and tombstone.committing == save_id:
                return etag
            self._check_pending()
            replaced = body.decode() if has_valid_crc(body) else ""
            covering = encode_record(Tombstone(committing=save_id, replaced=replaced))
            replace_matching(self._storage, self._manifest, covering, etag)

    def _complete_files(self) -> Mapping[str, str]:
        """Make all files visible and return their ETags.

        The index of the model comes last: without a manifest, it is what other libraries open.
        """
        index = names.index_name(names.MODEL)
        files = sorted(set(self._record.files) - {index})
        try:
            etags = self._on_all(self._complete, files)
            if index in self._record.files:
                etags |= self._on_all(self._complete, [index])
        except UploadGoneError as error:
            self._check_pending()
            raise UnfinishableError(
                f"{error}; the commit of save {self._record.save_id} cannot be finished: run "
                f"`unified-ckpt prune {self._storage.root} --stale` and save again"
            ) from error
        stored = self._on_all(self._stat, etags)
        differing = sorted(file for file, etag in etags.items() if stored[file] != etag)
        if differing:
            self._check_pending()
            raise StorageError(
                f"{self._storage.path(self._name)}: another process replaced "
                f"{first_items(differing, 3)} during the commit; run one job per name"
            )
        return etags

    def _publish(self, etags: Mapping[str, str], tombstone: str) -> None:
        """Put the manifest over the tombstone."""
        file = self._storage.path(self._manifest)
        manifest = parse_manifest(self._record.manifest.encode(), file=file)
        place = {"etags": dict(etags), "url": self._storage.path(self._name)}
        body = encode_manifest(manifest.model_copy(update=place))
        self._check_pending()
        replace_matching(self._storage, self._manifest, body, tombstone)
        if read_save_id(self._storage, self._name) != self._record.save_id:
            self._check_pending()
            raise StorageError(
                f"{file}: another process replaced this manifest during the commit; run one job "
                "per name"
            )

    def _on_all(
        self, request: Callable[[str], _Answer], files: Iterable[str]
    ) -> dict[str, _Answer]:
        """Send a request for each file, many at once; return the answers by file."""
        files, on_wait = list(files), self._storage.on_request
        answers = map_in_threads(request, files, count=_AT_ONCE, on_wait=on_wait)
        return dict(zip(files, answers, strict=True))

    def _complete(self, file: str) -> str:
        record, label = self._record.files[file], self._record.save_id
        key = self._storage.key(f"{self._name}/{file}")
        return self._storage.store.complete(key, record.upload_id, record.etags, label=label)

    def _delete_replaced(self, file: str) -> None:
        self._check_pending()
        etag = self._record.replaced_files[file]
        delete_matching(self._storage, f"{self._name}/{file}", etag)

    def _stat(self, file: str) -> str:
        found = self._storage.store.stat(self._storage.key(f"{self._name}/{file}"))
        return "" if found is None else found.etag

    def _check_pending(self) -> None:
        """Raise _FinishedElsewhereError unless the record is still there."""
        key = self._storage.key(names.commit_name(self._name))
        found = self._storage.store.stat(key)
        if found is None or found.etag != self._etag:
            raise _FinishedElsewhereError


def _delete_record(storage: ObjectStorage, pending: PendingCommit) -> bool:
    """Delete the list of a commit's uploads, and then its record; False if that is gone.

    In this order: a save whose list is gone does not store its record again.
    """
    uploads = names.uploads_name(pending.name, pending.record.uploads_id)
    storage.store.delete(storage.key(uploads))
    return delete_matching(storage, names.commit_name(pending.name), pending.etag)


def _read_etags(body: bytes, url: str) -> Mapping[str, str]:
    """Return the ETags of a checkpoint's files, by its manifest; none for anything else."""
    try:
        return parse_manifest(body, file="").at(url).etags
    except (FormatError, IntegrityError):
        return {}


def read_save_id(storage: ObjectStorage, name: str) -> str:
    """Return the save id of a committed checkpoint, "" if there is none."""
    return stored_save_id(read_object(storage, f"{name}/{names.MANIFEST}")[0])


def stored_save_id(body: bytes) -> str:
    """Return the save id of a manifest, "" for anything else."""
    try:
        return parse_manifest(body, file="").save_id
    except (FormatError, IntegrityError):
        return ""

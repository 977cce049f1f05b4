"""Publishes the staged files of a save to a bucket by a commit record, and aborts old uploads.

A process may abort the uploads of a save that it takes for dead. The save may be asleep. So it
marks their list as aborted, and then drops the claim of the save; the save claims, and then reads
the list. One of them sees the other: no record names uploads that are gone.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from unified_ckpt.core.text import step_text
from unified_ckpt.engine.folder.if_exists import PublishTarget, is_replaceable
from unified_ckpt.engine.folder.publish.commit import (
    claim_commit,
    finish_commit,
    finish_pending,
    put_record,
    read_save_id,
)
from unified_ckpt.engine.folder.publish.conditions import (
    delete_matching,
    read_object,
    replace_matching,
    tries,
)
from unified_ckpt.engine.folder.publish.newest import read_newest
from unified_ckpt.errors import FormatError, NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.commit import (
    CommitFile,
    CommitRecord,
    NewestStep,
    UploadsRecord,
    encode_record,
    parse_record,
)
from unified_ckpt.format.manifest import Manifest, has_valid_crc, parse_manifest
from unified_ckpt.runtime.objects.staged import UploadedFile
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import RequestFailedError, Upload, UploadGoneError

_LOG = logging.getLogger("unified_ckpt")
OLD_UPLOAD_SECONDS = 24 * 3600.0  # no save takes as long
_CLAIMS = 20  # tries while other processes commit the same name
_RUN_VARIABLES = ("UNIFIED_CKPT_RUN_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


def run_id() -> str:
    """Return what is equal for all starts of one job, and differs from other jobs; "" if unknown.

    The environment variable UNIFIED_CKPT_RUN_ID, else the job id of Slurm or torchrun.
    """
    values = (os.environ.get(name, "") for name in _RUN_VARIABLES)
    return next((value for value in values if value not in ("", "none")), "")


class ObjectPublisher:
    """Stages files of a save as uploads, and commits them.

    `folder`: the name of the staging folder, below which files are written. `uploads_id`: of the
    list of the uploads, another one for each attempt. `is_published`: once the save may be certain;
    then its uploads must stay.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        target: PublishTarget,
        *,
        folder: str,
        save_id: str,
        uploads_id: str,
    ) -> None:
        self._storage, self._target = storage, target
        self._folder, self._save_id, self._uploads_id = folder, save_id, uploads_id
        self._random = random.Random(uploads_id)
        self.is_published = False

    def stage(self) -> None:
        """Abort uploads of earlier attempts, and begin to stage files.

        No commit of this name may be unfinished.
        """
        begins = UploadsRecord(run_id=run_id(), save_id=self._save_id, uploads={})
        abort_uploads(self._storage, self._target.name, begins, uploads_id=self._uploads_id)
        staged = self._storage.stage(self._folder, self._target.name, label=self._save_id)
        staged.on_begin = self._put_uploads

    def publish(self) -> None:
        """Make the save certain, and then visible.

        StorageError if another job has meanwhile committed a checkpoint that is kept. After an
        error before `is_published`, nothing has changed.
        """
        storage, name = self._storage, self._target.name
        uploads = storage.staged(self._folder).finish()
        files = {file: self._commit_file(file, upload) for file, upload in uploads.items()}
        for attempt in range(_CLAIMS):
            finish_pending(storage, name)
            claim = claim_commit(storage, name, self._uploads_id, attempt=attempt)
            if claim is not None and self._commit(files, claim):
                return
            # Processes that drop each other's claims in turn need different pauses.
            time.sleep(self._random.uniform(0, min(0.05 * 2**attempt, 1.0)))
        raise StorageError(
            f"{storage.path(name)}: other processes commit this name all the time, expected one "
            "job per name"
        )

    def _commit(self, files: Mapping[str, CommitFile], claim: str) -> bool:
        """Store the record over the claim and finish it; False if the claim was dropped."""
        storage, name = self._storage, self._target.name
        try:
            if self._has_name():
                # Another process has finished this commit, and the answer was lost. Or it has
                # copied the same save; its files may have other names, and have to stay.
                delete_matching(storage, names.commit_name(name), claim)
                self.discard()
                return True
            record = self._record(files)
            self._announce(record)
        except BaseException:
            delete_matching(storage, names.commit_name(name), claim)
            raise
        self.is_published = True  # if this raises, the record may be stored
        pending = put_record(storage, name, record, claim=claim)
        if pending is None:
            self.is_published = False
            return False
        if not finish_commit(storage, pending) and not self._has_name():
            raise StorageError(
                f"{storage.path(name)}: another process has replaced or removed this save; run "
                "one job per name"
            )
        return True

    def _announce(self, record: CommitRecord) -> None:
        """Record at a fixed key that a commit of this name may be unfinished from now on.

        A restore after a crash would not see it while listings lag.
        """
        if record.step is None:
            return
        name = self._target.name
        newest, etag = read_newest(self._storage)
        if newest is None:
            newest = NewestStep(name=name, step=record.step, save_id=record.save_id)
        announced = newest.model_copy(update={"committing": name})
        replace_matching(self._storage, names.NEWEST, encode_record(announced), etag)

    def _has_name(self) -> bool:
        """Return whether the checkpoint that has the name is this save."""
        return read_save_id(self._storage, self._target.name) == self._save_id

    def discard(self) -> None:
        """Abort the uploads, and remove their list."""
        self._storage.unstage(self._folder)
        storage, entry = self._storage, names.uploads_name(self._target.name, self._uploads_id)
        storage.store.delete(storage.key(entry))

    def clean_up(self) -> None:
        """Do nothing: a commit deletes what it replaces."""

    def _record(self, files: Mapping[str, CommitFile]) -> CommitRecord:
        """Return the record, while this save has claimed the commit."""
        storage, name = self._storage, self._target.name
        self._read_uploads()
        file = f"{name}/{names.MANIFEST}"
        replaced: Manifest | None = None
        body, etag = read_object(storage, file)
        if has_valid_crc(body):
            replaced = parse_manifest(body, file=storage.path(file)).at(storage.path(name))
        if replaced is not None and not is_replaceable(storage, self._target, replaced):
            raise StorageError(
                f"{storage.path(name)}: another job has committed a checkpoint during this save "
                f"(save {replaced.save_id}, {step_text(replaced.step)}); "
                f"choose a free name, or {self._target.advice}"
            )
        manifest = storage.staged(self._folder).manifest
        old_files = replaced.etags if replaced is not None else {}
        return CommitRecord(
            save_id=self._save_id,
            step=parse_manifest(manifest, file=storage.path(file)).step,
            run_id=run_id(),
            uploads_id=self._uploads_id,
            manifest=manifest.decode(),
            replaces=etag,
            files=dict(files),
            replaced_files={old: tag for old, tag in old_files.items() if old not in files},
        )

    def _commit_file(self, file: str, upload: UploadedFile) -> CommitFile:
        """Return what completes an upload. StorageError if a part is missing."""
        numbers = sorted(upload.etags)
        if numbers != list(range(1, len(numbers) + 1)) or not numbers:
            raise StorageError(
                f"{self._storage.path(self._target.name)}/{file}: got parts {numbers[:3]} ..., "
                f"expected 1 to {len(numbers)}; this is a bug"
            )
        etags = [upload.etags[number] for number in numbers]
        return CommitFile(upload_id=upload.upload_id, nbytes=upload.nbytes, etags=etags)

    def _put_uploads(self, upload_ids: Mapping[str, str]) -> None:
        entry, etag = self._read_uploads()
        record = UploadsRecord(run_id=run_id(), save_id=self._save_id, uploads=dict(upload_ids))
        if not replace_matching(self._storage, entry, encode_record(record), etag):
            self._read_uploads()  # aborted meanwhile
            raise StorageError(f"{self._storage.path(entry)}: got other uploads; this is a bug")

    def _read_uploads(self) -> tuple[str, str]:
        """Return the list of this save's uploads, and its ETag. UploadGoneError if aborted."""
        storage, name = self._storage, self._target.name
        entry = names.uploads_name(name, self._uploads_id)
        with suppress(NotFoundError):
            body, etag = storage.read_etag(entry)
            if not parse_record(UploadsRecord, body, file=storage.path(entry)).aborted:
                return entry, etag
        raise UploadGoneError(
            f"{storage.path(name)}: another process has aborted the uploads of this save, as those "
            "of a dead one, or has committed it; run one job per name"
        )


def abort_uploads(
    storage: ObjectStorage,
    name: str,
    begins: UploadsRecord | None = None,
    *,
    uploads_id: str = "",
    older_than_seconds: float = OLD_UPLOAD_SECONDS,
) -> int:
    """Abort the uploads of a checkpoint's earlier saves; return how many it asked to abort.

    Those of the run or of the save id of `begins`, those older than `older_than_seconds` by the
    store's clock, and those of no save: others may be those of a save in progress. `begins`: the
    list of the save that begins, which is stored with the id `uploads_id`.
    StorageError if a commit of this name cannot be finished.
    """
    store = storage.store
    # Uploads before lists: each of these uploads had its save's list when it began.
    uploads = _shown_uploads(storage, name)
    entry = names.uploads_name(name, uploads_id or secrets.token_hex(8))
    own = begins or UploadsRecord(run_id="", save_id=secrets.token_hex(8), uploads={})
    storage.put(entry, encode_record(own))
    stored = store.stat(storage.key(entry))
    limit = (stored.modified if stored else 0.0) - older_than_seconds  # by the store's clock
    lists = _lists(storage, name)
    shows_all = lists.pop(entry, None) is not None  # and not a past state

    def is_dead(record: UploadsRecord, stored_at: float) -> bool:
        is_own = (own.run_id and record.run_id == own.run_id) or record.save_id == own.save_id
        return bool(is_own) or stored_at < limit

    dead = {
        each for each, (record, stored_at) in lists.items() if record and is_dead(record, stored_at)
    }
    listed = {id_ for record, _ in lists.values() if record for id_ in record.uploads.values()}
    unlisted = [upload for upload in uploads if upload.id not in listed]
    if not shows_all or len(dead) < len(lists):
        # Beside another save in progress, it may be one that this save has just begun.
        unlisted = [upload for upload in unlisted if upload.started < limit]
    ids = {(upload.key, upload.id) for upload in unlisted}
    for each in dead:
        for file, upload_id in _mark_aborted(storage, each).items():
            ids.add((storage.key(f"{name}/{file}"), upload_id))
    if dead:
        finish_pending(storage, name)  # drops the claim of a save that is not dead but sleeps
    for key, upload_id in sorted(ids):
        store.abort(key, upload_id)
    if shows_all:
        for each in dead:
            store.delete(storage.key(each))
    if begins is None:
        store.delete(storage.key(entry))
    return len(ids)


def _shown_uploads(storage: ObjectStorage, name: str) -> Sequence[Upload]:
    """Return the uploads of a checkpoint; without the permission none, and warn.

    Lists name the uploads of all saves, except of those that died between beginning and listing.
    """
    try:
        return storage.store.uploads(storage.key_prefix(name))
    except RequestFailedError as error:
        if error.code != "AccessDenied":
            raise
        _LOG.warning("uploads that no save lists are not aborted: %s", error)
        return []


def _lists(storage: ObjectStorage, name: str) -> dict[str, tuple[UploadsRecord | None, float]]:
    """Return the lists of uploads of all saves of a checkpoint, and when each was stored.

    None for a list that this version cannot read.
    """
    lists = dict[str, tuple[UploadsRecord | None, float]]()
    prefix = storage.key(names.UPLOADS_PREFIX)
    for key, stat in storage.store.list(prefix).objects.items():
        entry = names.UPLOADS_PREFIX + key.removeprefix(prefix)
        if names.uploading_name(entry) != name:
            continue
        try:
            body = storage.read(entry)
            record = parse_record(UploadsRecord, body, file=storage.path(entry))
        except NotFoundError:
            continue
        except FormatError:
            record = None
        lists[entry] = record, stat.modified
    return lists


def _mark_aborted(storage: ObjectStorage, entry: str) -> Mapping[str, str]:
    """Mark a list of uploads as aborted, before they are; return the uploads."""
    counter = tries(storage, entry)
    while True:
        next(counter)
        try:
            body, etag = storage.read_etag(entry)
        except NotFoundError:
            return {}
        record = parse_record(UploadsRecord, body, file=storage.path(entry))
        aborted = record.model_copy(update={"aborted": True})
        if record.aborted or replace_matching(storage, entry, encode_record(aborted), etag):
            return record.uploads

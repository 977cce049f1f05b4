"""Publishes the staged files of a save to a bucket by a commit record, and aborts old uploads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from unified_ckpt.core.text import step_text
from unified_ckpt.engine.folder.if_exists import PublishTarget, is_replaceable
from unified_ckpt.engine.folder.publish.commit import (
    claim_commit,
    finish_commit,
    finish_pending,
    put_record,
)
from unified_ckpt.errors import FormatError, NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.commit import (
    CommitFile,
    CommitRecord,
    UploadsRecord,
    encode_record,
    parse_record,
)
from unified_ckpt.format.manifest import Manifest, has_valid_crc, parse_manifest
from unified_ckpt.runtime.objects.staged import UploadedFile
from unified_ckpt.runtime.objects.storage import ObjectStorage

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

    `folder`: the name of the staging folder, below which files are written. `is_published`: once
    the save may be certain; then its uploads must stay.
    """

    def __init__(
        self, storage: ObjectStorage, target: PublishTarget, *, folder: str, save_id: str
    ) -> None:
        self._storage, self._target = storage, target
        self._folder, self._save_id = folder, save_id
        self.is_published = False

    def stage(self) -> None:
        """Abort uploads of earlier attempts, and begin to stage files."""
        abort_uploads(self._storage, self._target.name, run=run_id())
        self._put_uploads({})
        staged = self._storage.stage(self._folder, self._target.name)
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
            claim = claim_commit(storage, name, self._save_id)
            if claim is None:
                time.sleep(0.05 * attempt)
                continue
            record = self._record(files)
            self.is_published = True  # if this raises, the record may be stored
            pending = put_record(storage, name, record, claim=claim)
            if pending is not None:
                finish_commit(storage, pending)
                return
            self.is_published = False
        raise StorageError(
            f"{storage.path(name)}: other processes commit this name all the time, expected one "
            "job per name"
        )

    def discard(self) -> None:
        """Abort the uploads, and remove their list."""
        self._storage.unstage(self._folder)
        self._storage.remove_file(names.uploads_name(self._target.name, self._save_id))

    def clean_up(self) -> None:
        """Do nothing: a commit deletes what it replaces."""

    def _record(self, files: Mapping[str, CommitFile]) -> CommitRecord:
        """Return the record, while this save has claimed the commit."""
        storage, name = self._storage, self._target.name
        file = f"{name}/{names.MANIFEST}"
        replaced: Manifest | None = None
        try:
            body, etag = storage.read_etag(file)
        except NotFoundError:
            body, etag = b"", ""
        if has_valid_crc(body):
            replaced = parse_manifest(body, file=storage.path(file))
        if replaced is not None and not is_replaceable(storage, self._target, replaced):
            raise StorageError(
                f"{storage.path(name)}: another job has committed a checkpoint during this save "
                f"(save {replaced.save_id}, {step_text(replaced.step)}); "
                'choose a free name, or pass if_exists="replace"'
            )
        manifest = storage.staged(self._folder).manifest
        old_files = replaced.etags if replaced is not None else {}
        return CommitRecord(
            save_id=self._save_id,
            step=parse_manifest(manifest, file=storage.path(file)).step,
            run_id=run_id(),
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
        record = UploadsRecord(run_id=run_id(), uploads=dict(upload_ids))
        uploads_name = names.uploads_name(self._target.name, self._save_id)
        self._storage.put(uploads_name, encode_record(record))


def abort_uploads(
    storage: ObjectStorage,
    name: str,
    *,
    run: str,
    older_than_seconds: float = OLD_UPLOAD_SECONDS,
    now: Callable[[], float] = time.time,
) -> int:
    """Abort unfinished uploads of a checkpoint's earlier saves; return how many.

    Those of run `run`, and those older than `older_than_seconds`. Uploads of another run may be
    those of a save in progress. No commit of this name may be unfinished.
    """
    records = _uploads_records(storage, name)
    own = {entry for entry, record in records.items() if run and record.run_id == run}
    listed = {
        upload_id: entry
        for entry, record in records.items()
        for upload_id in record.uploads.values()
    }
    has_competitor = len(own) < len(records)
    prefix, aborted = f"{storage.key(name)}/", 0
    remaining = set[str]()  # records with uploads that are kept
    for upload in storage.store.uploads(prefix):
        entry = listed.get(upload.id, "")
        # An upload may be in no list yet. Beside another run's save, it may be of that.
        is_own = entry in own or (not entry and bool(own) and not has_competitor)
        if is_own or now() - upload.started > older_than_seconds:
            storage.store.abort(upload.key, upload.id)
            aborted += 1
        else:
            remaining.add(entry)
    for entry in own | _older(storage, set(records) - own, now() - older_than_seconds):
        if entry not in remaining:
            storage.remove_file(entry)
    return aborted


def _uploads_records(storage: ObjectStorage, name: str) -> dict[str, UploadsRecord]:
    records = {}
    for entry in storage.sizes(""):
        if names.uploading_name(entry) == name:
            with suppress(NotFoundError, FormatError):
                body = storage.read(entry)
                records[entry] = parse_record(UploadsRecord, body, file=storage.path(entry))
    return records


def _older(storage: ObjectStorage, entries: set[str], time_limit: float) -> set[str]:
    """Return the objects that were stored before a time."""
    found = {entry: storage.store.stat(storage.key(entry)) for entry in entries}
    return {entry for entry, stat in found.items() if stat and stat.modified < time_limit}

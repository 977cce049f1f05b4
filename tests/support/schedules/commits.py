"""Processes that save, finish, read and remove one checkpoint of a bucket, on a schedule.

The oracle needs only the bucket: a save is certain once its commit record is there. From then on,
whoever finishes the commits must get this save, whole, until the next one is certain or a process
removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tests.support.objects.memory import Conditions, MemoryBucket, MemoryStore
from tests.support.schedules.objects import (
    ScheduledStore,
    bucket_state,
    copy_bucket,
)
from tests.support.schedules.scheduler import Scheduler
from unified_ckpt.engine.folder.if_exists import PublishTarget
from unified_ckpt.engine.folder.publish.commit import finish_pending, read_pending, stored_save_id
from unified_ckpt.engine.folder.publish.conditions import delete_matching
from unified_ckpt.engine.folder.publish.uploads import ObjectPublisher
from unified_ckpt.errors import CheckpointError, FormatError, IntegrityError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, encode_manifest, parse_manifest
from unified_ckpt.runtime.objects.storage import ObjectStorage

NAME = "step"
RECORD = names.commit_name(NAME)
MANIFEST = f"{NAME}/{names.MANIFEST}"
MODEL = "model.safetensors"
INDEX = names.index_name(names.MODEL)

_thread = threading.local()


def run_id() -> str:
    """The id of the run that the process of this thread belongs to."""
    return str(getattr(_thread, "run", "run"))


@contextmanager
def of_run(run: str) -> Iterator[None]:
    """Belong to a run in the block."""
    before = run_id()
    _thread.run = run
    try:
        yield
    finally:
        _thread.run = before


def save_id(number: int) -> str:
    return f"{number:016x}"


def body(number: int, file: str) -> bytes:
    """The bytes of a file of a save: of one length, different in each."""
    return f"save {number:2} {file}".encode()


def files_of(number: int) -> list[str]:
    """Two files have one name in all saves; a third is of this save alone."""
    return [MODEL, f"only-{number}.safetensors", INDEX]


@dataclass
class Bucket:
    """The bucket of a schedule, and what the oracle knows. `failures`: of its invariants.

    `certain`: saves by the order of their commit records. `removed`: those that were removed.
    """

    scheduler: Scheduler
    if_match: Conditions = "honored"
    if_absent: Conditions = "honored"
    certain: list[int] = field(default_factory=list)
    removed: set[int] = field(default_factory=set)
    checked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.objects = MemoryBucket(
            if_match=self.if_match, if_absent=self.if_absent, clock=lambda: self.scheduler.now
        )

    def client(self) -> ObjectStorage:
        """A process's client."""
        return ObjectStorage(ScheduledStore(self.objects, self.scheduler, self.check), "")

    def state(self) -> int:
        return hash((bucket_state(self.objects), tuple(self.certain), tuple(sorted(self.removed))))

    def check(self, verb: str, key: str) -> None:
        """Check the invariants after a request that may have changed something."""
        if verb == "put" and key == RECORD:
            self._see_record()
        if verb == "delete" and key == MANIFEST and self.objects.current(key) is None:
            self._see_removal()
        state = self.state()
        if verb in ("put", "delete", "complete", "abort") and state not in self.checked:
            self.checked.add(state)
            check_recovered(self)

    def _see_record(self) -> None:
        with suppress(FormatError):
            pending = read_pending(ObjectStorage(MemoryStore(self.objects), ""), NAME)
            if pending is not None:
                number = int(pending.record.save_id, 16)
                if not self.certain or self.certain[-1] != number:
                    self.certain.append(number)

    def _see_removal(self) -> None:
        deleted = self.objects.versions.get(MANIFEST, [])
        if deleted and (removed := stored_save_id(deleted[-1].body)):
            self.removed.add(int(removed, 16))


def check_recovered(bucket: Bucket) -> None:
    """Whoever finishes the commits gets the last certain save, whole, or none after a removal.

    So does a reader, while no commit is unfinished.
    """
    expected = bucket.certain[-1] if bucket.certain else None
    if expected in bucket.removed:
        expected = None
    storage = ObjectStorage(MemoryStore(copy_bucket(bucket.objects)), "")
    seen = read_whole(storage) if read_pending(storage, NAME) is None else expected
    finish_pending(storage, NAME)
    finished = read_whole(storage)
    assert seen == finished == expected, (
        f"a reader gets save {seen}, {finished} after recovery, expected {expected}; "
        f"certain were {bucket.certain}, removed {bucket.removed}"
    )


def read_whole(storage: ObjectStorage) -> int | None:
    """Return the save that a reader sees, None for none. AssertionError for a mix."""
    try:
        manifest = parse_manifest(storage.read(MANIFEST), file=MANIFEST)
    except (NotFoundError, FormatError, IntegrityError):
        return None
    number = int(manifest.save_id, 16)
    assert set(manifest.etags) == set(files_of(number))
    for file, etag in manifest.etags.items():
        read = bytearray(len(body(number, file)))
        storage.store.get_range(storage.key(f"{NAME}/{file}"), 0, memoryview(read), etag=etag)
        assert read == body(number, file), f"got {read!r}, expected that of save {number}"
    return number


def staged_publisher(
    storage: ObjectStorage, number: int, *, if_exists: str, uploads_id: str = ""
) -> ObjectPublisher:
    """Upload the files of a save."""
    folder = names.staging_name(NAME, save_id(number))
    target = PublishTarget(NAME, if_exists)
    publisher = ObjectPublisher(
        storage,
        target,
        folder=folder,
        save_id=save_id(number),
        uploads_id=uploads_id or save_id(number),
    )
    publisher.stage()
    staged = storage.staged(folder)
    manifest = Manifest(
        save_id=save_id(number),
        created="2026-01-01T00:00:00Z",
        world_size=1,
        step=number,
        parts={},
    )
    try:
        for file in files_of(number):
            staged.put(file, body(number, file))
        staged.put(names.MANIFEST, encode_manifest(manifest))
    except CheckpointError:
        publisher.discard()
        raise
    return publisher


def publish(publisher: ObjectPublisher) -> None:
    """As a transaction: drop the uploads of a save that is not certain."""
    try:
        publisher.publish()
    except CheckpointError:
        if not publisher.is_published:
            with suppress(CheckpointError):
                publisher.discard()
        raise


def save(bucket: Bucket, number: int, *, if_exists: str = "replace") -> int:
    """A whole save by a process; return its number."""
    storage = bucket.client()
    finish_pending(storage, NAME)
    publish(staged_publisher(storage, number, if_exists=if_exists))
    return number


def remove(bucket: Bucket) -> None:
    """Remove the checkpoint that has the name, as a retention does."""
    storage = bucket.client()
    try:
        content, etag = storage.read_etag(MANIFEST)
        manifest = parse_manifest(content, file=MANIFEST)
    except (NotFoundError, FormatError, IntegrityError):
        return
    if storage.store.stat(RECORD) is None and delete_matching(storage, MANIFEST, etag):
        for file, file_etag in manifest.etags.items():
            delete_matching(storage, f"{NAME}/{file}", file_etag)

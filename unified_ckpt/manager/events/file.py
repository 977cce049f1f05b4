"""The events in the root of a run. One process appends; anybody reads at any time.

On a disk they are one file. In a bucket nothing can be appended: each process has objects of its
own, which it stores whole after each commit, at the end, and at most once a minute otherwise.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from datetime import UTC, datetime
from socket import gethostname
from typing import Protocol

from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format.events import (
    EVENTS_FOLDER,
    EVENTS_NAME,
    Event,
    encode_event,
    parse_events,
)
from unified_ckpt.manager.steps.bucket import at_once
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.paths import is_url
from unified_ckpt.runtime.storage.posix_calls import fsync_path, make_folders
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.regular_files import is_file, open_binary
from unified_ckpt.runtime.storage.roots import open_root

_LOG = logging.getLogger("unified_ckpt")
_STORE_SECONDS = 60.0
_OBJECT_NBYTES = 1 << 20  # then another object begins


class EventWriter(Protocol):
    """Appends the events of a run. A failure is logged once and never fails a save."""

    def append(self, event: Event) -> None:
        """Append one event."""

    def flush(self) -> None:
        """Store the events that were appended."""


def open_events(root: str, *, fsync: bool) -> EventWriter:
    """Return the writer for a root. `fsync`: as in `EventFile`."""
    storage = open_root(root)
    if isinstance(storage, ObjectStorage):
        return EventObjects(storage)
    return EventFile(root, fsync=fsync)


class EventFile:
    """Appends events. A failure is logged once and never fails a save: checkpoints do not depend
    on events. `fsync`: an event survives a power failure once it is appended.
    """

    def __init__(self, root: str, *, fsync: bool = True) -> None:
        self._root, self._path = root, os.path.join(root, EVENTS_NAME)
        self._fsync, self._name_is_durable = fsync, not fsync
        self._lock = threading.Lock()  # saves and copies end in threads
        self._warned = False

    def append(self, event: Event) -> None:
        """Append one event with a single write. A line that a crash has torn is ended first."""
        try:
            with self._lock:
                self._append(encode_event(event))
        except OSError as error:
            if not self._warned:
                _LOG.warning("%s: events are not recorded: %s", self._path, error)
            self._warned = True

    def flush(self) -> None:
        """Do nothing: an event is stored once it is appended."""

    def _append(self, line: bytes) -> None:
        make_folders(self._root, fsync=self._fsync)
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(fd).st_size
            is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, b"\n" + line if is_torn else line)
            if self._fsync:
                os.fsync(fd)
        finally:
            os.close(fd)
        if not self._name_is_durable:
            fsync_path(self._root)
            self._name_is_durable = True


class EventObjects:
    """Stores events in objects of this process. As `EventFile`, a failure is logged once.

    Events that were appended less than a minute ago, and not followed by a commit, may be lost with
    the process.
    """

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage, self._lock, self._warned = storage, threading.Lock(), False
        self._name, self._lines, self._stored = _object_name(), b"", 0
        self._last_stored = time.monotonic()

    def append(self, event: Event) -> None:
        """Append one event; store all if the last ones were stored a minute ago."""
        with self._lock:
            self._lines += encode_event(event)
        if time.monotonic() - self._last_stored >= _STORE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Store the events that were appended, in the current object."""
        with self._lock:
            if len(self._lines) == self._stored:
                return
            try:
                self._storage.put(f"{EVENTS_FOLDER}/{self._name}", self._lines)
            except CheckpointError as error:
                if not self._warned:
                    _LOG.warning("%s: events are not recorded: %s", self._storage.root, error)
                self._warned = True
                return
            self._stored, self._last_stored = len(self._lines), time.monotonic()
            if self._stored >= _OBJECT_NBYTES:
                self._name, self._lines, self._stored = _object_name(), b"", 0


def _object_name() -> str:
    """Return a name that no other process uses."""
    started, host = f"{datetime.now(UTC):%Y%m%dT%H%M%S}", re.sub(r"[^\w.-]", "_", gethostname())
    return f"{started}-{host}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"


def read_events(root: str) -> list[Event]:
    """Return the events of a run; none without any.

    They are in the order of the file; in a bucket, in that of their times.
    """
    if is_url(root):
        return _read_objects(open_root(root)) if is_bucket_url(root) else []
    try:
        file = open_binary(os.path.join(root, EVENTS_NAME))
    except NotFoundError:
        return []
    with file:
        return list(parse_events(file))


def append_to_recorded(root: str, event: Event) -> None:
    """Append an event of another process than the run's, if the run on a disk records events."""
    if not is_url(root) and is_file(os.path.join(root, EVENTS_NAME)):
        EventFile(root).append(event)


def _read_objects(storage: Storage) -> list[Event]:
    names = [f"{EVENTS_FOLDER}/{name}" for name in storage.sizes(EVENTS_FOLDER)]
    bodies = at_once(storage.read, names)
    events = (event for body in bodies for event in parse_events(body.splitlines()))
    return sorted(events, key=lambda event: datetime.fromisoformat(event.time))

"""The events file in the root of a run. One process appends; anybody reads at any time."""

from __future__ import annotations

import logging
import os
import threading

from unified_ckpt.errors import NotFoundError
from unified_ckpt.format.events import EVENTS_NAME, Event, encode_event, parse_events
from unified_ckpt.runtime.storage.posix_calls import fsync_path, make_folders
from unified_ckpt.runtime.storage.regular_files import open_binary

_LOG = logging.getLogger("unified_ckpt")


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


def read_events(root: str) -> list[Event]:
    """Return the events of a run in the order of the file; none without a file."""
    try:
        file = open_binary(os.path.join(root, EVENTS_NAME))
    except NotFoundError:
        return []
    with file:
        return list(parse_events(file))

"""A cache of open folders of one save: of thousands, a rank reads few."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.runtime.storage.protocol import Reader

_MAX_PARSED = 16  # folders that keep their parsed headers


class FolderCache:
    """Folders by number, opened on first use. Closes the storages.

    `opened`: folders that are already open and owned elsewhere. `save_id`: required of every
    folder, if set. Parsed headers of the least recently used folders are dropped.
    """

    def __init__(
        self,
        storages: Sequence[Reader],
        opened: Mapping[int, Folder] = MappingProxyType({}),
        *,
        save_id: str | None = None,
    ) -> None:
        self._storages, self._opened, self._save_id = storages, opened, save_id
        self._recent = OrderedDict(opened)  # most recently used last
        self._errors: dict[int, CheckpointError] = {}
        self._lock = threading.Lock()
        self._evict()

    def __getitem__(self, number: int) -> Folder:
        """Return a folder, open. Raises its first error again, without asking its node twice."""
        with self._lock:
            if number in self._errors:
                raise type(self._errors[number])(str(self._errors[number]))
            if number not in self._recent:
                try:
                    self._recent[number] = self._opened.get(number) or self._open(
                        self._storages[number]
                    )
                except CheckpointError as error:
                    self._errors[number] = error
                    raise
            self._recent.move_to_end(number)
            self._evict()
            return self._recent[number]

    def _evict(self) -> None:
        while len(self._recent) > _MAX_PARSED:
            _, folder = self._recent.popitem(last=False)
            folder.drop_headers()

    def _open(self, storage: Reader) -> Folder:
        folder = open_folder(storage)
        actual_save_id = folder.manifest.save_id if folder.manifest is not None else None
        if self._save_id is not None and actual_save_id != self._save_id:
            raise StorageError(
                f"{storage.root}: now holds save {actual_save_id}, expected "
                f"{self._save_id}; load again"
            )
        return folder

    def close(self) -> None:
        """Close all storages."""
        for storage in self._storages:
            storage.close()

"""The folders of one save on several machines, each opened when something is first wanted of it: of thousands a rank reads few."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from unified_ckpt.engine.checkpoint import Folder, open_folder
from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.runtime.storage import Reader


class Folders:
    """By number. Closes the storages. `opened`: those that are another's and open already, with what was read of them. `save_id`: of all,
    where it matters.
    """

    def __init__(
        self, storages: Sequence[Reader], opened: Mapping[int, Folder] = MappingProxyType({}), *, save_id: str | None = None
    ) -> None:
        self._storages, self._save_id = storages, save_id
        self._opened: dict[int, Folder | CheckpointError] = dict(opened)
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Folder:
        """Raises the error that it met at first, again: nobody waits twice for a machine that does not answer."""
        with self._lock:
            if number not in self._opened:
                try:
                    self._opened[number] = self._open(self._storages[number])
                except CheckpointError as error:
                    self._opened[number] = error
            found = self._opened[number]
        if isinstance(found, CheckpointError):
            raise type(found)(str(found))
        return found

    def _open(self, storage: Reader) -> Folder:
        folder = open_folder(storage)
        found = folder.manifest.save_id if folder.manifest is not None else None
        if self._save_id is not None and found != self._save_id:
            raise StorageError(f"{storage.root}: holds save {found} by now; needed {self._save_id}, which was there when the load began")
        return folder

    def close(self) -> None:
        for storage in self._storages:
            storage.close()

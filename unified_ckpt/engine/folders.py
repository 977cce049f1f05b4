"""The folders of one save on several machines, each opened when something is first wanted of it: of thousands a rank reads few."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from unified_ckpt.engine.checkpoint import Folder, open_folder
from unified_ckpt.errors import CheckpointError
from unified_ckpt.runtime.storage import Reader


class Folders:
    """By number. Closes the storages. `opened`: those that are another's and open already, with what was read of them."""

    def __init__(self, storages: Sequence[Reader], opened: Mapping[int, Folder] = MappingProxyType({})) -> None:
        self._storages = storages
        self._opened: dict[int, Folder | CheckpointError] = dict(opened)
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Folder:
        """Raises the error that it met at first, again: nobody waits twice for a machine that does not answer."""
        with self._lock:
            if number not in self._opened:
                try:
                    self._opened[number] = open_folder(self._storages[number])
                except CheckpointError as error:
                    self._opened[number] = error
            found = self._opened[number]
        if isinstance(found, CheckpointError):
            raise type(found)(str(found))
        return found

    def close(self) -> None:
        for storage in self._storages:
            storage.close()

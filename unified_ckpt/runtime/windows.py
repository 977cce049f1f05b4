"""The windows of one rank and of those that it exchanges with: made, opened and reused for as long as the ranks live."""

from __future__ import annotations

import os
from collections.abc import Iterable

from unified_ckpt.runtime.comm import Meeting
from unified_ckpt.runtime.staging import Window, create_window, open_window


class Windows:
    """Owns shared memory. `close` gives it back; the other ranks keep what they have opened until they close it too."""

    def __init__(self) -> None:
        self._own: Window | None = None
        self._fd: int | None = None
        self._opened: dict[int, Window] = {}

    def ready(self, meeting: Meeting, *, tile_nbytes: int, partners: Iterable[int]) -> dict[int, Window]:
        """The windows of `partners`, by rank, and this rank's own when it is one of them: at least `tile_nbytes` a tile.

        A rank that only fills or empties has one too, by which the others see that it lives. StorageError where the memory of one
        cannot be reached.
        """
        found: dict[int, Window] = {}
        wanted = set(partners)
        if meeting.rank in wanted:
            own = found[meeting.rank] = self._ensure(meeting.world, tile_nbytes)
            own.revive()
            meeting.put(f"window/{meeting.rank}", f"{own.token} {own.tile_nbytes}".encode())
        for rank in sorted(wanted - {meeting.rank}):
            token, theirs = meeting.get(f"window/{rank}").decode().split()
            if rank not in self._opened or self._opened[rank].token != token:
                if rank in self._opened:
                    self._opened.pop(rank).close()
                self._opened[rank] = open_window(token, world=meeting.world, tile_nbytes=int(theirs))
            found[rank] = self._opened[rank]
        return found

    def _ensure(self, world: int, tile_nbytes: int) -> Window:
        if self._own is None or self._own.tile_nbytes < tile_nbytes:
            self._close_own()
            self._own, self._fd = create_window(world=world, tile_nbytes=tile_nbytes)
        return self._own

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        self._close_own()
        for window in self._opened.values():
            window.close()
        self._opened = {}

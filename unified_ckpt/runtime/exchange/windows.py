"""The windows of one rank and of those that it exchanges with: made, opened and reused for as long as the ranks live."""

from __future__ import annotations

import os
from collections.abc import Iterable

from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.exchange.shared_memory import (
    FarWindow,
    Window,
    create_window,
    giving_up,
    open_window,
)
from unified_ckpt.runtime.exchange.tcp_exchange import Post

_MAX_GROUPS = 1 << 20


def exchange_number(meeting: Meeting, group: int) -> int:
    """Tells one exchange from another in the counters of windows that are kept: higher for later meetings, and groups within one."""
    return meeting.number * _MAX_GROUPS + group + 1


class Windows:
    """Owns shared memory. `close` gives it back; the other ranks keep what they have opened until they close it too."""

    def __init__(self) -> None:
        self._own: Window | None = None
        self._fd: int | None = None
        self._opened: dict[int, Window] = {}
        self.far: dict[int, FarWindow] = {}  # of the partners on other machines, since `ready`
        self._post: Post | None = None

    def ready(
        self,
        meeting: Meeting,
        *,
        tile_nbytes: int,
        partners: Iterable[int],
        post: Post | None = None,
    ) -> dict[int, Window]:
        """The windows of `partners`, by rank, and this rank's own when it is one of them: tiles of at least `tile_nbytes`. `post`: the way
        to partners on other machines, who are in `far` then.

        A rank that only fills or empties has one too, by which the others see that it lives. StorageError where the memory of one
        cannot be reached.
        """
        wanted, self._post = set(partners), post or self._post
        own = self._ensure(meeting.world, tile_nbytes) if meeting.rank in wanted else None
        with giving_up(own):
            if own is not None:
                own.revive()
                if post is not None:
                    post.lend(own)
                meeting.put(f"window/{meeting.rank}", f"{own.token} {own.tile_nbytes}".encode())
            found = self._partners(meeting, wanted - {meeting.rank}, post)
        return found if own is None else {meeting.rank: own, **found}

    def _partners(
        self, meeting: Meeting, ranks: Iterable[int], post: Post | None
    ) -> dict[int, Window]:
        """The windows of other ranks; those on other machines are in `far` then."""
        found: dict[int, Window] = {}
        kept, self.far = self.far, {}
        for rank in sorted(ranks):
            token, size = meeting.get(f"window/{rank}", of=rank).decode().split()
            nbytes = int(size)
            if post is not None and not post.volume.near(meeting.rank, rank):
                known = kept.get(rank)
                self.far[rank] = (
                    known
                    if known is not None and known.token == token
                    else FarWindow(rank, token, tile_nbytes=nbytes)
                )
                continue
            if rank not in self._opened or self._opened[rank].token != token:
                if rank in self._opened:
                    self._opened.pop(rank).close()
                self._opened[rank] = open_window(token, world=meeting.world, tile_nbytes=nbytes)
            found[rank] = self._opened[rank]
        return found

    @property
    def nbytes(self) -> int:
        """Of this rank's own window, and of what it has put together for ranks on other machines."""
        return (self._own.nbytes if self._own is not None else 0) + sum(
            one.nbytes for one in self.far.values()
        )

    def _ensure(self, world: int, tile_nbytes: int) -> Window:
        if self._own is None or self._own.tile_nbytes < tile_nbytes:
            self._close_own()
            self._own, self._fd = create_window(world=world, tile_nbytes=tile_nbytes)
        return self._own

    def _close_own(self) -> None:
        if self._own is not None:
            if self._post is not None:
                self._post.take_back(self._own)
            self._own.close()
            self._own = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        self._close_own()
        for window in self._opened.values():
            window.close()
        self._opened, self.far = {}, {}

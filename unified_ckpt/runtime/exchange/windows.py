"""The windows of one rank and of those that it exchanges with: made, opened and reused for as long
as the ranks live.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.shared_memory import (
    RemoteTileBuffer,
    TileBuffer,
    create_tile_buffer,
    marking_failed,
    open_tile_buffer,
)
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport

_MAX_GROUPS = 1 << 20


def exchange_number(collective: Collective, group_index: int) -> int:
    """Tells one exchange from another in the counters of windows that are kept: higher for later
    meetings, and groups within one.
    """
    return collective.number * _MAX_GROUPS + group_index + 1


class TileBuffers:
    """Owns shared memory. `close` gives it back; the other ranks keep what they have opened until
    they close it too.
    """

    def __init__(self) -> None:
        self._local: TileBuffer | None = None
        self._fd: int | None = None
        self._opened: dict[int, TileBuffer] = {}
        self.remote: dict[
            int, RemoteTileBuffer
        ] = {}  # of the partners on other machines, since `ready`
        self._transport: PeerTransport | None = None

    def prepare(
        self,
        collective: Collective,
        *,
        tile_nbytes: int,
        partners: Iterable[int],
        transport: PeerTransport | None = None,
    ) -> dict[int, TileBuffer]:
        """The windows of `partners`, by rank, and this rank's own when it is one of them: tiles of
        at least `tile_nbytes`. `transport`: the way to partners on other machines, who are in
        `remote` then.

        A rank that only fills or empties has one too, by which the others see that it lives.
        StorageError where the memory of one cannot be reached.
        """
        ranks, self._transport = set(partners), transport or self._transport
        local = (
            self._ensure_local(collective.world, tile_nbytes) if collective.rank in ranks else None
        )
        with marking_failed(local):
            if local is not None:
                local.reset_failed()
                if transport is not None:
                    transport.register_tile_buffer(local)
                collective.put(
                    f"window/{collective.rank}", f"{local.token} {local.tile_nbytes}".encode()
                )
            tile_buffers = self._open_partners(collective, ranks - {collective.rank}, transport)
        return tile_buffers if local is None else {collective.rank: local, **tile_buffers}

    def _open_partners(
        self, collective: Collective, ranks: Iterable[int], transport: PeerTransport | None
    ) -> dict[int, TileBuffer]:
        """The windows of other ranks; those on other machines are in `remote` then."""
        tile_buffers: dict[int, TileBuffer] = {}
        previous, self.remote = self.remote, {}
        for rank in sorted(ranks):
            token, size = collective.get(f"window/{rank}", sender=rank).decode().split()
            nbytes = int(size)
            if transport is not None and not transport.alignment.same_node(collective.rank, rank):
                cached = previous.get(rank)
                self.remote[rank] = (
                    cached
                    if cached is not None and cached.token == token
                    else RemoteTileBuffer(rank, token, tile_nbytes=nbytes)
                )
                continue
            if rank not in self._opened or self._opened[rank].token != token:
                if rank in self._opened:
                    self._opened.pop(rank).close()
                self._opened[rank] = open_tile_buffer(
                    token, world=collective.world, tile_nbytes=nbytes
                )
            tile_buffers[rank] = self._opened[rank]
        return tile_buffers

    @property
    def nbytes(self) -> int:
        """Of this rank's own window, and of what it has put together for ranks on other machines."""
        return (self._local.nbytes if self._local is not None else 0) + sum(
            tile_buffer.nbytes for tile_buffer in self.remote.values()
        )

    def _ensure_local(self, world: int, tile_nbytes: int) -> TileBuffer:
        if self._local is None or self._local.tile_nbytes < tile_nbytes:
            self._close_local()
            self._local, self._fd = create_tile_buffer(world=world, tile_nbytes=tile_nbytes)
        return self._local

    def _close_local(self) -> None:
        if self._local is not None:
            if self._transport is not None:
                self._transport.unregister_tile_buffer(self._local)
            self._local.close()
            self._local = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        self._close_local()
        for tile_buffer in self._opened.values():
            tile_buffer.close()
        self._opened, self.remote = {}, {}

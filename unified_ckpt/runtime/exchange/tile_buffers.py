"""Owns this rank's tile buffer and those it has opened of other ranks; reuses them across saves."""

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
    """Return a number that grows with every exchange: over collectives, and over their groups.

    Tile buffers outlive an exchange; the number distinguishes exchanges in their counters.
    """
    return collective.number * _MAX_GROUPS + group_index + 1


class TileBuffers:
    """Owns shared memory until `close`. Other ranks keep what they opened until they close it too.

    `remote`: the buffers of ranks on other nodes, set by `prepare`.
    """

    def __init__(self) -> None:
        self._local: TileBuffer | None = None
        self._fd: int | None = None
        self._opened: dict[int, TileBuffer] = {}
        self.remote: dict[int, RemoteTileBuffer] = {}
        self._transport: PeerTransport | None = None

    def prepare(
        self,
        collective: Collective,
        *,
        tile_nbytes: int,
        partners: Iterable[int],
        transport: PeerTransport | None = None,
    ) -> dict[int, TileBuffer]:
        """Return the buffers of `partners` by rank, and this rank's own if it is one of them.

        Tiles have at least `tile_nbytes` bytes. `transport`: reaches partners on other nodes; their
        buffers are in `remote` afterwards.

        A rank that only fills or empties tiles of others has a buffer too: it shows them that the
        rank is alive. StorageError if a partner's memory cannot be reached.
        """
        ranks, self._transport = set(partners), transport or self._transport
        rank = collective.rank
        local = self._ensure_local(collective.world, tile_nbytes) if rank in ranks else None
        with marking_failed(local):
            if local is not None:
                local.reset_failed()
                if transport is not None:
                    transport.register_tile_buffer(local)
                address = f"{local.token} {local.tile_nbytes}"
                collective.put(f"tile-buffer/{rank}", address.encode())
            tile_buffers = self._open_partners(collective, ranks - {rank}, transport)
        return tile_buffers if local is None else {rank: local, **tile_buffers}

    def _open_partners(
        self, collective: Collective, ranks: Iterable[int], transport: PeerTransport | None
    ) -> dict[int, TileBuffer]:
        """Return the buffers of other ranks on this node, and set `remote`."""
        tile_buffers: dict[int, TileBuffer] = {}
        previous, self.remote = self.remote, {}
        for rank in sorted(ranks):
            token, size = collective.get(f"tile-buffer/{rank}", sender=rank).decode().split()
            nbytes = int(size)
            if transport is not None and not transport.alignment.same_node(collective.rank, rank):
                remote = previous.get(rank)
                if remote is None or remote.token != token:
                    remote = RemoteTileBuffer(rank, token, tile_nbytes=nbytes)
                self.remote[rank] = remote
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
        """Bytes of this rank's own buffer and of its images of remote ones."""
        local = self._local.nbytes if self._local is not None else 0
        return local + sum(tile_buffer.nbytes for tile_buffer in self.remote.values())

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
        """Release all buffers."""
        self._close_local()
        for tile_buffer in self._opened.values():
            tile_buffer.close()
        self._opened, self.remote = {}, {}

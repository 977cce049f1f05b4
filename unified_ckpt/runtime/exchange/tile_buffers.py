"""Owns this rank's tile buffer and those it has opened of other ranks; reuses them across saves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from unified_ckpt.core.planning.exchange import RankIO
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.shared_memory import (
    PartnerBuffer,
    PeerWait,
    TileBuffer,
    create_tile_buffer,
    marking_failed,
)
from unified_ckpt.runtime.exchange.transport import SHARED_MEMORY, Transport

_MAX_GROUPS = 1 << 20


def make_exchange_id(collective: Collective, group_index: int) -> int:
    """Return a number that grows with every exchange: over collectives, and over their groups.

    Tile buffers outlive an exchange; the number distinguishes exchanges in their counters.
    """
    return collective.number * _MAX_GROUPS + group_index + 1


@dataclass(frozen=True, slots=True)
class TileBufferSet:
    """The tile buffers that a rank can reach, by rank; `local` is its own if it has one."""

    rank: int
    local: TileBuffer | None
    by_rank: Mapping[int, PartnerBuffer]
    wait: PeerWait

    def open_local(self, exchange_id: int) -> TileBuffer:
        """Open and return the buffer of this rank, which has one if it reads or writes a tile."""
        assert self.local is not None
        self.local.open_for(exchange_id)
        return self.local


class TileBuffers:
    """Owns shared memory until `close`. Other ranks keep what they opened until they close it too.

    `local`: this rank's buffer, once it takes part. `transport`: reaches those of other ranks.
    """

    def __init__(self, transport: Transport = SHARED_MEMORY) -> None:
        self.local: TileBuffer | None = None
        self._transport = transport
        self._fd: int | None = None
        self._opened: dict[int, PartnerBuffer] = {}

    @contextmanager
    def exchanging(
        self, collective: Collective, plans: Sequence[RankIO], *, tile_nbytes: int
    ) -> Iterator[TileBufferSet]:
        """Yield the buffers for these plans. `tile_nbytes`: of the largest tile of this rank.

        If the block raises, ranks that wait for this one fail at once.
        """
        rank = collective.rank
        by_rank = self.prepare(
            collective,
            tile_nbytes=tile_nbytes,
            partners={partner for plan in plans for partner in plan.partners(rank)},
        )

        def raise_if_failed() -> None:
            self._transport.raise_if_failed()
            collective.raise_if_failed()

        wait = PeerWait(
            timeout_seconds=collective.timeout_seconds,
            tile_buffers=by_rank,
            raise_if_failed=raise_if_failed,
            progress=collective.progress,
        )
        with marking_failed(self.local):
            yield TileBufferSet(rank, self.local, by_rank, wait)

    def prepare(
        self, collective: Collective, *, tile_nbytes: int, partners: Iterable[int]
    ) -> dict[int, PartnerBuffer]:
        """Return the buffers of `partners` by rank, and this rank's own if it is one of them.

        Tiles have at least `tile_nbytes` bytes. A rank that only fills or empties tiles of others
        has a buffer too: it shows them that the rank is alive. StorageError if a partner's memory
        cannot be reached.
        """
        ranks, rank = set(partners), collective.rank
        tile_buffers: dict[int, PartnerBuffer] = {}
        if rank in ranks:
            tile_buffers[rank] = local = self._ensure_local(collective.world, tile_nbytes)
            collective.put(f"tile-buffer/{rank}", f"{local.handle} {local.tile_nbytes}".encode())
        with marking_failed(self.local):
            for partner in sorted(ranks - {rank}):
                tile_buffers[partner] = self._open(collective, partner)
        return tile_buffers

    def _open(self, collective: Collective, rank: int) -> PartnerBuffer:
        """Return the buffer of another rank. It is opened again if that rank has a new one."""
        handle, size = collective.get(f"tile-buffer/{rank}").decode().split()
        if rank not in self._opened or self._opened[rank].handle != handle:
            if rank in self._opened:
                self._opened.pop(rank).close()
            self._opened[rank] = self._transport.open_tile_buffer(
                rank, handle, world=collective.world, tile_nbytes=int(size)
            )
        return self._opened[rank]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's own buffer and of its image of tiles on other nodes."""
        local = self.local.nbytes if self.local is not None else 0
        return local + self._transport.image.nbytes

    def _ensure_local(self, world: int, tile_nbytes: int) -> TileBuffer:
        """Return this rank's buffer, with no failure of an earlier operation."""
        if self.local is None or self.local.tile_nbytes < tile_nbytes:
            self._close_local()
            self.local, self._fd = create_tile_buffer(world=world, tile_nbytes=tile_nbytes)
            self._transport.register_tile_buffer(self.local)
        self.local.reset_failed()
        return self.local

    def _close_local(self) -> None:
        if self.local is not None:
            self._transport.unregister_tile_buffer(self.local)
            self.local.close()
            self.local = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Release all buffers."""
        self._close_local()
        for tile_buffer in self._opened.values():
            tile_buffer.close()
        self._opened = {}
        self._transport.image.release()

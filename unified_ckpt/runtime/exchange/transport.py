"""How bytes reach the ranks that share a folder: through shared memory, or over TCP.

`PeerTransport` in `tcp_exchange.py` is the `Transport` of several nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.exchange.shared_memory import (
    PartnerBuffer,
    PeerWait,
    TileBuffer,
    TileImage,
    open_tile_buffer,
)
from unified_ckpt.runtime.storage.protocol import Buffer, Storage


class Transport:
    """Carries tiles, and bytes of files that other ranks write.

    This class serves ranks of one node, which map each other's tiles and write for themselves.
    `image`: of tiles on other nodes.
    """

    def __init__(self) -> None:
        self.image = TileImage()

    def open_tile_buffer(
        self, rank: int, handle: str, *, world: int, tile_nbytes: int
    ) -> PartnerBuffer:
        """Return the tile buffer of another rank. StorageError if it cannot be reached."""
        del rank  # the handle names its process
        return open_tile_buffer(handle, world=world, tile_nbytes=tile_nbytes)

    def register_tile_buffer(self, tile_buffer: TileBuffer) -> None:
        """Let other ranks fill this rank's buffer until it is unregistered."""

    def unregister_tile_buffer(self, tile_buffer: TileBuffer) -> None:
        """Return once no rank on another node fills the buffer."""

    def flush_tiles(self, wait: PeerWait) -> None:
        """Return once all tiles of this rank have reached their owners."""

    def receiving(
        self, save_id: str, storage: Storage, folder: str, traffic: Traffic
    ) -> AbstractContextManager[None]:
        """Write bytes of other ranks to files of `folder` until the context ends.

        `traffic` counts what this rank exchanges with other nodes meanwhile.
        """
        del save_id, storage, folder, traffic  # for other nodes
        return nullcontext()

    def raising_errors(self, collective: Collective) -> AbstractContextManager[None]:
        """Raise, where this rank waits in the block, an error of a thread that serves others."""
        del collective
        return nullcontext()

    def raise_if_failed(self) -> None:
        """Raise an error of a thread that serves other ranks."""

    def route_write(
        self,
        save_id: str,
        file: str,
        start: int,
        buffers: Sequence[Buffer],
        *,
        exclusive_range: tuple[int, int] | None,
    ) -> Iterable[tuple[int, Sequence[Buffer]]]:
        """Send the bytes that other ranks write; return the others as (start, buffers).

        `exclusive_range`: bytes of the file around them, of which all are this rank's.
        """
        del save_id, file, exclusive_range  # for other nodes
        return [(start, buffers)]

    def flush_writes(self) -> None:
        """Return once other ranks have written the bytes sent to them."""

    def close(self) -> None:
        """Close all connections."""


SHARED_MEMORY = Transport()

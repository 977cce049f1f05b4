"""One call of save on one rank, and what it shares with the next call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from unified_ckpt.engine.save.layout.layout_plan import LayoutCache
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.scope import SaveScope
from unified_ckpt.engine.save.write.snapshot import SnapshotMemory
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.connections import Connections
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers
from unified_ckpt.runtime.storage.protocol import Storage


@dataclass(slots=True)
class Buffers:
    """Memory that one call leaves for the next: tiles, a snapshot, replicas being compared.

    `tiles` are those of saves, over one set of connections. Loads have their own, because a load
    involves all ranks and a save may involve one node group.
    """

    tiles: TileBuffers = field(default_factory=TileBuffers)
    load_tiles: TileBuffers = field(default_factory=TileBuffers)
    snapshot: SnapshotMemory = field(default_factory=SnapshotMemory)
    replicas: SnapshotMemory = field(default_factory=SnapshotMemory)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        tile_nbytes = self.tiles.nbytes + self.load_tiles.nbytes
        return self.snapshot.nbytes + self.replicas.nbytes + tile_nbytes

    def reconnect(self, connections: Connections) -> None:
        """Replace the tiles of other connections, whose exchange ids start again."""
        self.tiles.close()
        self.tiles = TileBuffers(connections.transport)

    def close(self) -> None:
        """Release the memory."""
        self.tiles.close()
        self.load_tiles.close()
        self.snapshot.close()
        self.replicas.close()


@dataclass(frozen=True, slots=True)
class SaveCall:
    """One call of save on this rank: what to store, under which name, with which ranks.

    `comm`: all ranks. `request` is the error that this rank met while building one; then every
    rank raises it. `connections`: those of the ranks that share the folder. `join_scope`:
    that of `engine.cluster.save_scope`, which a save does not import: most have no node groups.
    """

    comm: Comm
    storage: Storage
    name: str
    request: SaveRequest | Exception
    layouts: LayoutCache
    buffers: Buffers
    timeout_seconds: float
    connections: Connections
    join_scope: Callable[[Collective, Connections], SaveScope]
    started: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> str:
        """The absolute path of the checkpoint."""
        return self.storage.path(self.name)

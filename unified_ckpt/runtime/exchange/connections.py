"""The ranks that see a folder, connected."""

from __future__ import annotations

from dataclasses import dataclass

from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.exchange.transport import Transport


@dataclass(frozen=True, slots=True)
class Connections:
    """The ranks that see this rank's folder, connected by a store and a transport."""

    topology: Topology
    comm: Comm
    transport: Transport

    def close(self) -> None:
        """Close the connections."""
        if self.topology.node_group.count > 1:
            self.comm.hand_over_keys()
        self.transport.close()

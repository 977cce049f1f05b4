"""Probes which ranks see a folder and share a node, and connects nodes, before the first save.

Data could be lost if a shared folder were taken for local ones, so that nodes overwrite each other,
or the reverse. So every node writes a new file and opens those of the others by name. A directory
listing may be stale, but the lookup of a new name is not.
"""

from __future__ import annotations

import json
import secrets
from contextlib import ExitStack, suppress
from dataclasses import replace

from unified_ckpt.core.nodes.node_groups import NodeGroup
from unified_ckpt.core.nodes.write_alignment import choose_alignment
from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.runtime.comm.call import Call
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm, process_group_store
from unified_ckpt.runtime.comm.error_spread import demote_shared
from unified_ckpt.runtime.comm.topology import Topology, file_system_type, gather_topology, node_id
from unified_ckpt.runtime.exchange.connections import Connections
from unified_ckpt.runtime.exchange.tcp import Address
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.exchange.transport import SHARED_MEMORY
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.protocol import Storage

_PROBE_PREFIX = ".unified-probe-"


class Topologies:
    """The topologies of one `Comm`: that of its ranks, and those of the folders they save to.

    Dropped with the `Comm`: another process group may have other nodes. `node`: the name of this
    rank's node, or None for the kernel's identity.
    """

    def __init__(self, comm: Comm, node: str | None) -> None:
        self.comm, self._node = comm, node
        self._store = process_group_store()
        self._topology: Topology | None = None
        self._connections: dict[str, Connections] = {}  # by the folder that holds the checkpoints

    def is_current(self) -> bool:
        """Return whether the process group is still the one of the start."""
        return self._store is process_group_store()

    @property
    def node_count(self) -> int | None:
        """The number of nodes of the ranks; None before the first save or load."""
        known = [connections.topology for connections in self._connections.values()]
        topology = self._topology or next(iter(known), None)
        return None if topology is None else max(topology.nodes) + 1

    def resolve_ranks(self, operation: str, *, timeout_seconds: float) -> Topology:
        """Return the topology of the ranks, without folders. Collective at the first call."""
        if self._topology is None:  # set once all ranks know it: a failed call gathers again
            self._topology = gather_topology(
                self.comm, operation, node=self._node, timeout_seconds=timeout_seconds
            )
        return self._topology

    def resolve_folder(
        self,
        storage: Storage,
        name: str,
        *,
        failure: Exception | None,
        write_alignment: int | None,
        timeout_seconds: float,
    ) -> Connections:
        """Return the connected ranks of a folder. Collective at the first save to it.

        `name`: of the checkpoint. `failure`: this rank's error before the save, for all ranks.
        """
        if storage.root not in self._connections:
            # A rank that failed may not know the folder, so it joins the collective of the others.
            arguments = None if failure else {"first to this folder": True}
            call = Call(f"save to {storage.path(name)}", arguments)
            collective = self.comm.begin_collective(call, timeout_seconds=timeout_seconds)
            with collective.step("probe-topology"):
                if failure:
                    # This may be the background save that the others are in: its keys are deleted
                    # once every rank has counted itself as finished.
                    collective.add("finished")
                    raise failure
                node = self._node or node_id()
                topology = probe_topology(
                    collective, storage, node, write_alignment=write_alignment
                )
            known = {
                connections.topology: connections for connections in self._connections.values()
            }
            with ExitStack() as undo:
                with collective.step("connect-topology"):
                    if topology not in known:
                        known[topology] = connect_topology(
                            self.comm, topology, timeout_seconds=timeout_seconds
                        )
                        undo.callback(known[topology].close)
                undo.pop_all()
            # Only once all ranks have connected: after a failure, all of them probe again.
            self._connections[storage.root] = known[topology]
        return self._connections[storage.root]

    def is_folder_leader(self, root: str) -> bool:
        """Return whether this rank is the first of those that see a folder."""
        comm = self._connections[root].comm if root in self._connections else self.comm
        return comm.rank == 0

    def close(self) -> None:
        """Close all connections, and leave the keys to delete to the next `Comm` of this rank."""
        self.comm.hand_over_keys()
        for connections in set(self._connections.values()):
            connections.close()


def connect_topology(comm: Comm, topology: Topology, *, timeout_seconds: float) -> Connections:
    """Collective over all ranks, inside a step."""
    if topology.node_group.count > 1:
        comm = comm.subgroup(f"node-group/{topology.node_group.number}", topology.node_group.ranks)
    if not topology.group_spans_nodes:
        return Connections(topology, comm, SHARED_MEMORY)
    keys = comm.key_store("transport")
    collective = comm.begin_collective("connections", timeout_seconds=timeout_seconds)
    try:
        with ExitStack() as undo:
            with collective.step("listen"):
                transport = PeerTransport(
                    topology.write_alignment,
                    lambda rank: Address(*json.loads(keys.get(str(rank)))),
                    rank=comm.rank,
                    ranks=comm.ranks,
                    timeout_seconds=timeout_seconds,
                )
                undo.callback(transport.close)
                keys.set(str(comm.rank), json.dumps(transport.address))
            undo.pop_all()
    except CheckpointError as error:
        demote_shared(error)  # these ranks know it, others do not yet
        raise
    return Connections(topology, comm, transport)


def probe_topology(
    collective: Collective, storage: Storage, node: str, *, write_alignment: int | None
) -> Topology:
    """Collective. Find the ranks that see this rank's folder; `node` names this rank's node.

    `write_alignment` overrides the alignment of the file system. StorageError if ranks of one
    node see different folders, or if one node sees another's folder but not the reverse.
    """
    file_system = "" if isinstance(storage, ObjectStorage) else file_system_type(storage.root)
    infos = collective.all_gather_json("node", [node, file_system, write_alignment])
    topology = Topology.shared_folder(collective.rank, [name for name, _, _ in infos])
    if not topology.spans_nodes or isinstance(storage, ObjectStorage):
        return topology  # all ranks see a bucket
    first_visible = _probe_folders(collective, storage, topology)
    local_first = first_visible[collective.rank]
    group_nodes = sorted(set(first_visible))  # the first node of each node group
    ranks = tuple(rank for rank, first in enumerate(first_visible) if first == local_first)
    node_group = NodeGroup(
        group_nodes.index(local_first), len(group_nodes), ranks, collective.world
    )
    alignments = [infos[rank][2] for rank in ranks if infos[rank][2] is not None]
    if alignments:
        alignment = 0 if 0 in alignments else max(alignments)
    else:
        alignment = choose_alignment([infos[rank][1] for rank in ranks])
    return replace(topology, node_group=node_group, alignment_nbytes=alignment)


def _probe_folders(collective: Collective, storage: Storage, topology: Topology) -> list[int]:
    """Return, for each rank, the first node whose probe file it sees in its folder."""
    local_node, leaders = topology.node, topology.node_leaders
    is_leader = topology.is_node_leader
    nonce = secrets.token_hex(8).encode() if collective.rank == 0 else None
    prefix = f"{_PROBE_PREFIX}{collective.broadcast('probe-nonce', nonce).decode()}"

    def is_visible(node: int) -> bool:
        return storage.size(f"{prefix}-{node}") is not None

    try:
        with collective.step("write-probe"):
            if is_leader:
                storage.put(f"{prefix}-{local_node}", b"probe")
                storage.sync(f"{prefix}-{local_node}")  # NFS clients may see it once it is closed
        with collective.step("read-probes"):
            if not is_visible(local_node):
                raise StorageError(
                    f"{storage.root}: this rank does not see the folder that rank "
                    f"{leaders[local_node]} of its node sees; use one folder per node"
                )
            first_node = next(node for node in range(len(leaders)) if is_visible(node))
            gathered = collective.all_gather_json("first-visible", first_node)
            first_visible = [int(node) for node in gathered]
            if is_leader:
                sharing_nodes = {first_node}
                if first_node == local_node:
                    sharing_nodes = {
                        topology.nodes[rank]
                        for rank, node in enumerate(first_visible)
                        if node == first_node
                    }
                invisible = [
                    leaders[node] for node in sorted(sharing_nodes) if not is_visible(node)
                ]
                if invisible or first_visible[leaders[first_node]] != first_node:
                    other_ranks = format_ranks(invisible or [leaders[first_node]])
                    raise StorageError(
                        f"{storage.root}: rank(s) {other_ranks} and rank {collective.rank} are on "
                        "different nodes, and only one side sees the other's files; "
                        "use one folder for both, or one for each"
                    )
        return first_visible
    finally:
        if is_leader:
            with suppress(NotFoundError):
                storage.remove_file(f"{prefix}-{local_node}")

"""Probes which ranks see a folder and share a node, and connects nodes, before the first save.

Data could be lost if a folder shared by several nodes were taken for local ones, so that nodes
overwrite each other, or the reverse. So every node writes a new file and looks up those of the
others by name: a directory listing may be stale, but a name never asked for is looked up anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from unified_ckpt.core.nodes.node_groups import NodeGroup
from unified_ckpt.core.nodes.write_alignment import WriteAlignment, alignment_nbytes
from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.error_spread import narrow
from unified_ckpt.runtime.comm.topology import (
    all_gather,
    file_system_type,
    first_ranks,
    node_numbers,
)
from unified_ckpt.runtime.exchange.tcp import parse_address
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.storage.storage import LocalStorage

_PROBE_PREFIX = ".unified-probe-"


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks that see this rank's folder; `comm` connects them.

    `node_group` is None if these are all ranks. `transport` is None if they are on one node.
    """

    comm: Comm
    node_group: NodeGroup | None
    transport: PeerTransport | None

    def close(self) -> None:
        """Close the connections."""
        if self.node_group is not None:
            self.comm.detach()
        if self.transport is not None:
            self.transport.close()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """This rank's node group and the nodes of its ranks.

    `block_nbytes` is the alignment of writes to the folder, see `WriteAlignment`.
    """

    node_group: NodeGroup
    nodes: tuple[int, ...]
    block_nbytes: int


def connect_topology(comm: Comm, probe: ProbeResult, *, timeout_seconds: float) -> Topology | None:
    """Collective over all ranks, inside a step. None if all ranks are on one node."""
    node_group, spans_nodes = probe.node_group, len(set(probe.nodes)) > 1
    if node_group.count == 1 and not spans_nodes:
        return None
    group_comm = comm
    if node_group.count > 1:
        group_comm = comm.subgroup(f"node-group/{node_group.number}", node_group.ranks)
    if not spans_nodes:
        return Topology(group_comm, node_group, None)
    keys, transport = group_comm.key_store("transport"), None
    collective = group_comm.begin_collective("connections", timeout_seconds=timeout_seconds)
    try:
        with collective.step("listen"):
            transport = PeerTransport(
                WriteAlignment(probe.nodes, probe.block_nbytes),
                lambda rank: parse_address(keys.get(str(rank)).decode()),
                rank=group_comm.rank,
                ranks=group_comm.ranks,
                timeout_seconds=timeout_seconds,
            )
            keys.set(str(group_comm.rank), transport.address.encode())
    except CheckpointError as error:
        if transport is not None:
            transport.close()
        narrow(error)  # by these ranks, but not yet by all
        raise
    return Topology(group_comm, node_group if node_group.count > 1 else None, transport)


def probe_topology(
    collective: Collective, storage: LocalStorage, node: str, *, block_nbytes: int | None
) -> ProbeResult:
    """Collective. Find the ranks that see this rank's folder; `node` names this rank's node.

    `block_nbytes` overrides the write alignment of the file system. StorageError if ranks of one
    node see different folders, or if one node sees another's folder but not the reverse.
    """
    file_system = file_system_type(storage.root)
    infos = all_gather(collective, "node", [node, file_system, block_nbytes])
    nodes = node_numbers([name for name, _, _ in infos])
    if max(nodes) == 0:
        node_group = NodeGroup(0, 1, tuple(range(collective.world)), collective.world)
        return ProbeResult(node_group, tuple(nodes), 1)
    first_visible = _probe_folders(collective, storage, nodes)
    local_first = first_visible[collective.rank]
    group_nodes = sorted(set(first_visible))  # the first node of each node group
    ranks = tuple(rank for rank, first in enumerate(first_visible) if first == local_first)
    node_group = NodeGroup(
        group_nodes.index(local_first), len(group_nodes), ranks, collective.world
    )
    blocks = [infos[rank][2] for rank in ranks if infos[rank][2] is not None]
    if blocks:
        alignment = 0 if 0 in blocks else max(blocks)
    else:
        alignment = alignment_nbytes([infos[rank][1] for rank in ranks])
    return ProbeResult(node_group, tuple(nodes[rank] for rank in ranks), alignment)


def _probe_folders(
    collective: Collective, storage: LocalStorage, nodes: Sequence[int]
) -> list[int]:
    """Return, for each rank, the first node whose probe file it sees in its folder."""
    local_node, leaders = nodes[collective.rank], first_ranks(nodes)
    is_leader = collective.rank == leaders[local_node]
    new_token = secrets.token_hex(8).encode() if collective.rank == 0 else None
    prefix = f"{_PROBE_PREFIX}{collective.broadcast('token', new_token).decode()}"

    def is_visible(node: int) -> bool:
        return storage.size(f"{prefix}-{node}") is not None

    try:
        with collective.step("write-probe"):
            if is_leader:
                storage.put(f"{prefix}-{local_node}", b"probe", fsync=True)
        with collective.step("read-probes"):
            if not is_visible(local_node):
                raise StorageError(
                    f"{storage.root}: this rank does not see the folder that rank "
                    f"{leaders[local_node]} of its node sees; use one folder per node"
                )
            first_node = next(node for node in range(len(leaders)) if is_visible(node))
            gathered = all_gather(collective, "first-visible", first_node)
            first_visible = [int(node) for node in gathered]
            if is_leader:
                sharing_nodes = {first_node}
                if first_node == local_node:
                    sharing_nodes = {
                        nodes[rank] for rank, node in enumerate(first_visible) if node == first_node
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

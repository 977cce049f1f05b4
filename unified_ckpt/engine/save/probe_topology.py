"""Before the first save to a folder: which ranks see it, which of them share a machine, and how
they talk to each other.

How data could be lost: a folder that several machines see is taken for each one's own, and they
write over each other; one that they do not share is taken for shared. So every machine leaves a
fresh file there, and looks for those of the others by name: a list of a folder may be an old one, a
name that nobody has asked for is looked up anew.
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
    """The ranks that see this rank's folder. `comm`: their own way to talk; `node_group`: None
    where they are all ranks; `transport`: None where they are on one machine.
    """

    comm: Comm
    node_group: NodeGroup | None
    transport: PeerTransport | None

    def close(self) -> None:
        if self.node_group is not None:
            self.comm.detach()
        if self.transport is not None:
            self.transport.close()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`node_group`: this rank's; `nodes`: of its ranks; `block_nbytes`: of the folder, see
    `Volume`.
    """

    node_group: NodeGroup
    nodes: tuple[int, ...]
    block_nbytes: int


def connect_topology(comm: Comm, probe: ProbeResult, *, timeout_seconds: float) -> Topology | None:
    """Collective over all ranks, inside a phase of theirs. None where all are on one machine."""
    node_group, spans_nodes = probe.node_group, len(set(probe.nodes)) > 1
    if node_group.count == 1 and not spans_nodes:
        return None
    group_comm = (
        comm
        if node_group.count == 1
        else comm.subgroup(f"island/{node_group.number}", node_group.ranks)
    )
    if not spans_nodes:
        return Topology(group_comm, node_group, None)
    keys, collective, transport = (
        group_comm.key_store("post"),
        group_comm.begin_collective("connections", cached=False, timeout_seconds=timeout_seconds),
        None,
    )
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
        narrow(error)
        raise
    return Topology(group_comm, node_group if node_group.count > 1 else None, transport)


def probe_topology(
    collective: Collective, storage: LocalStorage, node: str, *, block_nbytes: int | None
) -> ProbeResult:
    """Collective. Which ranks see this rank's folder. `block_nbytes`: None to go by the kind of
    file system.

    StorageError where ranks of one machine see different folders, or a machine sees another's and
    not the reverse.
    """
    node_infos = all_gather(
        collective, "machine", [node, file_system_type(storage.root), block_nbytes]
    )
    nodes = node_numbers([name for name, _, _ in node_infos])
    if max(nodes) == 0:
        return ProbeResult(
            NodeGroup(0, 1, tuple(range(collective.world)), collective.world), tuple(nodes), 1
        )
    first_visible = _probe_folders(collective, storage, nodes)
    group_numbers = {
        leader_node: index for index, leader_node in enumerate(sorted(set(first_visible)))
    }
    ranks = tuple(
        rank
        for rank, leader_node in enumerate(first_visible)
        if leader_node == first_visible[collective.rank]
    )
    node_group = NodeGroup(
        group_numbers[first_visible[collective.rank]], len(group_numbers), ranks, collective.world
    )
    requested_blocks = [node_infos[rank][2] for rank in ranks if node_infos[rank][2] is not None]
    filesystems = [node_infos[rank][1] for rank in ranks]
    return ProbeResult(
        node_group,
        tuple(nodes[rank] for rank in ranks),
        _strictest_block(requested_blocks) if requested_blocks else alignment_nbytes(filesystems),
    )


def _strictest_block(blocks: Sequence[int]) -> int:
    return 0 if 0 in blocks else max(blocks)


def _probe_folders(
    collective: Collective, storage: LocalStorage, nodes: Sequence[int]
) -> list[int]:
    """For each rank the first machine whose file it sees in its folder."""
    local_node, leaders = nodes[collective.rank], first_ranks(nodes)
    token = collective.broadcast(
        "token", secrets.token_hex(8).encode() if collective.rank == 0 else None
    ).decode()

    def is_visible(node: int) -> bool:
        return storage.size(f"{_PROBE_PREFIX}{token}-{node}") is not None

    try:
        with collective.step("probe"):
            if collective.rank == leaders[local_node]:
                storage.put(f"{_PROBE_PREFIX}{token}-{local_node}", b"probe", fsync=True)
        with collective.step("look"):
            if not is_visible(local_node):
                raise StorageError(
                    f"{storage.root}: this rank does not see the folder that rank {leaders[local_node]} of its machine sees"
                )
            first_node = next(node for node in range(len(leaders)) if is_visible(node))
            first_visible = [int(encoded) for encoded in all_gather(collective, "seen", first_node)]
            if collective.rank == leaders[local_node]:
                peer_nodes = (
                    {
                        nodes[rank]
                        for rank, rank_first in enumerate(first_visible)
                        if rank_first == first_node
                    }
                    if first_node == local_node
                    else {first_node}
                )
                if first_visible[leaders[first_node]] != first_node or not all(
                    is_visible(node) for node in peer_nodes
                ):
                    blind_ranks = [
                        leaders[node] for node in sorted(peer_nodes) if not is_visible(node)
                    ] or [leaders[first_node]]
                    raise StorageError(
                        f"{storage.root}: rank(s) {format_ranks(blind_ranks)} and rank {collective.rank} are on different machines, and only one side sees "
                        "the other's files; needed one folder for both, or one for each"
                    )
        return first_visible
    finally:
        if collective.rank == leaders[local_node]:
            with suppress(NotFoundError):
                storage.remove_file(f"{_PROBE_PREFIX}{token}-{local_node}")

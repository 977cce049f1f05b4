"""Knows which ranks share a node and a folder, file system types, and free host memory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.nodes.node_groups import NodeGroup
from unified_ckpt.core.nodes.write_alignment import ANY_BYTE, WriteAlignment
from unified_ckpt.errors import StorageError

if TYPE_CHECKING:
    from unified_ckpt.runtime.comm.comm import Comm


@dataclass(frozen=True, slots=True)
class Topology:
    """Which ranks of a process group share memory and folders, as `rank` sees it.

    One process is one node and one node group. `nodes`: the node of each rank, numbered from 0 in
    the order of their first ranks. `node_group`: the ranks that see this rank's folder, which are
    all unless a folder was probed. `alignment_nbytes`: of its files, as in `WriteAlignment`.
    """

    rank: int
    nodes: tuple[int, ...]
    node_group: NodeGroup
    alignment_nbytes: int = ANY_BYTE

    @staticmethod
    def shared_folder(rank: int, node_ids: Sequence[object]) -> Topology:
        """Return the topology of ranks that all see one folder, from the node id of each rank."""
        numbers = {node_id: number for number, node_id in enumerate(dict.fromkeys(node_ids))}
        world = len(node_ids)
        node_group = NodeGroup(0, 1, tuple(range(world)), world)
        return Topology(rank, tuple(numbers[node_id] for node_id in node_ids), node_group)

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.nodes[self.rank]

    @property
    def node_leaders(self) -> tuple[int, ...]:
        """The first rank of each node."""
        return tuple(ranks[0] for ranks in self.ranks_by_node)

    @property
    def local_world(self) -> int:
        """The number of ranks on the node of this rank."""
        return self.nodes.count(self.node)

    @property
    def ranks_by_node(self) -> list[list[int]]:
        """The ranks of each node."""
        return list(group_by_value(enumerate(self.nodes)).values())

    @property
    def is_node_leader(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.nodes.index(self.node) == self.rank

    @property
    def spans_nodes(self) -> bool:
        """Whether the ranks are on several nodes."""
        return max(self.nodes) > 0

    @property
    def group_spans_nodes(self) -> bool:
        """Whether the ranks that see this rank's folder are on several nodes."""
        return any(self.nodes[rank] != self.node for rank in self.node_group.ranks)

    @property
    def write_alignment(self) -> WriteAlignment:
        """The write rule of this rank's folder. Ranks in it are those within the node group."""
        nodes = tuple(self.nodes[rank] for rank in self.node_group.ranks)
        return WriteAlignment(nodes, self.alignment_nbytes)


def gather_topology(
    comm: Comm,
    operation: str,
    *,
    node: str | None = None,
    timeout_seconds: float,
    failure: Exception | None = None,
) -> Topology:
    """Return the topology of ranks that see one folder. Collective, unless there is one rank.

    `node`: the name of this rank's node, or None for the kernel's identity. `failure`: this rank's
    error before the operation, for all ranks.
    """
    node_ids: Sequence[object] = [node]
    if comm.world > 1:
        collective = comm.begin_collective(operation, timeout_seconds=timeout_seconds)
        with collective.step("nodes"):
            if failure is not None:
                raise failure
            node_ids = collective.all_gather_json("node", node or node_id())
    elif failure is not None:
        raise failure
    return Topology.shared_folder(comm.rank, node_ids)


def node_id() -> str:
    """Return an id that is equal for processes under one kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        raise StorageError(
            f"/proc/sys/kernel/random/boot_id: {error.strerror}; mount /proc to identify the node"
        ) from error


def file_system_type(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """Return the kernel's name of a folder's file system type, or "unknown"."""
    longest, fs_type = -1, "unknown"
    real = os.path.realpath(path)
    try:
        with open(mountinfo, "rb") as file:
            for line in file:
                mount_fields, _, fs_fields = line.partition(b" - ")
                # A space is written as \\040.
                mount_point = os.fsdecode(
                    re.sub(
                        rb"\\([0-7]{3})",
                        lambda digits: bytes([int(digits[1], 8)]),
                        mount_fields.split()[4],
                    )
                )
                contains = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
                if contains and len(mount_point) >= longest:  # the last of equal ones is on top
                    longest, fs_type = len(mount_point), fs_fields.split()[0].decode()
    except OSError:
        pass  # no /proc: unknown
    return fs_type


def free_memory_nbytes() -> int | None:
    """Return how many bytes this process may still allocate, or None if unknown.

    The limit is that of the node or of its container, whichever is lower.
    """
    limits = []
    try:
        with open("/proc/meminfo") as file:
            limits += [
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")
            ]
    except OSError:
        pass  # no /proc: unknown
    cgroup = "/sys/fs/cgroup/memory"
    try:
        with (
            open(f"{cgroup}.max") as limit,
            open(f"{cgroup}.current") as used,
            open(f"{cgroup}.stat") as stat,
        ):
            # Page cache, which the kernel frees on demand.
            cached = sum(int(line.split()[1]) for line in stat if line.startswith("file "))
            limits.append(max(int(limit.read()) - int(used.read()) + cached, 0))
    except (OSError, ValueError):
        pass  # no container, or one whose limit is "max"
    return min(limits, default=None)

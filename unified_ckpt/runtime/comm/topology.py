"""Knows which ranks share a node (the same boot id), file system types, and free host memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.comm.collective import Collective


def node_id() -> str:
    """Return an id that is equal for processes under one kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        raise StorageError(
            f"/proc/sys/kernel/random/boot_id: {error.strerror}; mount /proc to identify the node"
        ) from error


def file_system_type(path: str) -> str:
    """Return the kernel's name of a folder's file system type, or "unknown"."""
    longest, fs_type = -1, "unknown"
    real = os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo") as file:
            for line in file:
                mount_fields, _, fs_fields = line.partition(" - ")
                # A space is written as \\040.
                mount_point = mount_fields.split()[4].encode().decode("unicode_escape")
                contains = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
                if contains and len(mount_point) >= longest:  # the last of equal ones is on top
                    longest, fs_type = len(mount_point), fs_fields.split()[0]
    except OSError:
        pass  # no /proc: unknown
    return fs_type


def node_numbers(node_ids: Sequence[str]) -> list[int]:
    """Return the node number of each rank, from each rank's node id.

    Nodes are numbered from 0 in the order of their first ranks.
    """
    numbers = {node: number for number, node in enumerate(dict.fromkeys(node_ids))}
    return [numbers[node] for node in node_ids]


def first_ranks(nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the first rank of each node, from the node number of each rank."""
    rank_by_node: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        rank_by_node.setdefault(node, rank)
    return tuple(rank_by_node[node] for node in sorted(rank_by_node))


def all_gather(collective: Collective, key: str, value: object) -> list[Any]:
    """Return the JSON values of all ranks, on every rank. Collective; they pass through rank 0."""
    encoded = collective.collect(
        key, json.dumps(value).encode(), dst=0, ranks=range(collective.world)
    )
    values = [json.loads(text) for text in encoded]
    body = json.dumps(values).encode() if collective.rank == 0 else None
    return list(json.loads(collective.broadcast(f"{key}-all", body)))


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

"""What the machine is: which ranks share it (the same boot id: one kernel), and how much of its
memory is free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.comm.collective import Collective


def node_id() -> str:
    """Equal for processes under one kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        raise StorageError(
            f"/proc/sys/kernel/random/boot_id: {error.strerror}; needed a Linux /proc to tell machines apart"
        ) from error


def file_system_type(path: str) -> str:
    """The kernel's name for the type of the file system that a folder is on; "unknown" where it
    does not say.
    """
    longest, fs_type = -1, "unknown"
    real = os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo") as file:
            for line in file:
                mount_fields, _, fs_fields = line.partition(" - ")
                mount_point = (
                    mount_fields.split()[4].encode().decode("unicode_escape")
                )  # a space is \\040
                if len(mount_point) >= longest and (
                    real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
                ):
                    longest, fs_type = (
                        len(mount_point),
                        fs_fields.split()[0],
                    )  # of several at one place the last is on top
    except OSError:
        pass  # no /proc: nobody says
    return fs_type


def node_numbers(node_ids: Sequence[str]) -> list[int]:
    """The machine of each rank, by the name that each rank gives its own; counted from 0 in the
    order of their first ranks.
    """
    numbers = {node: number for number, node in enumerate(dict.fromkeys(node_ids))}
    return [numbers[node] for node in node_ids]


def first_ranks(nodes: Sequence[int]) -> tuple[int, ...]:
    """The first rank of each machine, by the machine of each rank."""
    rank_by_node: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        rank_by_node.setdefault(node, rank)
    return tuple(rank_by_node[node] for node in sorted(rank_by_node))


# of what JSON makes of the values
def all_gather(collective: Collective, key: str, value: object) -> list:  # type: ignore[type-arg]
    """Collective. What each rank says, on every rank; sent through rank 0."""
    encoded = collective.collect(
        key, json.dumps(value).encode(), dst=0, ranks=range(collective.world)
    )
    body = (
        json.dumps([json.loads(text) for text in encoded]).encode()
        if collective.rank == 0
        else None
    )
    return list(json.loads(collective.broadcast(f"{key}-of-all", body)))


def free_memory_nbytes() -> int | None:
    """Bytes that this process may still take: the machine's, or its container's where that is less.
    None where nobody says.
    """
    limits = []
    try:
        with open("/proc/meminfo") as file:
            limits += [
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")
            ]
    except OSError:
        pass  # no such file: nobody says
    cgroup = "/sys/fs/cgroup/memory"
    try:
        with (
            open(f"{cgroup}.max") as limit,
            open(f"{cgroup}.current") as used,
            open(f"{cgroup}.stat") as stat,
        ):
            cached = sum(
                int(line.split()[1]) for line in stat if line.startswith("file ")
            )  # the kernel gives it back when asked
            limits.append(max(int(limit.read()) - int(used.read()) + cached, 0))
    except (OSError, ValueError):
        pass  # no container, or one without a limit ("max")
    return min(limits, default=None)

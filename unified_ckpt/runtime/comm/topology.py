"""What the machine is: which ranks share it (the same boot id: one kernel), and how much of its memory is free."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.comm.collective import Meeting


def machine_id() -> str:
    """Equal for processes under one kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        raise StorageError(
            f"/proc/sys/kernel/random/boot_id: {error.strerror}; needed a Linux /proc to tell machines apart"
        ) from error


def file_system(path: str) -> str:
    """The kernel's name for the type of the file system that a folder is on; "unknown" where it does not say."""
    best, found = -1, "unknown"
    real = os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                point = before.split()[4].encode().decode("unicode_escape")  # a space is \\040
                if len(point) >= best and (
                    real == point or real.startswith(point.rstrip("/") + "/")
                ):
                    best, found = (
                        len(point),
                        after.split()[0],
                    )  # of several at one place the last is on top
    except OSError:
        pass  # no /proc: nobody says
    return found


def numbered(machines: Sequence[str]) -> list[int]:
    """The machine of each rank, by the name that each rank gives its own; counted from 0 in the order of their first ranks."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(machines))}
    return [numbers[name] for name in machines]


def first_ranks(machines: Sequence[int]) -> tuple[int, ...]:
    """The first rank of each machine, by the machine of each rank."""
    firsts: dict[int, int] = {}
    for rank, machine in enumerate(machines):
        firsts.setdefault(machine, rank)
    return tuple(firsts[machine] for machine in sorted(firsts))


def everybody(meeting: Meeting, key: str, value: object) -> list:  # type: ignore[type-arg]  # of what JSON makes of the values
    """Collective. What each rank says, on every rank; sent through rank 0."""
    told = meeting.collect(key, json.dumps(value).encode(), at=0, ranks=range(meeting.world))
    body = json.dumps([json.loads(one) for one in told]).encode() if meeting.rank == 0 else None
    return list(json.loads(meeting.broadcast(f"{key}-of-all", body)))


def free_memory_nbytes() -> int | None:
    """Bytes that this process may still take: the machine's, or its container's where that is less. None where nobody says."""
    found = []
    try:
        with open("/proc/meminfo") as file:
            found += [
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")
            ]
    except OSError:
        pass  # no such file: nobody says
    group = "/sys/fs/cgroup/memory"
    try:
        with (
            open(f"{group}.max") as limit,
            open(f"{group}.current") as used,
            open(f"{group}.stat") as stat,
        ):
            cached = sum(
                int(line.split()[1]) for line in stat if line.startswith("file ")
            )  # the kernel gives it back when asked
            found.append(max(int(limit.read()) - int(used.read()) + cached, 0))
    except (OSError, ValueError):
        pass  # no container, or one without a limit ("max")
    return min(found, default=None)

"""What the machine is: which ranks share it (the same boot id: one kernel), and how much of its memory is free."""

from __future__ import annotations

import os

from unified_ckpt.core.tables import short
from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.comm import Meeting


def machine_id() -> str:
    """Equal for processes under one kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        raise StorageError(f"/proc/sys/kernel/random/boot_id: {error.strerror}; needed a Linux /proc to tell machines apart") from error


def file_system(path: str) -> str:
    """The kernel's name for the type of the file system that a folder is on; "unknown" where it does not say."""
    best, found = -1, "unknown"
    real = os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                point = before.split()[4].encode().decode("unicode_escape")  # a space is \\040
                if len(point) >= best and (real == point or real.startswith(point.rstrip("/") + "/")):
                    best, found = len(point), after.split()[0]  # of several at one place the last is on top
    except OSError:
        pass  # no /proc: nobody says
    return found


def check_one_machine(meeting: Meeting) -> None:
    """Collective. StorageError on rank 0, naming the ranks that are elsewhere, unless all ranks are on one machine."""
    told = meeting.collect("machine", machine_id().encode(), at=0, ranks=range(meeting.world))
    elsewhere = [rank for rank, machine in enumerate(told) if machine != told[0]]
    if elsewhere:
        raise StorageError(
            f"rank(s) {short(elsewhere)} are on another machine than rank 0; this version saves and loads from the ranks of one machine"
        )


def free_memory_nbytes() -> int | None:
    """Bytes that this process may still take: the machine's, or its container's where that is less. None where nobody says."""
    found = []
    try:
        with open("/proc/meminfo") as file:
            found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        pass  # no such file: nobody says
    group = "/sys/fs/cgroup/memory"
    try:
        with open(f"{group}.max") as limit, open(f"{group}.current") as used, open(f"{group}.stat") as stat:
            cached = sum(int(line.split()[1]) for line in stat if line.startswith("file "))  # the kernel gives it back when asked
            found.append(max(int(limit.read()) - int(used.read()) + cached, 0))
    except (OSError, ValueError):
        pass  # no container, or one without a limit ("max")
    return min(found, default=None)

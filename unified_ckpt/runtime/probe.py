"""Which ranks share a machine. A machine is what shares a kernel: the same boot id."""

from __future__ import annotations

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


def check_one_machine(meeting: Meeting) -> None:
    """Collective. StorageError on rank 0, naming the ranks that are elsewhere, unless all ranks are on one machine."""
    told = meeting.collect("machine", machine_id().encode(), at=0, ranks=range(meeting.world))
    elsewhere = [rank for rank, machine in enumerate(told) if machine != told[0]]
    if elsewhere:
        raise StorageError(
            f"rank(s) {short(elsewhere)} are on another machine than rank 0; this version saves and loads from the ranks of one machine"
        )

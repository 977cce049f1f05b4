from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime import probe
from unified_ckpt.runtime.comm import Meeting


def check(machines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 last, as it alone waits; rank r is on machine `machines[r]`."""
    store = dist.HashStore()
    for rank in reversed(range(len(machines))):
        monkeypatch.setattr(probe, "machine_id", lambda rank=rank: machines[rank])
        probe.check_one_machine(Meeting(store, 0, rank=rank, ranks=range(len(machines)), timeout_seconds=5))


def test_a_machine_is_a_kernel() -> None:
    assert probe.machine_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_ranks_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    check(["a"], monkeypatch)
    check(["a", "a", "a"], monkeypatch)


def test_ranks_elsewhere_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"^rank\(s\) 1, 3-4 are on another machine than rank 0; this version saves and loads from"):
        check(["a", "b", "a", "b", "c"], monkeypatch)

from __future__ import annotations

from pathlib import Path

from unified_ckpt.runtime.comm import topology
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import run_ranks


def test_node_id_is_the_boot_id() -> None:
    assert topology.node_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_nodes_are_numbered_by_their_first_ranks() -> None:
    assert topology.node_numbers(["b", "a", "b", "c", "a"]) == [0, 1, 0, 2, 1]
    assert topology.first_ranks([0, 1, 0, 2, 1]) == (0, 1, 3)
    assert topology.first_ranks([1, 0, 0]) == (1, 0), "by node"
    assert topology.first_ranks([0]) == (0,)


def test_all_gather_returns_all_values() -> None:
    def act(comm: Comm) -> list[object]:
        collective = comm.begin_collective("talk", cached=False, timeout_seconds=5)
        with collective.step("talk"):
            return topology.all_gather(collective, "word", ["é", comm.rank, None])

    assert run_ranks(3, act) == [[["é", rank, None] for rank in range(3)]] * 3

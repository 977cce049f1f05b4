"""Measure what nodes gain when they read a shared folder for each other.

Run: PYTHONPATH=. python benchmarks/bench_shared_reads.py [--nodes 2,4] [--nbytes 134217728]
[--rate 200e6] [--out FILE].

Replicas on several nodes load from one throttled volume. Nodes are threads with a name of their
own. The volume serves `rate` bytes a second to all of them together; a node that has read a block
has it in its page cache. Bytes between nodes go through TCP on the loopback device. One JSON line
for each number of nodes and way: `never` (each node reads all), `always` (one node reads each
block). Seconds: median of `--rounds`; the ways alternate within a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common import write_rows

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage

WAYS = ("never", "always")


class Volume:
    """Serves the reads of all nodes at one common rate."""

    def __init__(self, rate: float) -> None:
        self.rate, self.nbytes = rate, 0
        self._seen: set[tuple[str, str, int]] = set()
        self._free_at, self._lock = 0.0, threading.Lock()
        self._read, self._make = LocalStorage.read_at, LocalStorage.__init__

    def install(self) -> None:
        volume = self

        def init(storage: LocalStorage, root: str, **more: Any) -> None:
            volume._make(storage, root, **more)
            # the rank's thread also creates what it serves
            storage.node = threading.current_thread().name  # type: ignore[attr-defined]

        def read_at(storage: LocalStorage, name: str, start: int, into: Buffer) -> None:
            blocks = {
                (storage.node, name, block)
                for block in range(start >> 20, -(-(start + len(into)) >> 20))
            }  # type: ignore[attr-defined]
            with volume._lock:
                fresh = min(len(blocks - volume._seen) << 20, len(into))
                volume._seen |= blocks
                volume.nbytes += fresh
                volume._free_at = max(volume._free_at, time.monotonic()) + fresh / volume.rate
                until = volume._free_at
            if fresh:
                time.sleep(max(until - time.monotonic(), 0.0))
            volume._read(storage, name, start, into)

        LocalStorage.__init__, LocalStorage.read_at = init, read_at  # type: ignore[method-assign]

    def forget(self) -> None:
        self._seen, self.nbytes = set(), 0


def load(folder: Path, nodes: int, state: dict[str, torch.Tensor], share_reads: str) -> float:
    """Return the seconds until the last rank has loaded."""

    def act(comm: Comm) -> float:
        checkpointer = make_checkpointer(comm)
        checkpointer.session.node = f"node {comm.rank}"
        target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        with checkpointer:
            began = time.perf_counter()
            checkpointer.load(folder, model=target, options=uc.LoadOptions(share_reads=share_reads))  # type: ignore[arg-type]
            seconds = time.perf_counter() - began
        assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
        return seconds

    return max(run_ranks(nodes, act, timeout_seconds=600))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", default="2,4")
    parser.add_argument("--nbytes", type=int, default=128 << 20)
    parser.add_argument("--rate", type=float, default=200e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    state = {f"w{i}": torch.randn(arguments.nbytes // 16 // 4) for i in range(16)}
    with tempfile.TemporaryDirectory() as root:
        uc.save(Path(root) / "checkpoint", model=state, options=uc.SaveOptions(fsync=False))
        volume = Volume(arguments.rate)
        volume.install()
        for nodes in map(int, arguments.nodes.split(",")):
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            nbytes = dict.fromkeys(WAYS, 0)
            for _ in range(arguments.rounds):
                for way in WAYS:
                    volume.forget()
                    seconds[way].append(load(Path(root) / "checkpoint", nodes, state, way))
                    nbytes[way] = volume.nbytes
            for way in WAYS:
                row = {
                    "bench": "shared_reads",
                    "nodes": nodes,
                    "way": way,
                    "nbytes": arguments.nbytes,
                    "rate": arguments.rate,
                    "read_from_volume": nbytes[way],
                    "seconds": round(statistics.median(seconds[way]), 3),
                    "min": round(min(seconds[way]), 3),
                    "max": round(max(seconds[way]), 3),
                    "n": arguments.rounds,
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                write_rows([row], arguments.out)


if __name__ == "__main__":
    main()

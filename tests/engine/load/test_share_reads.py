"""Nodes that load the same bytes of one folder: one reads each block and serves the others."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.simulated_nodes import LOAD, NAME, SAVE, on_node
from tests.support.harness import run_ranks
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.cluster import inventory
from unified_ckpt.engine.cluster.storage import ShardReader
from unified_ckpt.engine.load.share_reads import read_redundancy
from unified_ckpt.engine.plan.holders import Declarations
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage

FULL = {
    "w": torch.arange(3_000_000, dtype=torch.float32).reshape(3000, 1000),
    "b": torch.arange(7.0),
}


class Reads:
    """The nodes that read each block of the model's file from the volume.

    Repeated reads by one node count once, because a node caches what it has read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: list[int]) -> None:
        self.nodes: dict[int, set[int]] = {}
        lock, read, make = threading.Lock(), LocalStorage.read_at, LocalStorage.__init__

        def init(storage: LocalStorage, root: str, **options: Any) -> None:
            make(storage, root, **options)
            # "rank-2": reads for itself or for other ranks
            storage.reader = threading.current_thread().name  # type: ignore[attr-defined]

        def read_at(storage: LocalStorage, name: str, start: int, into: Buffer) -> None:
            if name.startswith("model") and len(into) > 64 << 10:  # no header
                with lock:
                    rank = int(storage.reader.removeprefix("rank-"))  # type: ignore[attr-defined]
                    for block in range(start >> 20, (start + len(into)) >> 20):
                        self.nodes.setdefault(block, set()).add(nodes[rank])
            read(storage, name, start, into)

        monkeypatch.setattr(LocalStorage, "__init__", init)
        monkeypatch.setattr(LocalStorage, "read_at", read_at)

    @property
    def nodes_per_block(self) -> float:
        return sum(map(len, self.nodes.values())) / len(self.nodes)


def load(
    root: Path, nodes: list[int], *, layout: uc.Layout | None = None, **options: object
) -> None:
    def act(comm: Comm) -> None:
        target = {name: torch.zeros_like(tensor) for name, tensor in FULL.items()}
        if layout is not None:
            target["w"] = torch.zeros_like(FULL["w"].chunk(comm.world)[comm.rank])
        with on_node(comm, nodes) as checkpointer:
            checkpointer.load(
                root / NAME, model=target, layout=layout, options=LOAD.model_copy(update=options)
            )
        assert torch.equal(
            target["w"], FULL["w"] if layout is None else FULL["w"].chunk(comm.world)[comm.rank]
        )
        assert torch.equal(target["b"], FULL["b"])

    run_ranks(len(nodes), act)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    uc.save(tmp_path / NAME, model=FULL, options=SAVE)
    return tmp_path


@pytest.mark.parametrize(
    ("nodes", "file_system", "share_reads", "expected"),
    [
        ([0, 1, 2], "nfs4", "auto", 1),
        ([0, 0, 1, 1], "nfs4", "auto", 1),
        ([0, 1, 2], "nfs4", "never", 3),
        ([0, 1, 2], "ext4", "auto", 3),
        ([0, 1, 2], "ext4", "always", 1),
    ],
)
def test_replicas_on_a_slow_file_system_read_each_byte_once(
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[int],
    file_system: str,
    share_reads: str,
    expected: int,
) -> None:
    reads = Reads(monkeypatch, nodes)
    monkeypatch.setattr(inventory, "file_system_type", lambda _: file_system)
    load(saved, nodes, share_reads=share_reads)
    assert reads.nodes_per_block == expected
    assert set().union(*reads.nodes.values()) == set(nodes), "every node reads a share"


def test_nodes_that_read_different_bytes_share_nothing(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "file_system_type", lambda _: "nfs4")
    co_readers: list[Mapping[int, Sequence[int]]] = []
    real = ShardReader._co_readers

    def recorded(reader: ShardReader) -> Mapping[int, Sequence[int]]:
        co_readers.append(real(reader))
        return co_readers[-1]

    monkeypatch.setattr(ShardReader, "_co_readers", recorded)
    load(saved, [0, 1, 2], layout=uc.Layout(mesh={"dp": 3}, rules={"w": {"dp": 0}}))
    assert co_readers
    assert not any(co_readers)


def test_damage_read_by_one_node_raises_on_all(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes read the same file, so no node has an intact copy: every rank raises."""
    monkeypatch.setattr(inventory, "file_system_type", lambda _: "nfs4")
    (file,) = (saved / NAME).glob("model*.safetensors")
    flip(file, -1)
    with pytest.raises(uc.IntegrityError, match="no node has these bytes intact"):
        load(saved, [0, 1])


def test_read_redundancy() -> None:
    spec = TensorSpec("F32", (8, 4))
    rows = TensorDecl(
        "model", "w", spec, Sharding((ShardDim(0, 2, 2),))
    )  # mesh [2, 2]: rows over the first dim, replicas over the second
    declarations = Declarations({0: [rows]}, {0: [0, 1, 2, 3]})
    assert read_redundancy(declarations, [0, 0, 1, 1]) == pytest.approx(1.0), (
        "replicas inside a node"
    )
    assert read_redundancy(declarations, [0, 1, 0, 1]) == pytest.approx(2.0), "a copy on each node"
    assert read_redundancy(declarations, [0, 1, 2, 3]) == pytest.approx(2.0)

"""Opening a checkpoint on all ranks: an error of one rank reaches the others at once."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import NAME, SAVE, on_node
from tests.support.harness import make_checkpointer, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.runtime.comm import topology
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import node_id

SECONDS = 30.0


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("failing", [0, 2])
def test_unknown_format_on_one_rank(tmp_path: Path, nodes: list[int], failing: int) -> None:
    """Detecting the format comes before the first collective of a load on one node."""
    uc.save(tmp_path / NAME, model={"w": torch.ones(4)}, options=SAVE)
    targets = [torch.zeros(4) for _ in nodes]

    def act(comm: Comm) -> None:
        format_name = "parquet" if comm.rank == failing else None
        options = uc.LoadOptions(
            timeout_seconds=SECONDS, source=uc.SourceOptions(format=format_name)
        )
        with on_node(comm, nodes) as checkpointer:
            checkpointer.load(tmp_path / NAME, model={"w": targets[comm.rank]}, options=options)

    started = time.monotonic()
    errors = try_ranks(len(nodes), act)
    assert time.monotonic() - started < SECONDS / 2
    same_error(errors, uc.FormatError, f"rank {failing}: format: got 'parquet', expected one")
    assert not any(target.any() for target in targets)


def test_unknown_node_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 runs without /proc."""
    uc.save(tmp_path / NAME, model={"w": torch.ones(4)}, options=SAVE)

    def failing_node_id() -> str:
        if threading.current_thread().name == "rank-1":
            raise uc.StorageError("no /proc")
        return node_id()

    def act(comm: Comm) -> None:
        options = uc.LoadOptions(timeout_seconds=SECONDS)
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / NAME, model={"w": torch.zeros(4)}, options=options)

    monkeypatch.setattr(topology, "node_id", failing_node_id)
    started = time.monotonic()
    same_error(try_ranks(2, act), uc.StorageError, "rank 1: no /proc")
    assert time.monotonic() - started < SECONDS / 2


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_shortage_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A restore would take a FormatError for a damaged step, and go back to an older one."""
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    opened = os.open

    def fail(path: str, *arguments: int, **keywords: int) -> int:
        if str(path).endswith("a.pt"):
            raise OSError(code, os.strerror(code), path)
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        uc.open(tmp_path / "a.pt")
    assert not isinstance(caught.value, uc.CheckpointError)

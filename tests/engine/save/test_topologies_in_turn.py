"""One Checkpointer that saves to its node's own folder and to one that all nodes share, in
turn: what is kept of the one save, for the next of the same ranks, means nothing to the other.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.simulated_nodes import LOAD, NAME, SAVE, folder_of, on_node
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.shared_memory import TileBuffer
from unified_ckpt.testing import run_ranks

NODES = [0, 0, 1, 1]
FULL = torch.arange(400_000.0).reshape(1000, 400)
LAYOUT = uc.Layout(
    mesh={"rep": 2, "dp": 2}, rules={"w": {"dp": 1}}, shapes={"w": (1000, 400)}
)  # tiles, within each node too
OPTIONS = SAVE.model_copy(
    update={"timeout_seconds": 10.0, "write_alignment": 4096, "if_exists": "replace"}
)


def place(root: Path, rank: int, shared: bool) -> Path:
    return root / "shared" / NAME if shared else folder_of(root, NODES[rank])


def mine(rank: int, step: int) -> torch.Tensor:
    return (FULL + step).chunk(2, 1)[rank % 2].clone()


def save_in_turn(root: Path, turns: list[bool]) -> None:
    """Each save is read back by its own ranks. `turns`: whether the folder is the shared one."""

    def act(comm: Comm) -> None:
        with on_node(comm, NODES) as made:
            for step, shared in enumerate(turns):
                path = place(root, comm.rank, shared)
                made.save(
                    path,
                    model={"w": mine(comm.rank, step)},
                    layout=LAYOUT,
                    step=step,
                    options=OPTIONS,
                )
                target = {"w": torch.zeros(1000, 200)}
                assert made.load(path, model=target, layout=LAYOUT, options=LOAD).step == step
                assert torch.equal(target["w"], mine(comm.rank, step)), (step, shared)
            assert uc.verify(path, deep=True).ok

    run_ranks(4, act)


@pytest.mark.parametrize("turns", ["isisis", "siiiss", "ssssi", "iiiis"])
def test_alternating_topologies(tmp_path: Path, turns: str) -> None:
    save_in_turn(tmp_path, [turn == "s" for turn in turns])


@pytest.mark.parametrize("turns", ["ssssi", "iiiis"])
def test_exchange_numbers_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: str
) -> None:
    """A rank that is late to serve its window is waited for, whatever the window's last exchange
    was.
    """
    serve, late = TileBuffer.open_for, [0]

    def serve_late(window: TileBuffer, exchange: int) -> None:
        if threading.current_thread().name in ("rank-1", "rank-3"):
            late[0] += 1
            time.sleep(0.3)
        serve(window, exchange)

    monkeypatch.setattr(TileBuffer, "open_for", serve_late)
    save_in_turn(tmp_path, [turn == "s" for turn in turns])
    assert late[0] > len(turns)


def test_plan_after_a_failed_save_of_other_ranks(tmp_path: Path) -> None:
    """A save to the shared folder is refused before anything is planned; the next one is planned
    for all ranks, not for a node's.
    """

    def act(comm: Comm) -> None:
        what = {
            "model": {"w": mine(comm.rank, 1)},
            "layout": LAYOUT,
            "options": OPTIONS.model_copy(update={"if_exists": "error"}),
        }
        with on_node(comm, NODES) as made:
            made.save(place(tmp_path, comm.rank, shared=True), **what)
            made.save(place(tmp_path, comm.rank, shared=False), **what)
            with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
                made.save(place(tmp_path, comm.rank, shared=True), **what)
            made.save(tmp_path / "shared" / "another", **what)

    run_ranks(4, act)
    assert torch.equal(uc.open(tmp_path / "shared" / "another")["model"]["w"][...], FULL + 1)

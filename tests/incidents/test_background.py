"""Public reports about saves that run while training goes on."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import unified_ckpt as uc
from tests.support.torch_training import train_step

UNSYNCED = uc.SaveOptions(fsync=False)


@pytest.mark.incident("NeMo-RL#3312")
def test_parameters_move_between_saves_of_one_plan(tmp_path: Path) -> None:
    """Cached handles of the writer point to the memory of the first save, which it stores again."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_step(optimizer)
    with uc.Checkpointer(tmp_path, options=UNSYNCED) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_async(f"c{step}", model=model, optimizer=optimizer)
            checkpointer.wait()
            model.weight.data = torch.full((2, 4), float(step))  # as offload and reload do
            for state in optimizer.state.values():
                state["exp_avg"] = torch.full_like(state["exp_avg"], float(step))
    for step in (2, 3):
        with uc.open(tmp_path / f"c{step}") as opened:
            assert torch.equal(opened["model"]["weight"][...], torch.full((2, 4), step - 1.0))
            moment = opened["optimizer"]["weight/exp_avg"][...]
            assert torch.equal(moment, torch.full((2, 4), step - 1.0))


@pytest.mark.incident("DLRover#1585")
def test_buffers_are_not_reused_before_they_are_written(tmp_path: Path) -> None:
    """A second save into the buffer of the first, which is still being written, mixes both."""
    model = {"w": torch.zeros(50_000)}
    with uc.Checkpointer(tmp_path, options=UNSYNCED) as checkpointer:
        for step in range(4):
            model["w"].fill_(step)
            checkpointer.save_async(f"c{step}", model=model)
    for step in range(4):
        with uc.open(tmp_path / f"c{step}") as opened:
            assert (opened["model"]["w"][...] == step).all()


@pytest.mark.incident("torchtitan#930")
def test_load_beside_a_save_in_flight(tmp_path: Path) -> None:
    """torchtitan's load right after an asynchronous save finds no checkpoint, and fails."""
    model = nn.Linear(2, 2)
    saved = model.weight.detach().clone()
    with uc.Checkpointer(tmp_path, options=UNSYNCED) as checkpointer:
        checkpointer.save_async("c", model=model)
        nn.init.zeros_(model.weight)
        checkpointer.load("c", model=model)
    assert torch.equal(model.weight, saved)


class Memory(np.ndarray):
    """An array that can be watched."""


@pytest.mark.incident("AReaL#1615")
@pytest.mark.parametrize("lazy", [False, True])
def test_memory_is_free_while_copies_are_written(tmp_path: Path, lazy: bool) -> None:
    """The queued save refers to the weights: offloading them frees nothing until it has ended."""
    moved, watched, alive = threading.Event(), list[weakref.ref[Memory]](), list[bool]()

    def memory() -> torch.Tensor:
        array = np.ones(1000, dtype=np.float32).view(Memory)
        watched.append(weakref.ref(array))
        return torch.from_numpy(array)

    def before_the_commit(folder: str) -> None:
        assert moved.wait(60)
        gc.collect()
        alive.extend(reference() is not None for reference in watched)

    model = nn.Module()
    model.register_parameter("w", nn.Parameter(memory()))
    model.register_buffer("mean", memory())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.w]["momentum_buffer"] = memory()
    parts = {"ema": {"w": memory()}}
    with uc.Checkpointer(tmp_path, options=UNSYNCED) as checkpointer:
        pending = checkpointer.save_async(
            "c", model=model, optimizer=optimizer, parts=parts, attach=before_the_commit, lazy=lazy
        )
        while not pending.staged():
            time.sleep(0.001)
        model.w.data, model.mean = torch.zeros(1000), torch.zeros(1000)  # as an offload does
        optimizer.state.clear()
        parts.clear()
        moved.set()
    assert alive == [False] * 4
    with uc.open(tmp_path / "c") as opened:
        assert (opened["model"]["w"][...] == 1).all()
        assert (opened["ema"]["w"][...] == 1).all()

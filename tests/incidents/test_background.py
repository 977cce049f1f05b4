"""Public reports about saves that run while training goes on."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import unified_ckpt as uc
from tests.support.torch_training import train_step

Move = Callable[[nn.Linear, torch.optim.Optimizer, float], None]

UNSYNCED = uc.SaveOptions(fsync=False)


def move_data(net: nn.Linear, optimizer: torch.optim.Optimizer, value: float) -> None:
    """As an offload and a reload do; an optimizer of its own state may do it in each step."""
    net.weight.data = torch.full((2, 4), value)
    for state in optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], value)


def move_module(net: nn.Linear, optimizer: torch.optim.Optimizer, value: float) -> None:
    """There and back through another dtype, which makes new memory twice."""
    net.to(torch.float64)
    move_data(net, optimizer, value)
    net.to(torch.float32)


def restore_memory(net: nn.Linear, optimizer: torch.optim.Optimizer, value: float) -> None:
    """As sleeping engines and FSDP1 do: the tensor stays, and its storage is freed meanwhile.

    Another tensor gets the address.
    """
    tensors = [net.weight.data, *(state["exp_avg"] for state in optimizer.state.values())]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    others = [torch.full_like(net.bias, -1.0) for _ in range(9)]
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.fill_(value)
    del others


def replace_parameter(net: nn.Linear, optimizer: torch.optim.Optimizer, value: float) -> None:
    before = net.weight
    net.weight = nn.Parameter(torch.full((2, 4), value))
    state = optimizer.state.pop(before)
    optimizer.state[net.weight] = {**state, "exp_avg": torch.full((2, 4), value)}
    optimizer.param_groups[0]["params"][0] = net.weight


MOVES = [move_data, move_module, restore_memory, replace_parameter]


@pytest.mark.incident("NeMo-RL#3312")
@pytest.mark.parametrize("save", ["save", "save_async", "lazy", "limited"])
@pytest.mark.parametrize("move", MOVES)
def test_parameters_move_between_saves_of_one_plan(tmp_path: Path, move: Move, save: str) -> None:
    """Cached handles of the writer point to the memory of the first save, which it stores again."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_step(optimizer)
    options = uc.SaveOptions(fsync=False, host_bytes=40 if save == "limited" else None)
    with uc.Checkpointer(tmp_path, options=options) as checkpointer:
        for step in (1, 2, 3):
            arguments = {"model": model, "optimizer": optimizer}
            if save == "save":
                checkpointer.save(f"c{step}", **arguments)
            else:
                checkpointer.save_async(f"c{step}", lazy=save == "lazy", **arguments).result(60)
            move(model, optimizer, float(step))
    for step in (2, 3):
        with uc.open(tmp_path / f"c{step}") as opened:
            assert torch.equal(opened["model"]["weight"][...], torch.full((2, 4), step - 1.0))
            moment = opened["optimizer"]["weight/exp_avg"][...]
            assert torch.equal(moment, torch.full((2, 4), step - 1.0))


@pytest.mark.incident("Megatron-LM#2288")
@pytest.mark.parametrize("lazy", [False, True])
def test_freed_memory_is_used_by_others_while_it_is_written(tmp_path: Path, lazy: bool) -> None:
    """The allocator gives the memory of staged tensors to others, which the writer then stores."""
    writing, reused = threading.Event(), threading.Event()
    segment = torch.arange(3, dtype=torch.float32).repeat_interleave(5000)  # of the allocator

    def before_the_commit(folder: str) -> None:
        writing.set()
        assert reused.wait(60)

    model = nn.Linear(100, 50, bias=False)
    model.weight.data, parts = segment[:5000].view(50, 100), {"ema": {"w": segment[5000:10_000]}}
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = segment[10_000:].view(50, 100)
    with uc.Checkpointer(tmp_path, options=UNSYNCED) as checkpointer:
        checkpointer.save_async(
            "c", model=model, optimizer=optimizer, parts=parts, attach=before_the_commit, lazy=lazy
        )
        assert writing.wait(60)
        model.weight.data = torch.empty(0)
        parts.clear()
        optimizer.state.clear()
        segment.fill_(-1.0)  # by the next owner
        reused.set()
    with uc.open(tmp_path / "c") as opened:
        assert (opened["model"]["weight"][...] == 0).all()
        assert (opened["ema"]["w"][...] == 1).all()
        assert (opened["optimizer"]["weight/momentum_buffer"][...] == 2).all()


@pytest.mark.incident("pytorch#155192")
@pytest.mark.parametrize("lazy", [False, True])
def test_tensors_share_memory(tmp_path: Path, lazy: bool) -> None:
    """Views of one storage, row-major or not; what one of them changes, others show."""
    storage = torch.arange(24.0)
    module = nn.Module()
    module.register_parameter("rows", nn.Parameter(storage.view(4, 6)[1:3]))
    module.register_parameter("columns", nn.Parameter(storage.view(4, 6).t()[2:5]))
    module.register_buffer("all", storage)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with uc.Checkpointer(tmp_path, options=UNSYNCED) as checkpointer:
        for name in ("first", "again"):
            pending = checkpointer.save_async(name, model=module, optimizer=optimizer, lazy=lazy)
            while not pending.staged():
                time.sleep(0.001)
            storage.add_(1)
            with uc.open(pending.result(60).path) as opened:
                for key, tensor in expected.items():
                    assert torch.equal(opened["model"][key][...], tensor), key
                    tensor.add_(1)


@pytest.mark.incident("torchrec#4309")
@pytest.mark.parametrize("call", ["save", "save_async"])
def test_tensor_can_be_freed_and_restored_after_a_save(tmp_path: Path, call: str) -> None:
    """There, a stashed tensor without memory is left out. Here it is an error, and a save leaves
    the memory resizable: numpy's view of a tensor forbids that for ever.
    """
    model = {"w": torch.ones(1000), "turned": torch.ones(30, 20).t()}
    with uc.Checkpointer(tmp_path, options=UNSYNCED) as checkpointer:
        save = getattr(checkpointer, call)
        save("before", model=model)
        checkpointer.wait()
        checkpointer.load("before", model=model)
        for tensor in model.values():
            tensor.untyped_storage().resize_(0)
            with pytest.raises(uc.LayoutError, match="got 0 bytes of memory, expected"):
                save("stashed", model=model)
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.fill_(2)
        save("after", model=model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]
    with uc.open(tmp_path / "after") as opened:
        assert all((opened["model"][name][...] == 2).all() for name in model)


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

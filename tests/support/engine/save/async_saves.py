"""Storages that block until a latch opens, and models for tests of background saves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unified_ckpt as uc
from unified_ckpt.engine.save.background import background_save
from unified_ckpt.engine.save.write.snapshot import Snapshot
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage import roots
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage

SECONDS = 30.0  # far more than any of this needs
QUICK = uc.SaveOptions(fsync=False, timeout_seconds=SECONDS)


class Latch:
    """Blocks every rank's storage until it opens. `reached`: a rank waits for it."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def open(self) -> None:
        self.opened.set()

    def storage(self, root: str) -> LocalStorage:
        latch = self

        class Blocked(LocalStorage):
            def make_folder(self, name: str) -> None:
                latch.passing()
                super().make_folder(name)

            def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
                latch.passing()
                super().write_at(name, start, buffers)

        return Blocked(root)

    def passing(self) -> None:
        self.reached.set()
        if not self.opened.wait(SECONDS):
            raise uc.StorageError("the latch stays closed")


class Storages:
    """Chooses the storage of each rank's saves: a LocalStorage unless `kinds` names another."""

    def __init__(self) -> None:
        self.kinds: dict[
            str, Callable[[str], LocalStorage]
        ] = {}  # by the name of the rank's thread, or "all"

    def __call__(self, root: str, **_: object) -> LocalStorage:
        kind = self.kinds.get(threading.current_thread().name, self.kinds.get("all", LocalStorage))
        return kind(root)


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Storages:
    storages_by_rank = Storages()
    monkeypatch.setattr(roots, "LocalStorage", storages_by_rank)
    return storages_by_rank


@pytest.fixture
def latch(storages: Storages) -> Iterator[Latch]:
    closed = Latch()
    storages.kinds["all"] = closed.storage
    yield closed
    closed.open()


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that depend on shape and seed; no element is zero."""
    count = torch.Size(shape).numel()
    return (
        (torch.arange(count, dtype=torch.int64) * 31 + seed * 7919)
        .remainder(113)
        .add(1)
        .reshape(shape)
        .to(dtype)
    )


# name -> (shape, dtype, dim that is cut); those of 64 KiB and more are moved alone, by rows or in
# tiles
TENSORS: Mapping[str, tuple[tuple[int, ...], torch.dtype, int | None]] = {
    "rows": ((130, 260), torch.float32, 0),
    "columns": ((260, 130), torch.float32, 1),
    "inner": ((8, 60, 70), torch.float32, 2),
    "turned": ((200, 190), torch.float32, 1),
    "whole": ((150, 150), torch.float32, None),
    "bf16": ((260, 190), torch.bfloat16, 0),
    "few": ((5, 3), torch.float32, 0),
    "bias": ((7,), torch.float32, None),
    "zero_dim": ((), torch.float32, None),
    "nothing": ((0, 4), torch.float32, None),
    "mask": ((300, 300), torch.bool, 1),
    "count": ((3,), torch.int64, None),
}
BUFFERS = ("mask", "count")


class Net(nn.Module):
    """A rank's parts of the state at one step."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        super().__init__()
        for name in TENSORS:
            local = part_of(name, rank, world, seed)
            if name == "turned":
                local = local.t().contiguous().t()
            if name in BUFFERS:
                self.register_buffer(name, local)
            else:
                self.register_parameter(name, nn.Parameter(local))


def part_of(name: str, rank: int, world: int, seed: int) -> Tensor:
    shape, dtype, dim = TENSORS[name]
    whole = values(shape, seed, dtype)
    if dim is None or world == 1:
        return whole.clone()
    chunks = torch.chunk(whole, world, dim)
    return (chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)).clone(
        memory_format=torch.contiguous_format
    )


def rank_state(
    comm: Comm, seed: int, *, replicas: int = 1
) -> tuple[Net, torch.optim.Optimizer, dict[str, Tensor]]:
    """A rank's module, its AdamW with state, and another part; equal for all replicas."""
    world = comm.world // replicas
    rank = comm.rank % world
    net = Net(rank, world, seed)
    optimizer = torch.optim.AdamW([p for _, p in net.named_parameters()], lr=0.1)
    for number, (name, param) in enumerate(net.named_parameters()):
        optimizer.state[param] = {
            "step": torch.tensor(float(seed + 1)),
            "exp_avg": part_of(name, rank, world, seed + number + 1),
            "exp_avg_sq": part_of(name, rank, world, seed + number + 2),
        }
    return (
        net,
        optimizer,
        {"columns": part_of("columns", rank, world, seed + 50), "bias": values((7,), seed + 51)},
    )


def layout_of(world: int, *, replicas: int = 1) -> uc.Layout | None:
    cut = world // replicas
    rules = {name: {"tp": dim} for name, (_, _, dim) in TENSORS.items() if dim is not None}
    shapes = {name: TENSORS[name][0] for name in rules}
    return (
        uc.Layout(mesh={"dp": replicas, "tp": cut}, rules=rules, shapes=shapes)
        if world > 1
        else None
    )


class Late:
    """Copies made by the save threads wait until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        real = background_save.copy_tensors

        def late(snapshot: Snapshot, keys: Any, **options: Any) -> None:
            if threading.current_thread().name == "unified_ckpt-save":
                self.began.set()
                assert self.go.wait(SECONDS)
            real(snapshot, keys, **options)

        monkeypatch.setattr(background_save, "copy_tensors", late)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    copies = Late(monkeypatch)
    yield copies
    copies.go.set()

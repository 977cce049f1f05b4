"""Lanes: threads that each read, check and copy a share of what a rank alone needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.core.planning import exchange, lanes
from unified_ckpt.core.planning.exchange import Extent, RankIO
from unified_ckpt.core.planning.load_plan import ReadPlan
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.engine.load import extents, read, tensor_reader
from unified_ckpt.engine.load.read import GroupReadPlan
from unified_ckpt.engine.load.tensor_reader import LocatedTensor
from unified_ckpt.engine.plan.chunks import chunks
from unified_ckpt.engine.source.protocol import Location
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state import devices
from unified_ckpt.runtime.torch_state.devices import copy_to_tensor
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

CHUNK_NBYTES = 1 << 15
Rows = Sequence[int]  # of tensors with 256 columns of float32; ranks divide them evenly


def set_lanes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let a rank run so many lanes, for loads of some hundred KiB too."""
    monkeypatch.setattr(tensor_reader, "lane_count", lambda *, ranks: count)
    monkeypatch.setattr(exchange, "TILE_NBYTES", 2 * CHUNK_NBYTES)
    monkeypatch.setattr(extents, "CHUNK_NBYTES", CHUNK_NBYTES)
    monkeypatch.setattr(lanes, "MIN_LANE_NBYTES", CHUNK_NBYTES)
    monkeypatch.setattr(extents, "chunks", partial(chunks, nbytes=CHUNK_NBYTES))


def make_state(rows: Rows) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    return {f"w{i}": torch.randn(n, 256, generator=generator) for i, n in enumerate(rows)}


def make_target(kind: str, shape: torch.Size) -> torch.Tensor:
    if kind == "transposed":
        return torch.full(shape[::-1], torch.nan).t()
    return torch.full(shape, torch.nan, dtype=torch.float64 if kind == "double" else torch.float32)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.integers(1, 50).map(lambda n: 6 * n), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(["same", "double", "transposed"]), min_size=5, max_size=5),
    layout=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 0)]),
    verify=st.sampled_from(["read", "off", "full"]),
)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_lanes_read_every_byte(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    rows: Rows,
    kinds: list[str],
    layout: tuple[int, int],
    verify: str,
) -> None:
    """Compared with slices by numpy, for targets of other dtypes and memory too."""
    folder, full, (world, dim) = tmp_path_factory.mktemp("c") / "c", make_state(rows), layout
    uc.save(folder, model=full)

    def act(comm: Comm) -> None:
        expected = {
            name: np.array_split(tensor.numpy(), world, axis=dim)[comm.rank]
            for name, tensor in full.items()
        }
        target = {
            name: make_target(kind, torch.Size(expected[name].shape))
            for name, kind in zip(full, kinds, strict=False)
        }
        split = uc.Layout(mesh={"tp": world}, rules={name: {"tp": dim} for name in full})
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(
                folder, model=target, layout=split, options=uc.LoadOptions(verify=verify)
            )
        for name, tensor in target.items():
            assert np.array_equal(tensor.numpy(), expected[name].astype(tensor.numpy().dtype))

    with pytest.MonkeyPatch.context() as monkeypatch:
        set_lanes(monkeypatch, count)
        run_ranks(world, act)
    assert not lane_threads()


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "unified_ckpt-call"]


@pytest.mark.parametrize("where", [0.05, 0.3, 0.6, 0.99])
def test_flipped_bit_in_any_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: float
) -> None:
    full = make_state((300, 100, 200))
    uc.save(tmp_path / "c", model=full)
    path = tmp_path / "c" / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[len(body) - int((1 - where) * sum(tensor.nbytes for tensor in full.values())) - 1] ^= 1
    path.write_bytes(body)
    set_lanes(monkeypatch, 4)
    with pytest.raises(uc.IntegrityError, match="are not the bytes that were saved"):
        uc.load(tmp_path / "c", model={name: torch.zeros_like(t) for name, t in full.items()})


@pytest.mark.parametrize("dim", [0, 1])
def test_error_of_one_lane_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    """Extents for dim 0; for dim 1 tiles, which a thread reads ahead."""
    full = make_state((300, 300, 300))
    uc.save(tmp_path / "c", model=full)
    set_lanes(monkeypatch, 4)
    read_at, read = LocalStorage.read_at, list[int]()

    def failing(self: LocalStorage, name: str, start: int, into: memoryview) -> None:
        if name == "model.safetensors" and len(into) > 1024:
            read.append(start)
            if len(read) == 3:
                raise uc.StorageError("the disk is gone")
            time.sleep(0.001)
        read_at(self, name, start, into)

    monkeypatch.setattr(LocalStorage, "read_at", failing)

    def act(comm: Comm) -> None:
        target = {name: torch.zeros_like(t.chunk(2, dim)[0]) for name, t in full.items()}
        layout = uc.Layout(mesh={"tp": 2}, rules={name: {"tp": dim} for name in full})
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / "c", model=target, layout=layout)

    with pytest.raises(uc.StorageError, match="the disk is gone"):
        run_ranks(2, act)
    assert not lane_threads()


def test_refused_thread_leaves_an_unusable_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = make_state((300, 300))
    uc.save(tmp_path / "c", model=full)
    set_lanes(monkeypatch, 2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(uc.CheckpointError, match="can't start new thread; the target holds a mix"):
        uc.load(tmp_path / "c", model={name: torch.zeros_like(t) for name, t in full.items()})


class LateDevice:
    """A device whose copies take place later, one after another, as those of a CUDA stream."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._copies = pool, list[Future[None]]()

    def copy_to_tensor(self, stored: torch.Tensor, tensor: LocalTensor, first: int) -> None:
        def copy() -> None:
            time.sleep(0.002)
            copy_to_tensor(stored, tensor, first)

        self._copies.append(self._pool.submit(copy))

    def record_events(self, _: object) -> list[LateEvent]:
        return [LateEvent(self._copies[-1].result)]


class LateEvent:
    """Is complete with the copies before it."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def synchronize(self) -> None:
        self._wait()


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        device = LateDevice(pool)
        for module in (extents, read):
            monkeypatch.setattr(module, "copy_to_tensor", device.copy_to_tensor)
        monkeypatch.setattr(LocalTensor, "is_on_device", True)
        monkeypatch.setattr(devices, "record_events", device.record_events)
        yield


@pytest.mark.usefixtures("late_device")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_buffers_wait_for_late_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, count: int
) -> None:
    """A buffer is filled again only after its copy, and the load ends after the last one.

    Extents for dim 0, tiles for dim 1.
    """
    full = make_state((300, 100, 200))
    uc.save(tmp_path / "c", model=full)
    set_lanes(monkeypatch, count)

    def act(comm: Comm) -> None:
        shards = {name: tensor.double().chunk(2, dim)[comm.rank] for name, tensor in full.items()}
        target = {name: torch.zeros(tensor.shape).double() for name, tensor in shards.items()}
        layout = uc.Layout(mesh={"tp": 2}, rules={name: {"tp": dim} for name in full})
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / "c", model=target, layout=layout)
        assert all(torch.equal(target[name], tensor) for name, tensor in shards.items())

    run_ranks(2, act)


def plan_of(rank: int, *, files: int, ranks: int) -> GroupReadPlan:
    """Rank `rank` reads a third of each of some files of one tensor."""
    nbytes = extents.CHUNK_NBYTES
    spec = TensorSpec("U8", (ranks * nbytes,))
    decls = tuple(TensorDecl("model", f"w{i:02}", spec, Sharding()) for i in range(files))
    targets = tuple(LocalTensor(decl, torch.empty(nbytes, dtype=torch.uint8)) for decl in decls)
    tensors = tuple(
        LocatedTensor(decl.key, Location(f"{i:02}", 0), in_file=True, block_crcs=None)
        for i, decl in enumerate(decls)
    )
    own = tuple(Extent(i, rank * nbytes, (rank + 1) * nbytes, 0) for i in range(files))
    read_plan = ReadPlan(RankIO(own, (), (), 0), frozenset())
    return GroupReadPlan(0, tuple(range(ranks)), decls, targets, tensors, read_plan)


def test_lanes_begin_in_different_places() -> None:
    """Of 3 ranks with 2 lanes each, all read other files at first."""
    first_files = set[str]()
    for rank in range(3):
        plan = plan_of(rank, files=12, ranks=3)
        for share in extents.lane_shares([plan], rank, lanes=2):
            first_files.add(plan.tensors[share[0][1].decl_index].location.file)
    assert len(first_files) == 6

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.harness import (
    DrawnLayout,
    FaultPoint,
    FaultyStorage,
    FullStorage,
    SimulatedCrash,
    drawn_layouts,
    meshes,
    run_ranks,
    specs,
    try_ranks,
)
from tests.support.oracles import local_part
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec, missing_coordinates
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

# ranks


def test_run_ranks_returns_results_or_raises_all_errors() -> None:
    def act(comm: Comm) -> tuple[int, bytes]:
        collective = comm.begin_collective("x", cached=False, timeout_seconds=10)
        return comm.rank, collective.broadcast("v", b"from 0" if comm.rank == 0 else None)

    assert run_ranks(3, act) == [(0, b"from 0"), (1, b"from 0"), (2, b"from 0")]

    def fail(comm: Comm) -> int:
        if comm.world == 2:
            raise uc.LayoutError("gap")
        if comm.rank:
            raise ValueError(f"no {comm.rank}")
        return comm.rank

    with pytest.raises(uc.LayoutError, match=r"^gap$"):
        run_ranks(2, fail)
    with pytest.raises(ExceptionGroup, match="2 of 3 ranks failed") as raised:
        run_ranks(3, fail)
    assert [(str(error), *error.__notes__) for error in raised.value.exceptions] == [
        ("no 1", "raised on rank 1 of 3"),
        ("no 2", "raised on rank 2 of 3"),
    ]
    results = try_ranks(3, fail)
    assert (results[0], *map(repr, results[1:])) == (0, "ValueError('no 1')", "ValueError('no 2')")


def test_run_ranks_shows_where_a_rank_hangs() -> None:
    over = threading.Event()

    def wait_forever() -> None:
        over.wait(30)

    def act(comm: Comm) -> None:
        if comm.rank == 1:
            wait_forever()

    with pytest.raises(
        TimeoutError,
        match=r"(?s)rank\(s\) 1 did not end within 0\.2 s; they are at\nrank 1:.*in "
        r"wait_forever",
    ):
        run_ranks(2, act, timeout_seconds=0.2)
    over.set()


# storage


def test_fault_point_stops_every_storage(tmp_path: Path) -> None:
    fuse = FaultPoint(2)
    first, second = FaultyStorage(str(tmp_path), fuse), FaultyStorage(str(tmp_path), fuse)
    first.make_folder("a")
    second.write_at("a/x", 0, [memoryview(b"12345678")])
    with pytest.raises(SimulatedCrash, match="stopped at operation 2"):
        first.write_at("a/y", 0, [memoryview(b"1234"), memoryview(b"5678")])
    assert (tmp_path / "a" / "x").read_bytes() == b"12345678"
    assert (tmp_path / "a" / "y").read_bytes() == b"12", "half of a write that was cut off"
    with pytest.raises(SimulatedCrash, match="stopped at operation 2"):
        second.remove_folder("a")
    with pytest.raises(SimulatedCrash, match="stopped at operation 2"):
        second.read("a/x")
    assert fuse.operations == ["make_folder a", "write_at a/x", "write_at a/y"]


def test_crash_removes_half_of_a_folder(tmp_path: Path) -> None:
    storage = FaultyStorage(str(tmp_path), FaultPoint(5))
    storage.make_folder("a")
    for name in "bcde":
        storage.write_at(f"a/{name}", 0, [memoryview(b"1")])
    with pytest.raises(SimulatedCrash, match="stopped at operation 5"):
        storage.remove_folder("a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["d", "e"]


def test_full_storage_fails_from_a_write_on(tmp_path: Path) -> None:
    storage = FullStorage(str(tmp_path), 1)
    storage.write_at("a", 0, [memoryview(b"1")])
    for _ in range(2):
        with pytest.raises(
            uc.StorageError, match="write at byte 3 failed: No space left on device"
        ):
            storage.write_at("b", 3, [memoryview(b"1")])
    storage.remove_file("a")


# drawn states


@given(meshes(max_world=7))
def test_meshes_fit_the_world(mesh: Sequence[int]) -> None:
    assert 1 <= len(mesh) <= 3
    assert 1 <= prod(mesh) <= 7


@given(specs(max_nbytes=500_000))
def test_specs_can_be_allocated(spec: TensorSpec) -> None:
    assert spec.dtype in TORCH_DTYPES
    assert spec.nbytes < 700_000
    assert torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]).nbytes == spec.nbytes


TENSORS: list[tuple[Key, TensorSpec]] = [
    (("model", "matrix"), TensorSpec("F32", (13, 7))),
    (("model", "none"), TensorSpec("BF16", (0, 3))),
    (("model", "one"), TensorSpec("I64", ())),
    (("ema", "packed"), TensorSpec("F4", (6,))),
]


@given(drawn_layouts(tensors=TENSORS, max_world=8, complete=True))
def test_complete_layouts_hold_whole_replicas(drawn: DrawnLayout) -> None:
    assert [(tensor.decl.key, tensor.decl.spec) for tensor in drawn.tensors] == TENSORS
    for tensor in drawn.tensors:
        assert missing_coordinates(tensor.decl.sharding, tensor.ranks) == []
        assert list(tensor.ranks) == sorted(set(tensor.ranks) & set(range(drawn.world)))
        assert tensor.decl.spec.dtype != "F4" or not tensor.decl.sharding.shard_dims


@given(drawn_layouts(tensors=TENSORS, max_world=8, complete=False), st.data())
def test_holders_are_ranks_of_the_mesh(drawn: DrawnLayout, data: st.DataObject) -> None:
    for tensor in drawn.tensors:
        assert tensor.ranks
        rank = data.draw(st.sampled_from(tensor.ranks))
        assert tensor.decl.sharding.has_rank(rank)
        assert tensor.decl in drawn.decls(rank)
        assert local_part(np.zeros(tensor.decl.spec.shape), tensor.decl.sharding, rank).ndim == len(
            tensor.decl.spec.shape
        )

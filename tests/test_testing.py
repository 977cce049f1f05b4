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
from tests.support.oracles import local_part
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec, missing_coordinates
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.testing import (
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

# ranks


def test_ranks_give_their_results_in_order() -> None:
    def act(comm: Comm) -> tuple[int, bytes]:
        return comm.rank, comm.begin_collective("x", cached=False, timeout_seconds=10).broadcast(
            "v", b"from 0" if comm.rank == 0 else None
        )

    assert run_ranks(3, act) == [(0, b"from 0"), (1, b"from 0"), (2, b"from 0")]


def test_one_error_of_all_ranks_is_that_error() -> None:
    def act(comm: Comm) -> None:
        raise uc.LayoutError("gap")

    with pytest.raises(uc.LayoutError, match=r"^gap$"):
        run_ranks(3, act)


def test_errors_of_some_ranks_come_together() -> None:
    def act(comm: Comm) -> int:
        if comm.rank:
            raise ValueError(f"no {comm.rank}")
        return comm.rank

    with pytest.raises(ExceptionGroup, match="2 of 3 ranks failed") as found:
        run_ranks(3, act)
    assert [(str(error), *error.__notes__) for error in found.value.exceptions] == [
        ("no 1", "raised on rank 1 of 3"),
        ("no 2", "raised on rank 2 of 3"),
    ]
    results = try_ranks(3, act)
    assert results[0] == 0
    assert [repr(error) for error in results[1:]] == ["ValueError('no 1')", "ValueError('no 2')"]


def test_a_rank_that_hangs_is_shown_where_it_hangs() -> None:
    over = threading.Event()

    def wait_for_what_never_comes() -> None:
        over.wait(30)

    def act(comm: Comm) -> None:
        if comm.rank == 1:
            wait_for_what_never_comes()

    with pytest.raises(
        TimeoutError,
        match=r"(?s)rank\(s\) 1 did not end within 0\.2 s; they are at\nrank 1:.*in "
        r"wait_for_what_never_comes",
    ):
        run_ranks(2, act, timeout_seconds=0.2)
    over.set()


# storage


def test_a_fuse_blows_once_and_for_all(tmp_path: Path) -> None:
    fuse = FaultPoint(2)
    one, other = FaultyStorage(str(tmp_path), fuse), FaultyStorage(str(tmp_path), fuse)
    one.make_folder("a")
    other.write_at("a/x", 0, [memoryview(b"12345678")])
    with pytest.raises(SimulatedCrash, match="stopped at operation 2"):
        one.write_at("a/y", 0, [memoryview(b"1234"), memoryview(b"5678")])
    assert (tmp_path / "a" / "x").read_bytes() == b"12345678"
    assert (tmp_path / "a" / "y").read_bytes() == b"12", "half of a write that was cut off"
    with pytest.raises(SimulatedCrash, match="stopped at operation 2"):
        other.remove_folder("a")
    with pytest.raises(SimulatedCrash, match="stopped at operation 2"):
        other.read("a/x")
    assert fuse.operations == ["make_folder a", "write_at a/x", "write_at a/y"]


def test_half_of_a_folder_is_removed(tmp_path: Path) -> None:
    storage = FaultyStorage(str(tmp_path), FaultPoint(5))
    storage.make_folder("a")
    for name in "bcde":
        storage.write_at(f"a/{name}", 0, [memoryview(b"1")])
    with pytest.raises(SimulatedCrash, match="stopped at operation 5"):
        storage.remove_folder("a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["d", "e"]


def test_a_disk_that_is_full_from_a_write_on(tmp_path: Path) -> None:
    storage = FullStorage(str(tmp_path), 1)
    storage.write_at("a", 0, [memoryview(b"1")])
    for _ in range(2):
        with pytest.raises(
            uc.StorageError, match="write at byte 3 of failed: No space left on device"
        ):
            storage.write_at("b", 3, [memoryview(b"1")])
    storage.remove_file("a")


# drawn states


@given(meshes(max_world=7))
def test_meshes_fit_the_world(mesh: Sequence[int]) -> None:
    assert 1 <= len(mesh) <= 3
    assert 1 <= prod(mesh) <= 7


@given(specs(max_nbytes=500_000))
def test_specs_can_be_made(spec: TensorSpec) -> None:
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
def test_complete_arrangements_hold_whole_copies(drawn: DrawnLayout) -> None:
    assert [(one.decl.key, one.decl.spec) for one in drawn.tensors] == TENSORS
    for one in drawn.tensors:
        assert missing_coordinates(one.decl.sharding, one.ranks) == []
        assert list(one.ranks) == sorted(set(one.ranks) & set(range(drawn.world)))
        assert one.decl.spec.dtype != "F4" or not one.decl.sharding.shard_dims


@given(drawn_layouts(tensors=TENSORS, max_world=8, complete=False), st.data())
def test_every_rank_that_holds_a_tensor_has_a_place_in_its_mesh(
    drawn: DrawnLayout, data: st.DataObject
) -> None:
    for one in drawn.tensors:
        assert one.ranks
        rank = data.draw(st.sampled_from(one.ranks))
        assert one.decl.sharding.position(rank) is not None
        assert one.decl in drawn.decls(rank)
        assert local_part(np.zeros(one.decl.spec.shape), one.decl.sharding, rank).ndim == len(
            one.decl.spec.shape
        )

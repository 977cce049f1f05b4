from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.support.oracles import NUMPY, Array, World, filled, local_part, make_decl, worlds
from unified_ckpt.core.planning.exchange import TileRange
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.runtime.exchange.run_batch import RunBatch, copy_runs_from_tile, copy_runs_to_tile
from unified_ckpt.runtime.torch_state.tensors import (
    TORCH_DTYPES,
    LocalTensor,
    as_bytes,
)

UNTOUCHED = 1  # also valid as a bool


def whole_ranges(decls: list[TensorDecl]) -> tuple[list[TileRange], int]:
    """Place whole tensors in a tile, each aligned to its items; return the tile's bytes, too."""
    ranges, offset = [], 0
    for index, decl in enumerate(decls):
        offset += -offset % itemsize(decl.spec.dtype)
        nbytes = decl.spec.nbytes
        if nbytes:
            ranges.append(TileRange(index, 0, nbytes, offset, 0, 1, 0, ()))
        offset += nbytes
    return ranges, offset + -offset % 8


def values_of(decl: TensorDecl, seed: int) -> Array:
    values = filled(decl.spec, seed=seed)
    return values & 1 if decl.spec.dtype == "BOOL" else values  # torch's copies have two bools only


def to_torch(array: Array, dtype: str) -> torch.Tensor:
    raw = torch.from_numpy(np.frombuffer(array.tobytes(), dtype=np.uint8).copy())
    typed = raw.view(TORCH_DTYPES[dtype]) if raw.numel() else torch.empty(0).to(TORCH_DTYPES[dtype])
    return typed.reshape(array.shape)


@given(worlds(max_decls=8))
@settings(max_examples=30)
def test_runs_pass_through_a_tile(world: World) -> None:
    """Every shard that is one run of its tensor, and no other, is copied to its place and back."""
    ranges, nbytes = whole_ranges(world.decls)
    arrays = [values_of(decl, seed) for seed, decl in enumerate(world.decls)]
    for rank in world.holders:
        tile = torch.full((nbytes,), UNTOUCHED, dtype=torch.uint8)
        expected = tile.numpy().copy()
        batch = RunBatch(tile, copy_runs_to_tile, rank=rank)
        shards = {}
        for tile_range in ranges:
            decl, array = world.decls[tile_range.decl_index], arrays[tile_range.decl_index]
            tensor = to_torch(local_part(array, decl.sharding, rank), decl.spec.dtype)
            places = local_part(np.arange(array.size).reshape(array.shape), decl.sharding, rank)
            is_run = places.size > 0 and bool((np.diff(places.ravel()) == 1).all())
            assert batch.add(tile_range, LocalTensor(decl, tensor)) == is_run
            if is_run:
                shards[tile_range] = tensor
                stop = tile_range.tile_offset + tile_range.stop
                view = expected[tile_range.tile_offset : stop].view(NUMPY[array.itemsize])
                view[places.ravel()] = array.ravel()[places.ravel()]
        batch.flush()
        assert bytes(tile.numpy()) == bytes(expected)
        batch = RunBatch(tile, copy_runs_from_tile, rank=rank)
        targets = {tile_range: torch.zeros_like(tensor) for tile_range, tensor in shards.items()}
        for tile_range, target in targets.items():
            assert batch.add(tile_range, LocalTensor(world.decls[tile_range.decl_index], target))
        batch.flush()
        for tile_range, target in targets.items():
            assert bytes(as_bytes(target)) == bytes(as_bytes(shards[tile_range]))


def test_cast_and_partial_ranges_are_left_to_the_caller() -> None:
    decl = make_decl((4, 3), dtype="F32")
    batch = RunBatch(torch.zeros(48, dtype=torch.uint8), copy_runs_to_tile, rank=0)
    assert not batch.add(TileRange(0, 0, 24, 0, 1, 2, 0, (0,)), LocalTensor(decl, torch.ones(4, 3)))
    whole = TileRange(0, 0, 48, 0, 0, 1, 0, (0,))
    assert not batch.add(whole, LocalTensor(decl, torch.ones(4, 3, dtype=torch.bfloat16)))


def test_a_strided_tensor_is_copied_row_major() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(4, 3).t()
    tile = torch.zeros(48, dtype=torch.uint8)
    batch = RunBatch(tile, copy_runs_to_tile, rank=0)
    assert batch.add(TileRange(0, 0, 48, 0, 0, 1, 0, (0,)), LocalTensor(make_decl((3, 4)), tensor))
    batch.flush()
    assert torch.equal(tile.view(torch.float32).reshape(3, 4), tensor)


def test_a_strided_target_is_refused() -> None:
    """Bytes that are read into a copy of it would be lost."""
    target = torch.zeros(4, 3).t()
    batch = RunBatch(torch.ones(48, dtype=torch.uint8), copy_runs_from_tile, rank=0)
    assert batch.add(TileRange(0, 0, 48, 0, 0, 1, 0, (0,)), LocalTensor(make_decl((3, 4)), target))
    with pytest.raises(ValueError, match="strided"):
        batch.flush()

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_save

from tests.support.oracles import filled, local_part, mesh_strides
from unified_ckpt.core.planning.slabs import slab_boxes
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import ITEM_BITS, itemsize
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.runtime.torch_state.tensors import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    LocalTensor,
    as_bytes,
    as_int_bits,
    boxes_in_slab,
    copy_slabs_from_tile,
    copy_slabs_to_tile,
    dtype_name,
    row_major_views,
)

DTYPES = sorted(TORCH_DTYPES)


def random_bits(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Draws any bits: NaNs with payloads, bools that are neither 0 nor 1."""
    array = filled(TensorSpec(dtype, shape), seed=seed)
    raw = torch.from_numpy(np.frombuffer(array.tobytes(), dtype=np.uint8).copy())
    return (
        raw.view(TORCH_DTYPES[dtype]).reshape(shape)
        if raw.numel()
        else torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    )


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(as_int_bits(tensor).contiguous().reshape(-1).view(torch.uint8).numpy())


def part(
    tensor: torch.Tensor,
    *,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    sharding: Sharding | None = None,
) -> LocalTensor:
    spec = TensorSpec(dtype or DTYPE_NAMES[tensor.dtype], shape or tuple(tensor.shape))
    return LocalTensor(TensorDecl("model", "w", spec, sharding or Sharding()), tensor)


# dtypes


def test_torch_has_all_dtypes_but_six_bit_ones() -> None:
    assert set(TORCH_DTYPES) == set(ITEM_BITS) - {"F6_E2M3", "F6_E3M2"}
    assert {DTYPE_NAMES[dtype]: dtype for dtype in DTYPE_NAMES} == TORCH_DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_names_and_sizes_are_those_of_safetensors(dtype: str) -> None:
    tensor = (
        torch.empty(2, dtype=torch.uint8).view(TORCH_DTYPES[dtype])
        if dtype == "F4"
        else torch.empty(2, dtype=TORCH_DTYPES[dtype])
    )
    assert f'"dtype":"{dtype}"' in safetensors_save({"w": tensor}).decode("latin1")
    assert tensor.element_size() == itemsize(dtype)
    assert dtype_name(tensor.dtype, fqn="w") == dtype


# memory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (4, 0, 2)])
def test_bytes_alias_the_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, *shape)
    result = as_bytes(tensor)
    assert bytes(result) == filled(TensorSpec(dtype, shape)).tobytes()
    assert len(result) == result.nbytes == itemsize(dtype) * prod(shape)
    if len(result):
        result[0] ^= 0xFF
        assert bits(tensor) == bytes(result)


def test_bytes_of_a_view_start_where_it_starts() -> None:
    tensor = torch.arange(12, dtype=torch.int16).reshape(6, 2)
    assert bytes(as_bytes(tensor[2:4])) == tensor.numpy()[2:4].tobytes()
    assert bytes(as_bytes(tensor.t()[1:2, 3:4])) == b"\x07\x00", (
        "one element is contiguous whatever its stride"
    )
    assert bytes(as_bytes(tensor.float().requires_grad_())) == tensor.float().numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_int_bits_aliases_the_tensor(dtype: str) -> None:
    tensor = random_bits(dtype, 4, 6)
    for view in (tensor, tensor[:, 1:4], tensor[::2]):
        result = as_int_bits(view)
        assert result.data_ptr() == view.data_ptr()
        assert result.shape == view.shape
        assert not result.dtype.is_floating_point


# lines


MESHES = [(2,), (3,), (2, 2), (2, 3)]


@st.composite
def shared_tensors(draw: st.DrawFn) -> tuple[TensorDecl, int, int]:
    """Draws a declaration, an `outer_ndim` left of its sharded dims, and the number of ranks."""
    sizes = draw(st.sampled_from(MESHES))
    strides = mesh_strides(sizes)
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    split = draw(st.integers(0, len(shape) - 1))
    sections = draw(st.sampled_from([1, 2, 3]))
    cuts = tuple(
        ShardDim(draw(st.integers(split, len(shape) - 1)), size, stride, sections)
        for size, stride in zip(sizes, strides, strict=True)
    )
    return (
        TensorDecl("model", "w", TensorSpec(draw(st.sampled_from(DTYPES)), shape), Sharding(cuts)),
        split,
        prod(sizes),
    )


@given(shared_tensors(), st.booleans(), st.data())
@settings(max_examples=150)
def test_slabs_round_trip_through_a_tile(
    case: tuple[TensorDecl, int, int], strided: bool, data: st.DataObject
) -> None:
    decl, split, world = case
    whole = (
        filled(decl.spec) & 1 if decl.spec.dtype == "BOOL" else filled(decl.spec)
    )  # torch's copies have two bools only
    count = prod(decl.spec.shape[:split])
    first = data.draw(st.integers(0, count - 1))
    slabs = data.draw(st.integers(1, count - first))
    slab = decl.spec.nbytes // count
    expected = whole.tobytes()[first * slab : (first + slabs) * slab]
    tile = torch.zeros(slabs * slab, dtype=torch.uint8)
    tensors = []
    for rank in range(world):
        part = local_part(whole, decl.sharding, rank)
        local = (
            torch.from_numpy(part.copy()).view(torch.uint8).view(TORCH_DTYPES[decl.spec.dtype])
            if part.size
            else None
        )
        local = (
            torch.empty(part.shape, dtype=TORCH_DTYPES[decl.spec.dtype])
            if local is None
            else local.reshape(part.shape)
        )
        if strided and local.dim() > 1:  # the same values with another memory order
            local = (
                as_int_bits(local).transpose(0, -1).contiguous().transpose(0, -1).view(local.dtype)
            )
        tensors.append(LocalTensor(decl, local))
        boxes = boxes_in_slab(tensors[-1], rank, split)
        assert boxes == slab_boxes(
            decl.spec.shape, decl.sharding, decl.sharding.coordinates(rank), split
        )
        copy_slabs_to_tile(
            tile, tensors[-1], boxes, outer_ndim=split, first_slab=first, count=slabs
        )
    assert bytes(tile.numpy()) == expected
    for rank, piece in enumerate(tensors):
        target = LocalTensor(
            decl, torch.empty_like(piece.local, memory_format=torch.contiguous_format)
        )
        as_int_bits(target.local).fill_(1)
        copy_slabs_from_tile(
            tile,
            target,
            boxes_in_slab(target, rank, split),
            outer_ndim=split,
            first_slab=first,
            count=slabs,
        )
        shape = (prod(piece.local.shape[:split]), *piece.local.shape[split:])
        result, source = (as_int_bits(x).reshape(shape) for x in (target.local, piece.local))
        assert torch.equal(result[first : first + slabs], source[first : first + slabs])
        assert (result[:first] == 1).all()
        assert (result[first + slabs :] == 1).all()


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.permutations(range(4)),
    st.integers(1, 9),
    st.data(),
)
@settings(max_examples=60)
def test_row_major_views(
    shape: list[int], order: list[int], limit: int, data: st.DataObject
) -> None:
    dims = [dim for dim in order if dim < len(shape)]
    tensor = torch.arange(prod(shape)).view(shape).permute(dims)
    expected = tensor.contiguous().view(-1)
    first = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(first, len(expected)))
    views = list(row_major_views(tensor, first, stop, limit=limit))
    assert all(0 < view.numel() <= limit for view in views)
    assert all(view.untyped_storage().data_ptr() == tensor.data_ptr() for view in views)
    flat = [number for view in views for number in view.reshape(-1).tolist()]
    assert flat == expected[first:stop].tolist()

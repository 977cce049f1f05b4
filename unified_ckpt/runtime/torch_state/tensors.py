"""Copies between a rank's local tensors and the slabs of a tile; knows dtypes, but no names."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from unified_ckpt.core.planning.slabs import slab_boxes
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import TORCH_NAMES
from unified_ckpt.errors import FormatError, LayoutError, MismatchError

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SCALAR_BOXES = ((Box((), ()), Box((), ())),)  # the boxes of a slab of one element
_WITHOUT_NUMBERS = ("F4", "F8_E8M0")  # torch cannot convert them
INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One rank's shard of one tensor.

    `decl.spec.dtype` is the dtype on disk; if `local` has another one, copies cast. `local` aliases
    the caller's memory, and has the local shape of the sharding. `model`: the model's elements that
    are written with those of an encoded master, in the same local shape.
    """

    decl: TensorDecl
    local: torch.Tensor
    model: LocalTensor | None = None

    @property
    def planes(self) -> tuple[LocalTensor, ...]:
        """The tensor, and the model tensor that is written with it."""
        return (self,) if self.model is None else (self, self.model)

    @property
    def casts(self) -> bool:
        """Whether a copy changes the dtype."""
        return DTYPE_NAMES[self.local.dtype] != self.decl.spec.dtype

    @property
    def is_on_device(self) -> bool:
        """Whether the memory is that of a device, which is filled from buffers of the host."""
        return self.local.device.type != "cpu"

    @property
    def is_stored_bytes(self) -> bool:
        """Whether the memory is, byte for byte, what a file stores of it."""
        return not self.casts and self.local.device.type == "cpu" and self.local.is_contiguous()

    def without_memory(self) -> LocalTensor:
        """Return the shard without its elements, on the meta device."""
        return LocalTensor(self.decl, torch.empty_like(self.local, device="meta"))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, and any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the memory of the local tensor holds its elements, one by one."""
    local = local_tensor(tensor)
    is_plain = type(local) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and local.layout is torch.strided and not local.is_nested and not local.is_meta


def check_dense(fqn: str, local: torch.Tensor) -> None:
    """Raise LayoutError for a local tensor whose elements are not its memory, one by one."""
    if local.is_meta:
        raise LayoutError(f"{fqn}: is on the meta device; call `to_empty(device=...)` first")
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        kind = "quantized" if local.is_quantized else "nested" if local.is_nested else local.layout
        raise LayoutError(f"{fqn}: got a {kind} tensor, expected a dense one")
    if local.is_conj() or local.is_neg():
        raise LayoutError(
            f"{fqn}: is a conjugate or negative view; call `resolve_conj().resolve_neg()` first"
        )
    if type(local) is not torch.Tensor:
        raise LayoutError(
            f"{fqn}: got a {type(local).__name__}, expected a torch.Tensor, a Parameter, or a "
            "DTensor of one"
        )
    memory_nbytes = local.untyped_storage().nbytes()
    if memory_nbytes < (local.nbytes if local.is_contiguous() else min(local.numel(), 1)):
        raise LayoutError(
            f"{fqn}: got {memory_nbytes} bytes of memory, expected {local.nbytes}; move it back "
            "from where it was offloaded"
        )


def check_not_expanded(fqn: str, local: torch.Tensor) -> None:
    """Raise LayoutError for a target whose elements share memory: loading one would change others.

    Such a tensor can be saved.
    """
    expanded = [dim for dim, size in enumerate(local.shape) if size > 1 and local.stride(dim) == 0]
    if expanded and local.numel():
        raise LayoutError(
            f"{fqn}: is expanded: all elements along dim {expanded[0]} of shape "
            f"{tuple(local.shape)} share memory; call `contiguous()` before loading into it"
        )


def dtype_name(dtype: torch.dtype, *, fqn: str) -> str:
    """Return the safetensors name of a torch dtype. MismatchError if a file cannot hold it."""
    if dtype not in DTYPE_NAMES:
        raise MismatchError(
            f"{fqn}: got dtype {dtype}, which safetensors cannot store, "
            f"expected one of {', '.join(map(str, DTYPE_NAMES))}"
        )
    return DTYPE_NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors name. FormatError if this torch lacks it."""
    if name not in TORCH_DTYPES:
        raise FormatError(f"dtype {name} is missing in this torch; install a newer one")
    return TORCH_DTYPES[name]


@dataclass(frozen=True, slots=True)
class _Memory:
    """A tensor's memory for numpy. `tensor.numpy()` would forbid to resize it from then on."""

    tensor: torch.Tensor
    __array_interface__: Mapping[str, Any]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes; an alias."""
    if tensor.numel() == 0:
        return memoryview(b"")
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), False),
        "shape": (tensor.nbytes,),
        "typestr": "|u1",
    }
    return np.asarray(_Memory(tensor, interface)).data


def from_bytes(
    data: bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return bytes in row-major order as a tensor; an alias."""
    if not data:  # which torch.frombuffer refuses
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for two tensors that view the same memory in the same way."""
    memory = tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride()
    return *memory, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def as_int_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as integers of its item size: copies keep every bit, for every dtype."""
    return tensor.view(INT_DTYPES[tensor.element_size()])


def as_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in row-major memory: itself if it is, else a copy."""
    return tensor if tensor.is_contiguous() else as_int_bits(tensor).contiguous().view(tensor.dtype)


def row_major_views(
    tensor: torch.Tensor, first: int, stop: int, *, limit: int
) -> Iterator[torch.Tensor]:
    """Yield views that hold elements [first, stop) of the tensor, counted in row-major order.

    One view after the other, each in row-major order, with at most `limit` elements.
    """
    if tensor.is_contiguous() or tensor.dim() == 1:
        flat = tensor.reshape(-1)
        yield from (flat[start : min(start + limit, stop)] for start in range(first, stop, limit))
        return
    row_numel = tensor[0].numel()
    while first < stop:
        row, start = divmod(first, row_numel)
        count = min(stop - first, limit) // row_numel if start == 0 else 0
        if count:
            yield tensor[row : row + count]
        else:  # a part of a row, or a row above the limit
            end = min(row_numel, start + stop - first)
            yield from row_major_views(tensor[row], start, end, limit=limit)
        first += count * row_numel or end - start


def slabs_of(tensor: LocalTensor, *, outer_ndim: int, first_slab: int, count: int) -> torch.Tensor:
    """Return slabs [first_slab, first_slab + count): dims left of `outer_ndim` are flattened.

    The result is [count, *local shape from `outer_ndim` on]; an alias if the tensor is contiguous.
    """
    shape = tensor.local.shape
    # [all slabs, *local shape from `outer_ndim` on]
    flat = tensor.local.reshape(prod(shape[:outer_ndim]), *shape[outer_ndim:])
    return flat[first_slab : first_slab + count]


def copy_slabs_to_tile(
    tile: torch.Tensor,
    tensor: LocalTensor,
    boxes: Sequence[tuple[Box, Box]],
    *,
    outer_ndim: int,
    first_slab: int,
    count: int,
) -> None:
    """Copy this rank's boxes of the slabs into the tile, uint8 [count * slab bytes]."""
    source, target = _slab_views(tile, tensor, outer_ndim, first_slab, count)
    for in_slab, in_local in boxes:
        target[:, *in_slab.slices].copy_(source[:, *in_local.slices])


def pack_runs(runs: Sequence[list[torch.Tensor]], memory: torch.Tensor) -> None:
    """Copy tensors of one device to memory of the host, uint8 [bytes], in row-major order.

    A run has one dtype and shape. The runs of long elements come first, so that all are aligned.
    """
    device, packed, start = runs[0][0].device, memory, 0
    if device.type != "cpu":
        packed = torch.empty(len(memory), dtype=torch.uint8, device=device)
    for run in runs:
        if run[0].element_size() == 1:  # torch copies no float4
            run = [tensor.view(torch.uint8) for tensor in run]
        stop = start + len(run) * run[0].nbytes
        target = packed[start:stop].view(run[0].dtype).view(len(run), *run[0].shape)
        torch.stack(run, out=target)
        start = stop
    if packed is not memory:
        memory.copy_(packed)


def max_difference(first: torch.Tensor | None, second: torch.Tensor | None) -> float | None:
    """Return the largest absolute difference of elements.

    None if a tensor is missing, if they do not have one dtype and shape, or if it is not finite.
    """
    if first is None or second is None or first.shape != second.shape:
        return None
    if first.dtype != second.dtype or DTYPE_NAMES[first.dtype] in _WITHOUT_NUMBERS:
        return None
    wide = torch.complex128 if first.is_complex() else torch.float64
    wide_first, wide_second = first.to(wide), second.to(wide)
    both_nan = wide_first.isnan() & wide_second.isnan()
    largest = float((wide_first - wide_second).abs().masked_fill(both_nan, 0).max())
    return largest if isfinite(largest) else None


def copy_slabs_from_tile(
    tile: torch.Tensor,
    tensor: LocalTensor,
    boxes: Sequence[tuple[Box, Box]],
    *,
    outer_ndim: int,
    first_slab: int,
    count: int,
) -> None:
    """Copy from the tile into this rank's tensor, which is contiguous.

    The inverse of `copy_slabs_to_tile`.
    """
    target, source = _slab_views(tile, tensor, outer_ndim, first_slab, count)
    for in_slab, in_local in boxes:
        target[:, *in_local.slices].copy_(source[:, *in_slab.slices])


def boxes_in_slab(tensor: LocalTensor, rank: int, outer_ndim: int) -> tuple[tuple[Box, Box], ...]:
    """Return this rank's boxes of each slab: (box in the slab, box in the local slab)."""
    sharding = tensor.decl.sharding
    coordinates = sharding.coordinates(sharding.position(rank))
    return slab_boxes(tensor.decl.spec.shape, sharding, coordinates, outer_ndim)


def as_copied(
    tensor: LocalTensor, first: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as integers, of which a copy keeps every bit, unless it casts."""
    return (first, second) if tensor.casts else (as_int_bits(first), as_int_bits(second))


def _slab_views(
    tile: torch.Tensor, tensor: LocalTensor, outer_ndim: int, first_slab: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slabs of the local tensor, and of the global one in the tile, to copy between."""
    spec = tensor.decl.spec
    local = slabs_of(tensor, outer_ndim=outer_ndim, first_slab=first_slab, count=count)
    in_tile = tile.view(torch_dtype(spec.dtype)).view(count, *spec.shape[outer_ndim:])
    return as_copied(tensor, local, in_tile)


def values_on_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return values with the tensors in their lists and dicts on the parameter's device, as torch's
    `Optimizer.load_state_dict` does. A load reads such values into host memory.

    Values that are tensors stay: torch's step may want its counter in host memory.
    """
    return {
        name: value if isinstance(value, torch.Tensor) else _on_device(value, device)
        for name, value in values.items()
    }


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_device(item, device) for item in value)
    return value

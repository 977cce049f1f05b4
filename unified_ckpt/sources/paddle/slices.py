"""Tensors in Paddle's orientation, whole or in the slices of tensor parallel ranks, as fragments of
torch's tensors. Views of mapped files.

How wrong bytes could be read: a slice is joined on the wrong axis, or two copies of one tensor
differ. Slices must make up the whole, and copies are compared where they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from unified_ckpt.core.sharding.boxes import Box, full_box, intersect, runs
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.torch_state.tensors import as_contiguous, as_int_bits
from unified_ckpt.sources.paddle.names import TargetTensor
from unified_ckpt.views.shards import TensorShard

_SHARD_NBYTES = 64 << 20  # of what costs to load


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file has it. `load(box)` gives its elements there. `computed`: they are no
    alias of the file. `start`: the byte of file
    `path` from which they lie row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str
    load: Callable[[Box], torch.Tensor]
    computed: bool = False
    start: int | None = None

    def copy(self, box: Box) -> torch.Tensor:
        """Its elements there in new memory, or as good as new. Read, not mapped: columns of mapped
        rows fault in all pages of the file.
        """
        if self.start is None:
            return self.load(box)
        buffer = bytearray(box.numel * self.dtype.itemsize)
        view, item = memoryview(buffer), self.dtype.itemsize
        with open_binary(self.path) as file:
            for first, local, count in runs(
                box, self.shape, local=full_box(box.shape), local_shape=box.shape
            ):
                _read_exact(
                    file.fileno(),
                    view[local * item : (local + count) * item],
                    self.start + first * item,
                    self.path,
                )
        return (
            torch.frombuffer(buffer, dtype=self.dtype).view(box.shape)
            if buffer
            else torch.empty(box.shape, dtype=self.dtype, device="cpu")
        )


def _read_exact(fd: int, view: memoryview, start: int, path: str) -> None:
    while view:
        count = os.preadv(fd, [view], start)
        if count == 0:
            raise FormatError(f"{path}: ends at byte {start}; needed {start + len(view)}")
        view, start = view[count:], start + count


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a whole tensor: what `tensor` has from `offsets` on."""

    box: Box
    tensor: StoredTensor
    offsets: tuple[int, ...]


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view."""
    return tensor[
        tuple(slice(low, low + count) for low, count in zip(box.offsets, box.shape, strict=True))
    ]


def single_slice(tensor: StoredTensor) -> list[Slice]:
    """A tensor that is whole in one place."""
    return [Slice(full_box(tensor.shape), tensor, (0,) * len(tensor.shape))]


def concat_tp(
    name: str, slices: Sequence[StoredTensor], axis: int | None, *, sections: int
) -> list[Slice]:
    """The slices of tensor parallel ranks, in their order. `sections`: of a layer that fuses so
    many, each slice has a part of each.
    """
    first = slices[0]
    if len(slices) == 1:
        return single_slice(first)
    if axis is None:
        return single_slice(_compare_replicas(name, slices))
    shapes = {(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in slices}
    if (
        len(shapes) > 1
        or len({tensor.dtype for tensor in slices}) > 1
        or any(tensor.shape[axis] % sections for tensor in slices)
    ):
        has = ", ".join(f"{tensor.shape} in {tensor.path}" for tensor in slices)
        raise FormatError(f"{name}: its slices do not fit together on axis {axis}: {has}")
    parts, start = [], 0
    for section in range(sections):
        for tensor in slices:
            count = tensor.shape[axis] // sections
            shape = (*tensor.shape[:axis], count, *tensor.shape[axis + 1 :])
            box = Box(tuple(start if d == axis else 0 for d in range(len(shape))), shape)
            parts.append(
                Slice(
                    box,
                    tensor,
                    tuple(section * count if d == axis else 0 for d in range(len(shape))),
                )
            )
            start += count
    return parts


def full_shape(slices: Sequence[Slice]) -> tuple[int, ...]:
    """Of the whole tensor."""
    return tuple(
        max(low + count for low, count in dim)
        for dim in zip(*(zip(part.box.offsets, part.box.shape, strict=True) for part in slices))  # noqa: B905
    )


def _compare_replicas(name: str, replicas: Sequence[StoredTensor]) -> StoredTensor:
    """One tensor of several copies of it, which are compared where it is read."""
    first = replicas[0]
    for other in replicas[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise FormatError(
                f"{name}: is {first.dtype} {first.shape} in {first.path}, {other.dtype} {other.shape} in {other.path}"
            )
    return StoredTensor(
        first.dtype,
        first.shape,
        first.path,
        partial(_load_compared, name, tuple(replicas)),
        computed=True,
    )


def merge_replicas(name: str, replicas: Sequence[Sequence[Slice]]) -> list[Slice]:
    """One tensor, of several copies that may each lie in slices; their values are compared where
    they are read.
    """
    return (
        single_slice(_compare_replicas(name, [as_stored_tensor(slices) for slices in replicas]))
        if len(replicas) > 1
        else list(replicas[0])
    )


def as_stored_tensor(slices: Sequence[Slice]) -> StoredTensor:
    """What lies in slices as one tensor."""
    if len(slices) == 1:
        return slices[0].tensor
    return StoredTensor(
        slices[0].tensor.dtype,
        full_shape(slices),
        slices[0].tensor.path,
        partial(_load_slices, tuple(slices)),
        computed=True,
    )


def _load_compared(name: str, replicas: Sequence[StoredTensor], box: Box) -> torch.Tensor:
    values = replicas[0].load(box)
    for other in replicas[1:]:
        if not torch.equal(
            as_int_bits(values.contiguous()), as_int_bits(other.load(box).contiguous())
        ):
            raise IntegrityError(
                f"{name}: has other values in {other.path} than in {replicas[0].path}; needed copies of one tensor"
            )
    return values


def _load_slices(slices: Sequence[Slice], box: Box) -> torch.Tensor:
    values = torch.empty(box.shape, dtype=slices[0].tensor.dtype, device="cpu")
    for part in slices:
        common = intersect(part.box, box)
        if common is not None:
            narrow(values, _shift_box(common, box.offsets, (0,) * len(box.offsets))).copy_(
                part.tensor.copy(_box_in_tensor(part, common))
            )
    return values


def target_shards(slices: Sequence[Slice], target: TargetTensor) -> list[TensorShard]:
    """Those of one of torch's tensors."""
    shards = []
    for target_box, paddle_box in target.boxes:
        for part in slices:
            common = intersect(paddle_box, part.box)
            for piece in (
                _split_box(common, part.tensor, transposed=target.transposed)
                if common is not None
                else ()
            ):
                shifted = _shift_box(
                    piece,
                    paddle_box.offsets,
                    target_box.offsets[::-1] if target.transposed else target_box.offsets,
                )
                box = (
                    Box(shifted.offsets[::-1], shifted.shape[::-1])
                    if target.transposed
                    else shifted
                )
                load = partial(
                    _load, part.tensor, _box_in_tensor(part, piece), transposed=target.transposed
                )
                shards.append(
                    TensorShard(
                        box, load, part.tensor.path, cache=part.tensor.computed or target.transposed
                    )
                )
    return shards


def _split_box(box: Box, tensor: StoredTensor, *, transposed: bool) -> list[Box]:
    """What costs to load, as what is turned does, is loaded in pieces, cut where torch's rows are."""
    axis = len(box.shape) - 1 if transposed else 0
    row_nbytes = (
        tensor.dtype.itemsize * prod(box.shape) // max(1, box.shape[axis]) if box.shape else 0
    )
    row_count = max(1, _SHARD_NBYTES // max(1, row_nbytes))
    if not (tensor.computed or transposed) or not box.shape or box.shape[axis] <= row_count:
        return [box]
    return [
        Box(
            tuple(low + start if d == axis else low for d, low in enumerate(box.offsets)),
            tuple(min(row_count, n - start) if d == axis else n for d, n in enumerate(box.shape)),
        )
        for start in range(0, box.shape[axis], row_count)
    ]


def _load(tensor: StoredTensor, box: Box, *, transposed: bool) -> torch.Tensor:
    return (
        as_contiguous(as_contiguous(tensor.copy(box)).t()) if transposed else tensor.load(box)
    )  # in two steps: torch is fast only from contiguous memory


def _box_in_tensor(part: Slice, box: Box) -> Box:
    return _shift_box(box, part.box.offsets, part.offsets)


def _shift_box(box: Box, old_origin: Sequence[int], new_origin: Sequence[int]) -> Box:
    """The box, from one origin to another."""
    return Box(
        tuple(low - a + b for low, a, b in zip(box.offsets, old_origin, new_origin, strict=True)),
        box.shape,
    )

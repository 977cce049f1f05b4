"""Turns tensors in Paddle's layout, whole or split by tensor-parallel ranks, into torch shards.

How wrong bytes could be read: slices are joined along the wrong axis, or replicas of one tensor
differ. Slices must therefore fill the whole tensor, and replicas are compared when they are
read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from unified_ckpt.core.sharding.boxes import Box, full_box, intersect, relative_to, runs, shift
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.torch_state.tensors import as_contiguous, as_int_bits, from_bytes
from unified_ckpt.sources.paddle.names import GATE_UP, TargetTensor
from unified_ckpt.views.shards import TensorShard, shape_of_boxes

_SHARD_NBYTES = 64 << 20  # of tensors that are computed or transposed


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `load(box)` returns the box's elements.

    `computed`: `load` does not alias the file. `start`: the tensor lies row-major in `path` from
    this byte.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str
    load: Callable[[Box], torch.Tensor]
    computed: bool = False
    start: int | None = None

    def copy(self, box: Box) -> torch.Tensor:
        """Return a box in new memory, or in memory that nothing else uses.

        Read instead of mapping: columns of a mapped tensor would fault in all pages of the file.
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
        return from_bytes(buffer, self.dtype, box.shape)


def _read_exact(fd: int, view: memoryview, start: int, path: str) -> None:
    while view:
        count = os.preadv(fd, [view], start)
        if count == 0:
            raise FormatError(f"{path}: got {start} bytes, expected at least {start + len(view)}")
        view, start = view[count:], start + count


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a whole tensor: the elements of `tensor` from `offsets` on."""

    box: Box
    tensor: StoredTensor
    offsets: tuple[int, ...]


def single_slice(tensor: StoredTensor) -> list[Slice]:
    """Return a whole tensor as its only slice."""
    return [Slice(full_box(tensor.shape), tensor, (0,) * len(tensor.shape))]


def concat_tp(
    name: str, slices: Sequence[StoredTensor], axis: int | None, *, sections: int
) -> list[Slice]:
    """Join the slices of tensor-parallel ranks, given in rank order; axis None means replicas.

    `sections`: the layer fuses so many tensors, and each slice has a part of each of them.
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
        shapes_text = ", ".join(f"{tensor.shape} in {tensor.path}" for tensor in slices)
        raise FormatError(f"{name}: slices do not join along axis {axis}: got {shapes_text}")
    joined, start = [], 0
    for section in range(sections):
        for tensor in slices:
            count = tensor.shape[axis] // sections
            shape = (*tensor.shape[:axis], count, *tensor.shape[axis + 1 :])
            box = Box(tuple(start if d == axis else 0 for d in range(len(shape))), shape)
            joined.append(
                Slice(
                    box,
                    tensor,
                    tuple(section * count if d == axis else 0 for d in range(len(shape))),
                )
            )
            start += count
    return joined


def concat_ranks(
    name: str, by_rank: Mapping[int, Sequence[StoredTensor]], axis: int | None
) -> list[Slice]:
    """Join a parameter's tensors by tensor-parallel rank, each with its replicas."""
    slices = [
        concat_tp(name, replicas, None, sections=1)[0].tensor
        for _, replicas in sorted(by_rank.items())
    ]
    return concat_tp(name, slices, axis, sections=2 if f".{GATE_UP}." in name else 1)


def full_shape(slices: Sequence[Slice]) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    return shape_of_boxes([tp_slice.box for tp_slice in slices])


def _compare_replicas(name: str, replicas: Sequence[StoredTensor]) -> StoredTensor:
    """Return a tensor that compares its replicas whenever it is read."""
    first = replicas[0]
    for other in replicas[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise FormatError(
                f"{name}: got {first.dtype} {first.shape} in {first.path}, but {other.dtype} "
                f"{other.shape} in {other.path}"
            )
    return StoredTensor(
        first.dtype,
        first.shape,
        first.path,
        partial(_load_compared, name, tuple(replicas)),
        computed=True,
    )


def merge_replicas(name: str, replicas: Sequence[Sequence[Slice]]) -> list[Slice]:
    """Return one tensor for replicas that may each be split; their values are compared on read."""
    if len(replicas) == 1:
        return list(replicas[0])
    return single_slice(_compare_replicas(name, [as_stored_tensor(slices) for slices in replicas]))


def as_stored_tensor(slices: Sequence[Slice]) -> StoredTensor:
    """Return slices as one tensor."""
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
                f"{name}: values in {other.path} differ from those in {replicas[0].path}, expected "
                "replicas of one tensor"
            )
    return values


def _load_slices(slices: Sequence[Slice], box: Box) -> torch.Tensor:
    values = torch.empty(box.shape, dtype=slices[0].tensor.dtype, device="cpu")
    for tp_slice in slices:
        common = intersect(tp_slice.box, box)
        if common is not None:
            values[relative_to(common, box.offsets).slices] = tp_slice.tensor.copy(
                _box_in_tensor(tp_slice, common)
            )
    return values


def target_shards(slices: Sequence[Slice], target: TargetTensor) -> list[TensorShard]:
    """Return the shards of one torch tensor."""
    shards = []
    for target_box, paddle_box in target.boxes:
        origin = target_box.offsets[::-1] if target.transposed else target_box.offsets
        for tp_slice in slices:
            common = intersect(paddle_box, tp_slice.box)
            if common is None:
                continue
            for piece in _split_box(common, tp_slice.tensor, transposed=target.transposed):
                box = shift(relative_to(piece, paddle_box.offsets), origin)
                if target.transposed:
                    box = Box(box.offsets[::-1], box.shape[::-1])
                load = partial(
                    _load,
                    tp_slice.tensor,
                    _box_in_tensor(tp_slice, piece),
                    transposed=target.transposed,
                )
                shards.append(
                    TensorShard(
                        box,
                        load,
                        tp_slice.tensor.path,
                        cache=tp_slice.tensor.computed or target.transposed,
                    )
                )
    return shards


def _split_box(box: Box, tensor: StoredTensor, *, transposed: bool) -> list[Box]:
    """Split a box that is computed or transposed, along torch's rows, to bound memory."""
    axis = len(box.shape) - 1 if transposed else 0
    if not (tensor.computed or transposed) or not box.shape:
        return [box]
    row_nbytes = tensor.dtype.itemsize * prod(box.shape) // max(1, box.shape[axis])
    row_count = max(1, _SHARD_NBYTES // max(1, row_nbytes))
    if box.shape[axis] <= row_count:
        return [box]
    return [
        Box(
            tuple(low + start if d == axis else low for d, low in enumerate(box.offsets)),
            tuple(min(row_count, n - start) if d == axis else n for d, n in enumerate(box.shape)),
        )
        for start in range(0, box.shape[axis], row_count)
    ]


def _load(tensor: StoredTensor, box: Box, *, transposed: bool) -> torch.Tensor:
    if not transposed:
        return tensor.load(box)
    contiguous = as_contiguous(tensor.copy(box))  # else torch transposes slowly
    return as_contiguous(contiguous.t())


def _box_in_tensor(tp_slice: Slice, box: Box) -> Box:
    return shift(relative_to(box, tp_slice.box.offsets), tp_slice.offsets)

"""Boxes of a larger tensor in a local one, as their holder declares them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import index
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from unified_ckpt.core.sharding.boxes import Box, intersect, is_inside, range_to_boxes
from unified_ckpt.errors import LayoutError


class LocalBox(NamedTuple):
    """A box of the larger tensor, and where the local tensor has it.

    `local` has the shape of `box`, or one dim: elements of the flattened local tensor.
    """

    box: Box
    local: Box


class Shards:
    """A local tensor with boxes of a larger one that no rule describes, to save or to load into.

    `shards`: (global offsets, local offsets, sizes) of each box, as many of each as there are dims.
    Elements of `tensor` outside of all boxes are padding. Other ranks declare the other boxes, or
    the same ones as replicas. A save proves that all boxes together are the whole tensor.

    Rows 0, 1 and 6 of an [8, 4] tensor::

        uc.Shards(local, (8, 4), [((0, 0), (0, 0), (2, 4)), ((6, 0), (2, 0), (1, 4))])

    LayoutError for boxes outside of either tensor, or two of them at one local place, and for
    arguments of other types.
    """

    __slots__ = ("boxes", "global_shape", "tensor")

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]

    def __init__(
        self,
        tensor: torch.Tensor,
        global_shape: Sequence[int],
        shards: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    ) -> None:
        _check_type(tensor)
        shape = _sizes(global_shape, "global shape")
        boxes = list[LocalBox]()
        for shard in _triples(shards):
            start, local, sizes = (_sizes(each, "offset or size") for each in shard)
            pair = LocalBox(Box(start, sizes), Box(local, sizes))
            _check_inside(pair, shape, tuple(tensor.shape))
            boxes.append(pair)
        _check_disjoint([local for _, local in boxes if local.numel])
        self._set(tensor, shape, boxes)

    @classmethod
    def flat(cls, tensor: torch.Tensor, global_shape: Sequence[int], start: int) -> Shards:
        """Return shards that hold elements [start, start + numel) of the flattened larger tensor.

        `tensor`: of one dim. FSDP1 and optimizers that flatten parameters cut them so.
        LayoutError for elements outside of the larger tensor.
        """
        _check_type(tensor)
        shape, numel = _sizes(global_shape, "global shape"), tensor.numel()
        (start,) = _sizes((start,), "start")
        if tensor.dim() != 1 or start + numel > prod(shape):
            raise LayoutError(
                f"Shards.flat: got a local tensor of shape {tuple(tensor.shape)} from element "
                f"{start} on, expected one dim, and elements of a tensor of shape {shape}"
            )
        boxes, offset = list[LocalBox](), 0
        for box in range_to_boxes(shape, start, start + numel):
            boxes.append(LocalBox(box, Box((offset,), (box.numel,))))
            offset += box.numel
        shards = cls.__new__(cls)
        shards._set(tensor, shape, boxes)
        return shards

    def _set(
        self, tensor: torch.Tensor, global_shape: tuple[int, ...], boxes: Sequence[LocalBox]
    ) -> None:
        self.tensor, self.global_shape = tensor, global_shape
        self.boxes = tuple(each for each in boxes if each.box.numel)

    def like(self, tensor: torch.Tensor) -> Shards:
        """Return a tensor of the same local shape with the same boxes, such as optimizer state."""
        shards = Shards.__new__(Shards)
        shards._set(tensor, self.global_shape, self.boxes)
        return shards

    def views(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield each box that has elements, and the local elements in its shape, as a view."""
        tensor = self.tensor.detach()
        for box, local in self.boxes:
            source = tensor if len(local.shape) == tensor.dim() else tensor.view(-1)
            yield box, source[local.slices].view(box.shape)

    def nothing(self) -> tuple[Box, torch.Tensor]:
        """Return an empty box, and no elements of the local tensor in its shape.

        A tensor of no dims has no empty box: that has one dim.
        """
        sizes = (0,) * max(len(self.global_shape), 1)
        return Box(sizes, sizes), self.tensor.detach().new_empty(sizes)


def capture_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors as they are now, by reference: a `Shards` may get another one later."""
    return {
        name: each.like(each.tensor) if isinstance(each, Shards) else each
        for name, each in tensors.items()
    }


def _check_type(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        raise LayoutError(f"Shards: got a {type(tensor).__name__}, expected a local torch.Tensor")


def _triples(shards: Iterable[Sequence[Any]]) -> list[tuple[Any, Any, Any]]:
    try:
        return [(start, local, sizes) for start, local, sizes in shards]
    except (TypeError, ValueError):
        raise LayoutError(
            f"Shards: got the shards {shards!r}, expected (global offsets, local offsets, sizes) "
            "of each box"
        ) from None


def _sizes(values: Sequence[int], kind: str) -> tuple[int, ...]:
    try:
        sizes = tuple(map(index, values))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise LayoutError(f"Shards: got the {kind} {values!r}, expected integers from 0 on")
    return sizes


def _check_inside(pair: LocalBox, shape: tuple[int, ...], local_shape: tuple[int, ...]) -> None:
    box, local = pair
    ndims = {len(each) for each in (shape, local_shape, box.offsets, local.offsets, box.shape)}
    if len(ndims) > 1 or not is_inside(box, shape) or not is_inside(local, local_shape):
        raise LayoutError(
            f"Shards: got a box of shape {box.shape} at {box.offsets} of a tensor of shape "
            f"{shape}, at {local.offsets} of a local tensor of shape {local_shape}; expected it "
            "inside of both"
        )


def _check_disjoint(boxes: Sequence[Box]) -> None:
    """Raise LayoutError for two boxes that share elements of the local tensor."""
    active: list[Box] = []  # those that may reach into the next one, by the first dim
    for box in sorted(boxes, key=lambda box: box.offsets[:1]):
        active = [a for a in active if not a.shape or a.offsets[0] + a.shape[0] > box.offsets[0]]
        other = next((a for a in active if intersect(a, box) is not None), None)
        if other is not None:
            raise LayoutError(
                f"Shards: got boxes at {other.offsets} and {box.offsets} of the local tensor, of "
                f"shapes {other.shape} and {box.shape}, which overlap; expected one place for each"
            )
        active.append(box)

"""Boxes of a larger tensor in a local one, as their holder declares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from unified_ckpt.core.sharding.boxes import Box, is_inside, range_to_boxes
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

    LayoutError for boxes outside of either tensor.
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
        shape = tuple(global_shape)
        boxes = [
            LocalBox(Box(tuple(start), tuple(sizes)), Box(tuple(local), tuple(sizes)))
            for start, local, sizes in shards
        ]
        for box, local in boxes:
            if not is_inside(box, shape) or not is_inside(local, tensor.shape):
                raise LayoutError(
                    f"Shards: got a box of shape {box.shape} at {box.offsets} of a tensor of shape "
                    f"{shape}, at {local.offsets} of a local tensor of shape "
                    f"{tuple(tensor.shape)}; expected it inside of both"
                )
        self._set(tensor, shape, boxes)

    @classmethod
    def flat(cls, tensor: torch.Tensor, global_shape: Sequence[int], start: int) -> Shards:
        """Return shards that hold elements [start, start + numel) of the flattened larger tensor.

        `tensor`: of one dim. FSDP1 and optimizers that flatten parameters cut them so.
        LayoutError for elements outside of the larger tensor.
        """
        shape, numel = tuple(global_shape), tensor.numel()
        if tensor.dim() != 1 or not 0 <= start <= start + numel <= prod(shape):
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
        """Return an empty box, and no elements of the local tensor in its shape."""
        sizes = (0,) * len(self.global_shape)
        return Box(sizes, sizes), self.tensor.detach().new_empty(sizes)

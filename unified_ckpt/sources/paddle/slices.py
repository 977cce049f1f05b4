"""Tensors in Paddle's orientation, whole or in the slices of tensor parallel ranks, as fragments of torch's tensors. Views of mapped files.

How wrong bytes could be read: a slice is joined on the wrong axis, or two copies of one tensor differ. Slices must make up the whole, and
copies are compared where they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from unified_ckpt.core.sharding.boxes import Box, intersect, runs, whole
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.runtime.torch_state.tensors import dense, same_bits
from unified_ckpt.sources.paddle.names import Cut
from unified_ckpt.views.shards import Fragment

_FRAGMENT_NBYTES = 64 << 20  # of what costs to load


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as a file has it. `load(box)` gives its elements there. `costs`: they are no alias of the file. `start`: the byte of file
    `where` from which they lie row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    where: str
    load: Callable[[Box], torch.Tensor]
    costs: bool = False
    start: int | None = None

    def copy(self, box: Box) -> torch.Tensor:
        """Its elements there in new memory, or as good as new. Read, not mapped: columns of mapped rows fault in all pages of the file."""
        if self.start is None:
            return self.load(box)
        held = bytearray(box.numel * self.dtype.itemsize)
        view, item = memoryview(held), self.dtype.itemsize
        with open_file(self.where) as file:
            for first, local, count in runs(
                box, self.shape, local=whole(box.shape), local_shape=box.shape
            ):
                _fill(
                    file.fileno(),
                    view[local * item : (local + count) * item],
                    self.start + first * item,
                    self.where,
                )
        return (
            torch.frombuffer(held, dtype=self.dtype).view(box.shape)
            if held
            else torch.empty(box.shape, dtype=self.dtype, device="cpu")
        )


def _fill(fd: int, view: memoryview, start: int, path: str) -> None:
    while view:
        count = os.preadv(fd, [view], start)
        if count == 0:
            raise FormatError(f"{path}: ends at byte {start}; needed {start + len(view)}")
        view, start = view[count:], start + count


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of a whole tensor: what `held` has from `offsets` on."""

    box: Box
    held: Held
    offsets: tuple[int, ...]


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view."""
    return tensor[
        tuple(slice(low, low + count) for low, count in zip(box.offsets, box.shape, strict=True))
    ]


def lone(held: Held) -> list[Slab]:
    """A tensor that is whole in one place."""
    return [Slab(whole(held.shape), held, (0,) * len(held.shape))]


def joined(name: str, slices: Sequence[Held], axis: int | None, *, sections: int) -> list[Slab]:
    """The slices of tensor parallel ranks, in their order. `sections`: of a layer that fuses so many, each slice has a part of each."""
    first = slices[0]
    if len(slices) == 1:
        return lone(first)
    if axis is None:
        return lone(_alike(name, slices))
    shapes = {(*one.shape[:axis], *one.shape[axis + 1 :]) for one in slices}
    if (
        len(shapes) > 1
        or len({one.dtype for one in slices}) > 1
        or any(one.shape[axis] % sections for one in slices)
    ):
        has = ", ".join(f"{one.shape} in {one.where}" for one in slices)
        raise FormatError(f"{name}: its slices do not fit together on axis {axis}: {has}")
    found, at = [], 0
    for section in range(sections):
        for one in slices:
            count = one.shape[axis] // sections
            shape = (*one.shape[:axis], count, *one.shape[axis + 1 :])
            box = Box(tuple(at if d == axis else 0 for d in range(len(shape))), shape)
            found.append(
                Slab(
                    box, one, tuple(section * count if d == axis else 0 for d in range(len(shape)))
                )
            )
            at += count
    return found


def shape_of(slabs: Sequence[Slab]) -> tuple[int, ...]:
    """Of the whole tensor."""
    return tuple(
        max(low + count for low, count in dim)
        for dim in zip(*(zip(s.box.offsets, s.box.shape, strict=True) for s in slabs))  # noqa: B905
    )


def _alike(name: str, copies: Sequence[Held]) -> Held:
    """One tensor of several copies of it, which are compared where it is read."""
    first = copies[0]
    for other in copies[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise FormatError(
                f"{name}: is {first.dtype} {first.shape} in {first.where}, {other.dtype} {other.shape} in {other.where}"
            )
    return Held(
        first.dtype, first.shape, first.where, partial(_compared, name, tuple(copies)), costs=True
    )


def alike(name: str, copies: Sequence[Sequence[Slab]]) -> list[Slab]:
    """One tensor, of several copies that may each lie in slices; their values are compared where they are read."""
    return (
        lone(_alike(name, [as_held(one) for one in copies])) if len(copies) > 1 else list(copies[0])
    )


def as_held(slabs: Sequence[Slab]) -> Held:
    """What lies in slices as one tensor."""
    if len(slabs) == 1:
        return slabs[0].held
    return Held(
        slabs[0].held.dtype,
        shape_of(slabs),
        slabs[0].held.where,
        partial(_gathered, tuple(slabs)),
        costs=True,
    )


def _compared(name: str, copies: Sequence[Held], box: Box) -> torch.Tensor:
    found = copies[0].load(box)
    for other in copies[1:]:
        if not torch.equal(same_bits(found.contiguous()), same_bits(other.load(box).contiguous())):
            raise IntegrityError(
                f"{name}: has other values in {other.where} than in {copies[0].where}; needed copies of one tensor"
            )
    return found


def _gathered(slabs: Sequence[Slab], box: Box) -> torch.Tensor:
    found = torch.empty(box.shape, dtype=slabs[0].held.dtype, device="cpu")
    for slab in slabs:
        common = intersect(slab.box, box)
        if common is not None:
            narrowed(found, _moved(common, box.offsets, (0,) * len(box.offsets))).copy_(
                slab.held.copy(_in_held(slab, common))
            )
    return found


def fragments(slabs: Sequence[Slab], cut: Cut) -> list[Fragment]:
    """Those of one of torch's tensors."""
    found = []
    for ours, theirs in cut.boxes:
        for slab in slabs:
            common = intersect(theirs, slab.box)
            for piece in (
                _pieces(common, slab.held, turned=cut.turned) if common is not None else ()
            ):
                at = _moved(
                    piece, theirs.offsets, ours.offsets[::-1] if cut.turned else ours.offsets
                )
                box = Box(at.offsets[::-1], at.shape[::-1]) if cut.turned else at
                load = partial(_load, slab.held, _in_held(slab, piece), turned=cut.turned)
                found.append(
                    Fragment(box, load, slab.held.where, keep=slab.held.costs or cut.turned)
                )
    return found


def _pieces(box: Box, held: Held, *, turned: bool) -> list[Box]:
    """What costs to load, as what is turned does, is loaded in pieces, cut where torch's rows are."""
    axis = len(box.shape) - 1 if turned else 0
    line = held.dtype.itemsize * prod(box.shape) // max(1, box.shape[axis]) if box.shape else 0
    step = max(1, _FRAGMENT_NBYTES // max(1, line))
    if not (held.costs or turned) or not box.shape or box.shape[axis] <= step:
        return [box]
    return [
        Box(
            tuple(low + at if d == axis else low for d, low in enumerate(box.offsets)),
            tuple(min(step, n - at) if d == axis else n for d, n in enumerate(box.shape)),
        )
        for at in range(0, box.shape[axis], step)
    ]


def _load(held: Held, box: Box, *, turned: bool) -> torch.Tensor:
    return (
        dense(dense(held.copy(box)).t()) if turned else held.load(box)
    )  # in two steps: torch is fast only from contiguous memory


def _in_held(slab: Slab, box: Box) -> Box:
    return _moved(box, slab.box.offsets, slab.offsets)


def _moved(box: Box, old: Sequence[int], new: Sequence[int]) -> Box:
    """The box, from one origin to another."""
    return Box(
        tuple(low - a + b for low, a, b in zip(box.offsets, old, new, strict=True)), box.shape
    )

"""The bytes of one rank's tensors: dtypes, views and copies between a part in memory and the lines of a tile. Knows no names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from unified_ckpt.core.planning.slabs import inner_boxes
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Row
from unified_ckpt.errors import LayoutError, MismatchError

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, theirs) for name, theirs in _NAMES.items() if hasattr(torch, theirs)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
ELEMENT = ((Box((), ()), Box((), ())),)  # the boxes of a line that is one element
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of an item size


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of one tensor. `row.spec.dtype` is the dtype on disk; `local`'s may differ, then copies cast.

    `local` aliases the caller's memory and has the shape that the row's sharding gives this rank.
    """

    row: Row
    local: torch.Tensor

    @property
    def casts(self) -> bool:
        return DTYPE_NAMES[self.local.dtype] != self.row.spec.dtype

    @property
    def plain(self) -> bool:
        """Whether the part's memory is, byte for byte, what a file holds of it."""
        return not self.casts and self.local.device.type == "cpu" and self.local.is_contiguous()


def check_tensors(tensors: Mapping[Any, Any], argument: str) -> None:
    """LayoutError for a key that is no name, or a value that is no tensor. `argument`: of the caller, who gave this dict."""
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise LayoutError(f"{argument}: got the key {name!r}, expected names of tensors")
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(
                f"{argument}[{name!r}]: got a {type(tensor).__name__}, expected a torch.Tensor"
            )
        if tensor.is_nested:
            raise LayoutError(f"{argument}[{name!r}]: got a nested tensor, expected a dense one")


def dtype_name(dtype: torch.dtype, *, fqn: str) -> str:
    """safetensors' name of a torch dtype. MismatchError where a file cannot hold it."""
    if dtype not in DTYPE_NAMES:
        raise MismatchError(
            f"{fqn}: dtype {dtype} has no name in safetensors; needed one of {', '.join(map(str, DTYPE_NAMES))}"
        )
    return DTYPE_NAMES[dtype]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes; an alias."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # One element is contiguous whatever its stride, and `view` looks at that.
    flat: Any = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)


def same_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its item size: copies then keep every bit and work for every dtype."""
    return tensor.view(BITS[tensor.element_size()])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major memory: itself where it is so, else a copy."""
    return tensor if tensor.is_contiguous() else same_bits(tensor).contiguous().view(tensor.dtype)


def lines_of(part: Part, *, split: int, first_line: int, lines: int) -> torch.Tensor:
    """Lines [first_line, +lines) of the part: its dims left of `split` flattened; an alias where the part is contiguous."""
    shape = part.local.shape
    flat = part.local.reshape(
        prod(shape[:split]), *shape[split:]
    )  # [all lines, rest of the local shape]
    return flat[first_line : first_line + lines]


def fill_lines(
    tile: torch.Tensor,
    part: Part,
    boxes: Sequence[tuple[Box, Box]],
    *,
    split: int,
    first_line: int,
    lines: int,
) -> None:
    """Copies what the part holds of the lines into the tile's bytes (uint8 [lines * line bytes])."""
    source = lines_of(part, split=split, first_line=first_line, lines=lines)
    target = _typed(tile, part, split=split, lines=lines)
    if not part.casts:
        source, target = same_bits(source), same_bits(target)
    for in_line, in_local in boxes:
        target[_slices(in_line)].copy_(source[_slices(in_local)])


def fill_whole(tile: torch.Tensor, locals_: Sequence[torch.Tensor]) -> None:
    """Copies tensors of one dtype and device into the tile's bytes, one after the other: one call for many small ones."""
    flat = [same_bits(local.reshape(-1)) for local in locals_]
    target = tile.view(flat[0].dtype)
    if flat[0].device.type == "cpu":
        torch.cat(flat, out=target)
    else:
        target.copy_(torch.cat(flat))


def empty_whole(tile: torch.Tensor, locals_: Sequence[torch.Tensor]) -> None:
    """The reverse: copies from the tile's bytes into tensors of one dtype and device, one after the other."""
    flat = [same_bits(local.view(-1)) for local in locals_]
    source = tile.view(flat[0].dtype).to(flat[0].device)
    torch._foreach_copy_(flat, list(torch.split(source, [one.numel() for one in flat])))


def copy_lines(target: torch.Tensor, part: Part, *, split: int, first_line: int) -> None:
    """Copies as many lines of the part as the target has, [lines, *local shape from `split` on], of the dtype on disk."""
    source = lines_of(part, split=split, first_line=first_line, lines=len(target))
    if not part.casts:
        source, target = same_bits(source), same_bits(target)
    target.copy_(source)


def empty_lines(
    tile: torch.Tensor,
    part: Part,
    boxes: Sequence[tuple[Box, Box]],
    *,
    split: int,
    first_line: int,
    lines: int,
) -> None:
    """The reverse: copies from the tile's bytes into the part, which must be contiguous."""
    target = lines_of(part, split=split, first_line=first_line, lines=lines)
    source = _typed(tile, part, split=split, lines=lines)
    if not part.casts:
        source, target = same_bits(source), same_bits(target)
    for in_line, in_local in boxes:
        target[_slices(in_local)].copy_(source[_slices(in_line)])


def boxes_in_line(part: Part, rank: int, split: int) -> tuple[tuple[Box, Box], ...]:
    """What the rank holds of each line: (box in the line, box in the local line)."""
    sharding = part.row.sharding
    position = sharding.position(rank)
    if position is None:
        return ()
    return inner_boxes(part.row.spec.shape, sharding, sharding.coordinates(position), split)


def _typed(tile: torch.Tensor, part: Part, *, split: int, lines: int) -> torch.Tensor:
    return tile.view(TORCH_DTYPES[part.row.spec.dtype]).view(lines, *part.row.spec.shape[split:])


def _slices(box: Box) -> tuple[slice, ...]:
    return (
        slice(None),
        *(slice(offset, offset + n) for offset, n in zip(box.offsets, box.shape, strict=True)),
    )

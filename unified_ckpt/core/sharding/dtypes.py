"""The dtype names of safetensors, their sizes, and their order in a file. Knows nothing of torch or
numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unified_ckpt.errors import FormatError

# Highest first: the order in which the safetensors library lays out the tensors of a file.
_BY_FILE_ORDER: tuple[tuple[str, int], ...] = (
    ("U64", 64),
    ("I64", 64),
    ("F64", 64),
    ("C64", 64),
    ("F32", 32),
    ("U32", 32),
    ("I32", 32),
    ("BF16", 16),
    ("F16", 16),
    ("U16", 16),
    ("I16", 16),
    ("F8_E5M2FNUZ", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3", 8),
    ("F8_E5M2", 8),
    ("I8", 8),
    ("U8", 8),
    ("F6_E3M2", 6),
    ("F6_E2M3", 6),
    ("F4", 4),
    ("BOOL", 8),
)
ITEM_BITS: dict[str, int] = dict(_BY_FILE_ORDER)
DTYPE_ORDER: dict[str, int] = {name: order for order, (name, _) in enumerate(_BY_FILE_ORDER)}


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a row-major tensor. Raises FormatError for an unknown dtype or a sub-byte tensor
    that does not end on a byte.
    """
    if dtype not in ITEM_BITS:
        raise FormatError(f"unknown dtype {dtype!r}; known: {', '.join(ITEM_BITS)}")
    bits = ITEM_BITS[dtype] * prod(shape)
    if bits % 8:
        raise FormatError(
            f"{dtype} tensor of shape {tuple(shape)} has {bits} bits; needed a multiple of 8"
        )
    return bits // 8


def itemsize(dtype: str) -> int:
    """Bytes of one element as memory holds it; F4 is held in pairs of one byte (see
    `memory_shape`). FormatError for what has no such size.
    """
    if dtype == "F4":
        return 1
    bits = ITEM_BITS.get(dtype, 0)
    if bits % 8 or not bits:
        raise FormatError(
            f"{dtype} has no whole number of bytes per element; needed one of {', '.join(ITEM_BITS)} without F6"
        )
    return bits // 8


def memory_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in memory of a shape in a file's header: F4 holds two elements of the last dim in a
    byte, as torch does.
    """
    if dtype != "F4":
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise FormatError(f"F4 tensor of shape {tuple(shape)}: needed an even last dim")
    return (*shape[:-1], shape[-1] // 2)


def file_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `memory_shape`."""
    if dtype != "F4":
        return tuple(shape)
    if not shape:
        raise FormatError("F4 tensor of no dims: needed at least one")
    return (*shape[:-1], shape[-1] * 2)

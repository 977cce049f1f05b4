"""The dtypes of safetensors: names, sizes, and their order in a file."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unified_ckpt.errors import FormatError

# The order in which the safetensors library lays out the tensors of a file: first to last.
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
TORCH_NAMES = {  # torch has no other dtypes of safetensors
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
# The bits after the leading one, and the exponents of the least and the greatest power of two.
_FLOATS = {
    "F64": (52, -1074, 1023),
    "F32": (23, -149, 127),
    "BF16": (7, -133, 127),
    "F16": (10, -24, 15),
    "F8_E5M2FNUZ": (2, -17, 15),
    "F8_E4M3FNUZ": (3, -10, 7),
    "F8_E8M0": (0, -127, 127),
    "F8_E4M3": (3, -9, 8),
    "F8_E5M2": (2, -16, 15),
}
# Bits of the values from 0, and whether there are negative ones.
_INTEGERS = {
    name: (bits - (name[0] == "I"), name[0] == "I")
    for name, bits in _BY_FILE_ORDER
    if name[0] in "IU"
}
DTYPE_ORDER: dict[str, int] = {name: order for order, (name, _) in enumerate(_BY_FILE_ORDER)}


def is_exact_cast(dtype: str, target: str) -> bool:
    """Return whether a cast to another dtype of the same kind changes no value.

    Floats and integers are two kinds: codes of quantized tensors are integers. No 8-bit float holds
    another: some have no infinity, no negative zero, or no zero.
    """
    if dtype == target:
        return True
    if dtype in _FLOATS and target in _FLOATS:
        bits, least, greatest = _FLOATS[dtype]
        target_bits, target_least, target_greatest = _FLOATS[target]
        is_in_range = target_least <= least and greatest <= target_greatest
        return bits <= target_bits and is_in_range and ITEM_BITS[target] > 8
    if dtype in _INTEGERS and target in _INTEGERS:
        (bits, is_signed), (target_bits, target_is_signed) = _INTEGERS[dtype], _INTEGERS[target]
        return bits <= target_bits and is_signed <= target_is_signed
    return False


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a row-major tensor.

    Raises FormatError for an unknown dtype, or for a sub-byte tensor that does not fill its last
    byte.
    """
    if dtype not in ITEM_BITS:
        raise FormatError(f"dtype: got {dtype!r}, expected one of {', '.join(ITEM_BITS)}")
    bits = ITEM_BITS[dtype] * prod(shape)
    if bits % 8:
        raise FormatError(
            f"{dtype} tensor of shape {tuple(shape)}: got {bits} bits, expected a multiple of 8"
        )
    return bits // 8


def itemsize(dtype: str) -> int:
    """Return the bytes of one element in memory; of F4, of a pair (see `memory_shape`).

    Raises FormatError for a dtype without a whole number of bytes.
    """
    if dtype == "F4":
        return 1
    bits = ITEM_BITS.get(dtype, 0)
    if bits % 8 or not bits:
        raise FormatError(
            f"dtype: got {dtype}, which has no whole number of bytes per element; "
            f"expected one of {', '.join(name for name in ITEM_BITS if not name.startswith('F6_'))}"
        )
    return bits // 8


def memory_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the in-memory shape of a tensor whose file header has `shape`.

    They differ for F4 only: torch packs two elements of the last dim into one byte.
    """
    if dtype != "F4":
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise FormatError(f"F4 tensor: got shape {tuple(shape)}, expected an even last dim")
    return (*shape[:-1], shape[-1] // 2)


def file_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in a file's header of a tensor that has `shape` in memory."""
    if dtype != "F4":
        return tuple(shape)
    if not shape:
        raise FormatError("F4 tensor: got no dims, expected at least one")
    return (*shape[:-1], shape[-1] * 2)

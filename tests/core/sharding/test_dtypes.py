from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unified_ckpt.core.sharding.dtypes import (
    ITEM_BITS,
    file_shape,
    is_exact_cast,
    itemsize,
    memory_shape,
    nbytes,
)
from unified_ckpt.errors import FormatError


def test_bytes_of_a_tensor() -> None:
    assert nbytes("F32", (3, 5)) == 60
    assert nbytes("BOOL", ()) == 1
    assert nbytes("F64", (4, 0)) == 0
    assert nbytes("F4", (3, 6)) == 9, "as a file's header counts elements"
    assert nbytes("F6_E2M3", (4,)) == 3


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BITS) - {"F4", "F6_E2M3", "F6_E3M2"}))
def test_elements_in_memory_are_those_in_the_file(dtype: str) -> None:
    assert itemsize(dtype) == nbytes(dtype, (1,))
    assert memory_shape(dtype, (3, 5)) == file_shape(dtype, (3, 5)) == (3, 5)


def test_two_elements_of_four_bits_share_a_byte_in_memory() -> None:
    assert itemsize("F4") == 1
    assert memory_shape("F4", (3, 6)) == (3, 3)
    assert file_shape("F4", (3, 3)) == (3, 6)


TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def values(dtype: str) -> torch.Tensor:
    """All values of a dtype, or those of 32 and 64 bits at its limits."""
    kind, bits = TORCH[dtype], ITEM_BITS[dtype]
    if bits <= 16:
        patterns = torch.arange(2**bits, dtype=torch.int32)
        return patterns.to(torch.uint8 if bits == 8 else torch.int16).view(kind)
    if kind.is_floating_point:
        limits = torch.finfo(kind)
        least = limits.smallest_normal * limits.eps
        exact = [limits.max, limits.min, limits.smallest_normal, least, 1 + limits.eps, 0.1]
        return torch.tensor([*exact, float("inf"), float("nan"), -0.0], dtype=kind)
    return torch.tensor([torch.iinfo(kind).max, torch.iinfo(kind).min, 1, 0], dtype=kind)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("target", TORCH)
def test_exact_casts_keep_every_value(dtype: str, target: str) -> None:
    """torch casts every value there and compares. Floats and integers are two kinds."""
    before = values(dtype)
    after, kind = before.to(TORCH[target]), TORCH[dtype].is_floating_point
    if kind:
        same = (after.double() == before.double()) | (after.isnan() & before.isnan())
    else:
        same = after.to(torch.int64) == before.to(torch.int64)
    one_kind = kind == TORCH[target].is_floating_point
    assert is_exact_cast(dtype, target) == (one_kind and bool(same.all()))


def test_exact_casts_of_other_dtypes() -> None:
    """Those for which torch has no values, or no casts."""
    assert is_exact_cast("F8_E8M0", "BF16")
    assert is_exact_cast("U16", "I32")
    assert not is_exact_cast("F8_E8M0", "F16")
    assert not is_exact_cast("U32", "I32")
    assert is_exact_cast("F4", "F4")
    for dtype, target in (("F4", "F32"), ("F6_E2M3", "F32"), ("BOOL", "U8"), ("C64", "F64")):
        assert not is_exact_cast(dtype, target)


WHOLE = "which has no whole number of bytes per element"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nbytes("F4", (3,)), r"^F4 tensor of shape .*: got .* bits, expected a multiple"),
        (lambda: nbytes("F6_E3M2", (2, 3)), r"^F6_E3M2 tensor of shape .*: got .* bits, expected"),
        (lambda: nbytes("F128", (1,)), r"^dtype: got 'F128', expected one of U64, "),
        (lambda: memory_shape("F4", (3, 5)), r"F4 tensor: got shape .*, expected an even last dim"),
        (lambda: memory_shape("F4", ()), r"F4 tensor: got shape .*, expected an even last dim"),
        (lambda: file_shape("F4", ()), r"F4 tensor: got no dims, expected at least one"),
        (lambda: itemsize("F6_E2M3"), rf"^dtype: got F6_E2M3, {WHOLE}"),
        (lambda: itemsize("F6_E3M2"), rf"^dtype: got F6_E3M2, {WHOLE}"),
        (lambda: itemsize("F128"), rf"^dtype: got F128, {WHOLE}"),
    ],
)
def test_sizes_that_do_not_exist_are_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        call()

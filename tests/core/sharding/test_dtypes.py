from __future__ import annotations

from collections.abc import Callable

import pytest

from unified_ckpt.core.sharding.dtypes import ITEM_BITS, file_shape, itemsize, memory_shape, nbytes
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

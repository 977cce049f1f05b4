from __future__ import annotations

import pytest

from unified_ckpt.core.sharding.dtypes import ITEM_BITS, file_shape, itemsize, memory_shape, nbytes
from unified_ckpt.errors import FormatError


def test_bytes_of_a_tensor() -> None:
    assert nbytes("F32", (3, 5)) == 60
    assert nbytes("BOOL", ()) == 1
    assert nbytes("F64", (4, 0)) == 0
    assert nbytes("F4", (3, 6)) == 9, "as a file's header counts elements"
    assert nbytes("F6_E2M3", (4,)) == 3


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (3,)), ("F6_E3M2", (2, 3))])
def test_a_tensor_ends_on_a_byte(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        FormatError, match=rf"^{dtype} tensor of shape .*: got .* bits, expected a multiple of 8$"
    ):
        nbytes(dtype, shape)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(FormatError, match=r"^dtype: got 'F128', expected one of U64, "):
        nbytes("F128", (1,))


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BITS) - {"F4", "F6_E2M3", "F6_E3M2"}))
def test_elements_in_memory_are_those_in_the_file(dtype: str) -> None:
    assert itemsize(dtype) == nbytes(dtype, (1,))
    assert memory_shape(dtype, (3, 5)) == file_shape(dtype, (3, 5)) == (3, 5)


def test_two_elements_of_four_bits_share_a_byte_in_memory() -> None:
    assert itemsize("F4") == 1
    assert memory_shape("F4", (3, 6)) == (3, 3)
    assert file_shape("F4", (3, 3)) == (3, 6)
    for shape in ((3, 5), ()):
        with pytest.raises(
            FormatError, match=r"F4 tensor: got shape .*, expected an even last dim"
        ):
            memory_shape("F4", shape)
    with pytest.raises(FormatError, match=r"F4 tensor: got no dims, expected at least one"):
        file_shape("F4", ())


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2", "F128"])
def test_elements_without_whole_bytes_have_no_size_in_memory(dtype: str) -> None:
    with pytest.raises(
        FormatError, match=rf"^dtype: got {dtype}, which has no whole number of bytes per element"
    ):
        itemsize(dtype)

"""The exceptions file: what is written is read, and anything else is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

import unified_ckpt as uc
from unified_ckpt.format.outliers import (
    encode_outliers,
    is_too_many,
    join_elements,
    outliers_record,
    parse_outliers,
)

SHAPES = {"w": (4, 8), "layer.index": (100,)}
NANS = np.array([0x7FC00001, 0xFF800001, 0x80000000], np.uint32)


def elements(indices: list[int]) -> tuple[Any, Any]:
    return np.array(indices, np.int64), NANS[: len(indices)]


def test_stock_tools_read_the_file_and_values_keep_their_bits() -> None:
    written = {"w": elements([0, 7, 31]), "layer.index": elements([99])}
    body = encode_outliers(written)
    record = outliers_record("optimizer", body)
    assert (record.file, record.nbytes) == ("optimizer.exceptions.safetensors", len(body))
    arrays = load(body)
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "w.index": (np.int64, (3,)),
        "w.value": (np.float32, (3,)),
        "layer.index.index": (np.int64, (1,)),
        "layer.index.value": (np.float32, (1,)),
    }
    assert np.array_equal(arrays["w.value"].view(np.uint32), NANS)
    parsed = parse_outliers(body, SHAPES, file="f")
    assert parsed.keys() == written.keys()
    for fqn, (indices, values) in parsed.items():
        assert np.array_equal(indices, written[fqn][0])
        assert np.array_equal(values, written[fqn][1])


FLOATS = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"w.index": np.array([0, 1, 2])}, r"w\.value|got only"),
        ({"w.index": np.array([0, 1, 2]), "w.value": FLOATS}, r"\[3\].*\[2\]"),
        ({"w.index": np.array([[0, 1]]), "w.value": FLOATS[None]}, r"w: got I64 \[1, 2\]"),
        ({"w.index": np.array([0, 1], np.int32), "w.value": FLOATS}, "w: got I32"),
        ({"w.index": np.array([0, 1]), "w.value": FLOATS.astype(np.float64)}, "F64"),
        ({"w.index": np.array([0, 32]), "w.value": FLOATS}, "w: .*below 32"),
        ({"w.index": np.array([-1, 3]), "w.value": FLOATS}, "w: .*below 32"),
        ({"w.index": np.array([3, 3]), "w.value": FLOATS}, "w: .*ascending"),
        ({"w.index": np.array([4, 3]), "w.value": FLOATS}, "w: .*ascending"),
        ({"v.index": np.array([0, 1]), "v.value": FLOATS}, r"v\.(index|value)"),
        ({"w.other": FLOATS}, r"w\.other"),
        ({"w": FLOATS}, "'w'"),
    ],
)
def test_other_content_is_refused(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(uc.FormatError, match=f"^the file: .*{message}"):
        parse_outliers(save(arrays), SHAPES, file="the file")


def test_truncated_file_is_refused() -> None:
    body = encode_outliers({"w": elements([1, 2])})
    for size in (0, 7, 20, len(body) - 1):
        with pytest.raises(uc.CheckpointError, match="the file"):
            parse_outliers(body[:size], SHAPES, file="the file")


def test_elements_of_several_ranks_are_joined_in_order() -> None:
    indices, values = join_elements([elements([5, 9]), elements([0, 5])])
    assert indices.tolist() == [0, 5, 9]
    assert values.tolist() == [NANS[0], NANS[0], NANS[1]]


def test_a_tensor_of_many_exceptions_is_plain() -> None:
    assert not is_too_many(1, (1,))
    assert not is_too_many(10, (64, 10))
    assert is_too_many(11, (64, 10))

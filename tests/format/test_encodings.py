"""Encodings of masters and moments: what comes back, and that it stays when encoded again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from unified_ckpt.format.encodings import (
    BLOCK_SIZE,
    BlockEncoding,
    decode_masters,
    encode_masters,
    first_moment,
    second_moment,
)

Rows = NDArray[np.float32]
SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=3 * BLOCK_SIZE + 5)
FIRST = [first_moment(bits) for bits in (8, 6)]
SECOND = [second_moment(bits) for bits in (8, 4)]
every_encoding = pytest.mark.parametrize("encoding", [*FIRST, *SECOND], ids=lambda e: e.name)


def rounded(master: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The bits of masters in bfloat16, as torch rounds them."""
    bits = torch.from_numpy(master.view(np.int32)).view(torch.float32).to(torch.bfloat16)
    return bits.view(torch.int16).numpy().view(np.uint16)


@st.composite
def rows_for(draw: st.DrawFn, *, signed: bool) -> Rows:
    """Finite rows over the whole range of float32: zeros, subnormals, one value, wide blocks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(SHAPES)
    low, high = sorted((draw(st.integers(-149, 127)), draw(st.integers(-149, 127))))
    exponents = rng.integers(low, high + 1, shape)
    values = np.ldexp(rng.uniform(0.5, 1, shape), exponents).astype(np.float32)
    values[rng.random(shape) < draw(st.sampled_from((0.0, 0.1, 1.0)))] = 0
    return np.where(rng.random(shape) < 0.5 * signed, -values, values)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_masters_come_back_except_at_exceptions(low: int) -> None:
    """All high halves: both signs, infinities, NaNs, subnormals, and steps over an exponent."""
    master = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(low)
    model = rounded(master)
    encoded, exceptions = encode_masters(master, model)
    assert encoded.itemsize == 2
    assert np.array_equal(exceptions, np.flatnonzero(decode_masters(encoded, model) != master))
    is_nan = (master & 0x7FFFFFFF) > 0x7F800000
    is_tie = low == 0x8000
    # A tie is an exception where it is rounded down, to even high bits.
    expected = ~is_nan & is_tie & (np.arange(1 << 16) % 2 == 0)
    assert np.array_equal(np.isin(np.flatnonzero(~is_nan), exceptions), expected[~is_nan])


def test_masters_of_another_model_are_exceptions() -> None:
    rng = np.random.default_rng(0)
    master = rng.integers(0, 1 << 32, 10_000, dtype=np.uint32)
    model = rounded(master)
    drifted = rng.choice(10_000, 100, replace=False)
    model[drifted] ^= 1
    encoded, exceptions = encode_masters(master, model)
    assert np.array_equal(exceptions, np.flatnonzero(decode_masters(encoded, model) != master))
    assert np.isin(drifted, exceptions).all()


def check_stable(encoding: BlockEncoding, rows: Rows) -> Rows:
    """Check sizes, and that what was decoded is encoded to the same bytes; return it."""
    encoded = encoding.encode(rows)
    blocks = -(-rows.shape[1] // BLOCK_SIZE)
    assert encoded.codes.shape == (len(rows), encoding.packed_nbytes(rows.shape[1]))
    assert encoded.scales.shape == (len(rows), blocks, encoding.scales_per_block)
    decoded = encoding.decode(encoded, rows.shape[1])
    assert decoded.dtype == np.float32
    assert decoded.shape == rows.shape
    again = encoding.encode(decoded)
    assert np.array_equal(again.codes, encoded.codes)
    assert np.array_equal(again.scales, encoded.scales)
    return decoded


@pytest.mark.parametrize("encoding", FIRST, ids=lambda e: e.name)
@given(rows=rows_for(signed=True))
def test_first_moment_of_any_size_is_stable(encoding: BlockEncoding, rows: Rows) -> None:
    decoded = check_stable(encoding, rows)
    assert not decoded[rows == 0].any()
    assert (decoded * np.sign(rows) >= 0).all()


@pytest.mark.parametrize("encoding", SECOND, ids=lambda e: e.name)
@given(rows=rows_for(signed=False))
def test_second_moment_of_any_size_is_stable(encoding: BlockEncoding, rows: Rows) -> None:
    """Zero stays zero, and nothing else becomes zero: a step divides by the root."""
    decoded = check_stable(encoding, rows)
    assert np.array_equal(decoded == 0, rows == 0)
    assert (decoded >= 0).all()


@every_encoding
def test_rows_are_encoded_block_by_block(encoding: BlockEncoding) -> None:
    """The bytes of a block follow from the block alone: any division into ranks gives the same."""
    rows = np.random.default_rng(1).standard_normal((5, 3 * BLOCK_SIZE + 7)).astype(np.float32) ** 2
    whole = encoding.encode(rows)
    block_nbytes = BLOCK_SIZE * encoding.bits // 8
    for row in range(5):
        for block in range(4):
            part = rows[row : row + 1, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            encoded = encoding.encode(part)
            codes = whole.codes[row, block * block_nbytes : (block + 1) * block_nbytes]
            assert np.array_equal(encoded.codes[0], codes)
            assert np.array_equal(encoded.scales[0, 0], whole.scales[row, block])


@pytest.mark.parametrize(
    ("bits", "nbytes", "error"), [((8, 8), 2.09375, 0.012), ((6, 4), 1.34375, 0.065)]
)
def test_size_and_update_error_of_random_moments(
    bits: tuple[int, int], nbytes: float, error: float
) -> None:
    """The update of Adam, m / (sqrt(v) + eps), of normal gradients whose scale varies."""
    rng = np.random.default_rng(2)
    columns = np.exp(0.3 * rng.standard_normal(1024))
    first = (rng.standard_normal((256, 1024)) * columns * 1e-3).astype(np.float32)
    second = (rng.chisquare(20, (256, 1024)) / 20 * columns**2 * 1e-5).astype(np.float32)
    decoded, total = [], 0
    for encoding, rows in zip(
        (first_moment(bits[0]), second_moment(bits[1])), (first, second), strict=True
    ):
        encoded = encoding.encode(rows)
        decoded.append(encoding.decode(encoded, 1024).astype(np.float64))
        total += encoded.codes.nbytes + encoded.scales.nbytes
    assert total == nbytes * first.size
    update = first / (np.sqrt(second.astype(np.float64)) + 1e-8)
    difference = decoded[0] / (np.sqrt(decoded[1]) + 1e-8) - update
    assert np.linalg.norm(difference) <= error * np.linalg.norm(update)


@every_encoding
def test_codes_are_packed_from_the_lowest_bit(encoding: BlockEncoding) -> None:
    """An oracle in integers: the codes of a block are one number, first code lowest."""
    rows = np.random.default_rng(3).random((1, BLOCK_SIZE)).astype(np.float32) + 0.5
    packed = int.from_bytes(encoding.encode(rows).codes.tobytes(), "little")
    codes = [packed >> encoding.bits * i & 2**encoding.bits - 1 for i in range(BLOCK_SIZE)]
    assert codes[int(rows.argmax())] == 2**encoding.bits - 1
    order = np.argsort(rows[0], kind="stable")
    assert (np.diff(np.array(codes)[order]) >= 0).all()

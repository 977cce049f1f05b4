"""Encodes master weights and moments of Adam in fewer bytes.

Every step is an integer operation or an IEEE operation that rounds correctly. So equal values give
equal bytes on every machine, and encoding what was decoded gives the same bytes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 64
_MAX_BFLOAT16 = 0x7F7F  # the largest finite one, as bits
_HALF = 0x8000
_TINY_SCALE = 0x0F80  # 2**-96, as bfloat16 bits: squares of small codes are subnormal below it

Bits32 = NDArray[np.uint32]
Bits16 = NDArray[np.uint16]
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


# master weights beside the bfloat16 model


def fitting_models(master: Bits32) -> Bits16:
    """Return the model bits beside which 16 bits give each master back: masters rounded half up.

    Both are bits: float32, and bfloat16 of the same shape.
    """
    return ((master + np.uint32(_HALF)) >> np.uint32(16)).astype(np.uint16)


def encode_masters(master: Bits32, model: Bits16) -> tuple[NDArray[np.int16], NDArray[np.intp]]:
    """Return masters as their difference to the model, and the indices of outliers.

    `master`: float32 as bits. `model`: bfloat16 as bits, of the same shape. As integers they differ
    by less than 2**15 where the model is the rounded master, so 16 bits hold the difference.
    Outliers are flat indices where they do not: half of the ties in rounding, NaNs that lost
    their payload, and masters whose rounded value the model does not hold.
    """
    outliers = np.flatnonzero(fitting_models(master) != model)
    return master.astype(np.uint16).view(np.int16), outliers


def decode_masters(encoded: NDArray[np.int16], model: Bits16) -> Bits32:
    """Return the bits of masters, wrong at the outliers of `encode_masters`."""
    masters = np.left_shift(model, 16, dtype=np.uint32).view(np.int32)
    masters += encoded
    return masters.view(np.uint32)


# moments in blocks along the last dimension


# By bits of a code: the least number of codes that fill whole bytes, and an integer that has room.
_WORDS: dict[int, tuple[int, np.dtype[np.unsignedinteger]]] = {
    4: (2, np.dtype("<u1")),
    6: (4, np.dtype("<u4")),
}


@dataclass(frozen=True, slots=True)
class EncodedBlocks:
    """Rows of packed codes, and rows of scales: the bits of bfloat16 numbers.

    `codes`: (rows, packed bytes of a row). `scales`: (rows, blocks of a row, scales of a block).
    """

    codes: Codes
    scales: Bits16


@dataclass(frozen=True, slots=True)
class BlockEncoding:
    """Encodes each block of a row as codes of `bits` bits and a few scales.

    `signed`: whether values may be negative. `scales_per_block`: their number. `quantize(blocks)`:
    returns codes and scales of blocks in float32. `dequantize(codes, scales)`: the inverse, up to
    rounding.
    """

    name: str
    bits: int
    signed: bool
    scales_per_block: int
    quantize: Callable[[Floats, int], tuple[Codes, Bits16]]
    dequantize: Callable[[Codes, Bits16, int], Floats]

    def packed_nbytes(self, length: int) -> int:
        """Return the bytes of the codes of a row; each block fills its last byte."""
        whole, rest = divmod(length, BLOCK_SIZE)
        return whole * BLOCK_SIZE * self.bits // 8 + -(-rest * self.bits // 8)

    def encode(self, rows: Floats) -> EncodedBlocks:
        """Encode finite rows, of shape (rows, length); second moments are not negative."""
        count, length = rows.shape
        codes = np.empty((count, self.packed_nbytes(length)), np.uint8)
        scales = np.empty((count, -(-length // BLOCK_SIZE), self.scales_per_block), np.uint16)
        for size, values, in_codes, in_scales in self._runs(count, length):
            block_codes, block_scales = self.quantize(rows[:, values].reshape(-1, size), self.bits)
            codes[:, in_codes] = _pack(block_codes, self.bits).reshape(count, -1)
            scales[:, in_scales] = block_scales.reshape(count, -1, self.scales_per_block)
        return EncodedBlocks(codes, scales)

    def decode(self, encoded: EncodedBlocks, length: int) -> Floats:
        """Decode rows of this length."""
        count = len(encoded.codes)
        rows = np.empty((count, length), np.float32)
        for size, values, in_codes, in_scales in self._runs(count, length):
            packed = encoded.codes[:, in_codes].reshape(-1, -(-size * self.bits // 8))
            scales = encoded.scales[:, in_scales].reshape(-1, self.scales_per_block)
            codes = _unpack(packed, self.bits, size)
            rows[:, values] = self.dequantize(codes, scales, self.bits).reshape(count, -1)
        return rows

    def _runs(self, count: int, length: int) -> Iterator[tuple[int, slice, slice, slice]]:
        """Yield the runs of blocks of one size: whole ones, and a short last one.

        Each is the size, and where values, codes and scales of the run lie in their rows.
        """
        blocks, rest = divmod(length, BLOCK_SIZE)
        stop, packed = blocks * BLOCK_SIZE, blocks * BLOCK_SIZE * self.bits // 8
        if count and blocks:
            yield BLOCK_SIZE, slice(0, stop), slice(0, packed), slice(0, blocks)
        if count and rest:
            yield rest, slice(stop, length), slice(packed, None), slice(blocks, None)


def _pack(codes: Codes, bits: int) -> Codes:
    """Pack codes, least significant bit first; each row fills its last byte."""
    if bits == 8:
        return codes
    (count, size), (per_word, dtype) = codes.shape, _WORDS[bits]
    words = np.zeros((count, -(-size // per_word)), dtype)
    for i in range(min(per_word, size)):
        column = codes[:, i::per_word].astype(dtype)
        words[:, : column.shape[1]] |= column << dtype.type(bits * i)
    as_bytes = words.view(np.uint8).reshape(count, -1, dtype.itemsize)
    packed = as_bytes[..., : per_word * bits // 8].reshape(count, -1)
    return packed[:, : -(-size * bits // 8)]


def _unpack(packed: Codes, bits: int, size: int) -> Codes:
    """Unpack `size` codes of each row."""
    if bits == 8:
        return packed
    per_word, dtype = _WORDS[bits]
    count, word_nbytes = len(packed), per_word * bits // 8
    padded = np.zeros((count, -(-size // per_word) * word_nbytes), np.uint8)
    padded[:, : packed.shape[1]] = packed
    as_bytes = np.zeros((padded.size // word_nbytes, dtype.itemsize), np.uint8)
    as_bytes[:, :word_nbytes] = padded.reshape(-1, word_nbytes)
    words = as_bytes.view(dtype)[:, 0]
    codes = np.empty((len(words), per_word), np.uint8)
    for i in range(per_word):
        codes[:, i] = words >> dtype.type(bits * i) & dtype.type(2**bits - 1)
    return codes.reshape(count, -1)[:, :size]


# the first moment: sign and square root of its magnitude, relative to the largest of the block


def _quantize_signed(blocks: Floats, bits: int) -> tuple[Codes, Bits16]:
    steps = 2 ** (bits - 1) - 1
    magnitudes = np.abs(blocks)
    largest = magnitudes.max(1)
    scales = _round_bits(largest.view(np.int32))
    codes = _signed_codes(magnitudes, largest, scales, steps)
    tiny = np.flatnonzero(scales < _TINY_SCALE)
    if len(tiny):
        # Several codes decode to one number there: take the code that is encoded from it again.
        decoded = _signed_values(codes[tiny], _widen(scales[tiny, None]), steps)
        codes[tiny] = _signed_codes(decoded, decoded.max(1), scales[tiny], steps)
    np.copysign(codes, blocks, out=codes)
    codes += np.float32(steps + 1)
    return codes.astype(np.uint8), scales.astype(np.uint16)[:, None]


def _signed_codes(
    magnitudes: Floats, largest: Floats, scales: NDArray[np.int32], steps: int
) -> Floats:
    """Return whole numbers up to `steps`. `largest`: of each block."""
    divisors = _widen(scales)[:, None]
    relative: Floats = np.divide(magnitudes, np.where(divisors > 0, divisors, np.float32(1)))
    np.sqrt(relative, out=relative)
    relative *= np.float32(steps)
    np.minimum(np.rint(relative, out=relative), np.float32(steps), out=relative)
    # The scale is rounded. With the last code for the largest, it is the same when encoded again.
    last_codes = np.where(divisors > 0, np.float32(steps), np.float32(0))
    np.copyto(relative, last_codes, where=magnitudes == largest[:, None])
    return relative


def _signed_values(codes: Floats, scales: Floats, steps: int) -> Floats:
    relative = codes / np.float32(steps)
    values: Floats = relative * np.abs(relative) * scales
    return values


def _dequantize_signed(codes: Codes, scales: Bits16, bits: int) -> Floats:
    steps = 2 ** (bits - 1) - 1
    every_code = np.arange(-steps - 1, steps + 1, dtype=np.float32)
    values: Floats = np.take(_signed_values(every_code, np.ones(1, np.float32), steps), codes)
    values *= _widen(scales)
    return values


# the second moment: its bits as an integer, between the smallest and the largest of the block


def _quantize_positive(blocks: Floats, bits: int) -> tuple[Codes, Bits16]:
    numbers = np.ascontiguousarray(blocks).view(np.int32)  # nearly a logarithm
    smallest, largest = numbers.min(1), numbers.max(1)
    has_zeros = smallest <= 0
    if has_zeros.any():
        rows = numbers[has_zeros]
        smallest[has_zeros] = np.where(rows > 0, rows, largest[has_zeros, None]).min(1)
    is_positive = (largest > 0).astype(np.int32)
    low, high = (np.maximum(_round_bits(bound), is_positive) for bound in (smallest, largest))
    first = has_zeros.astype(np.float32)  # code 0 is zero in a block that has zeros
    width = (high - low) << 16
    steps = np.float32(2**bits - 1) - first
    factors = np.divide(steps, width, out=np.zeros_like(steps), where=width > 0)
    codes = (numbers - (low << 16)[:, None]).astype(np.float32)
    codes *= factors[:, None]
    np.rint(codes, out=codes)
    np.maximum(codes, np.float32(0), out=codes)
    np.minimum(codes, steps[:, None], out=codes)
    # Both bounds are rounded; with these codes they stay what they are when encoded again.
    np.copyto(codes, np.float32(0), where=numbers == smallest[:, None])
    last_codes = np.where(width > 0, steps, np.float32(0))
    np.copyto(codes, last_codes[:, None], where=numbers == largest[:, None])
    if has_zeros.any():
        codes += first[:, None]
        np.copyto(codes, np.float32(0), where=numbers <= 0)
    # The sign of the lower scale says that the block has zeros.
    scales = np.stack([low | has_zeros.astype(np.int32) << 15, high], 1)
    return codes.astype(np.uint8), scales.astype(np.uint16)


def _dequantize_positive(codes: Codes, scales: Bits16, bits: int) -> Floats:
    bounds = scales.astype(np.int32)
    first = bounds[:, :1] >> 15
    low = (bounds[:, :1] & 0x7FFF) << 16
    width = (bounds[:, 1:] << 16) - low
    numbers = codes.astype(np.float64)
    if first.any():
        numbers -= first
    numbers *= width / (2**bits - 1 - first)
    np.rint(numbers, out=numbers)
    numbers += low
    values: Floats = numbers.astype(np.int32).view(np.float32)
    if first.any():
        np.copyto(values, np.float32(0), where=codes < first)
    return values


def _round_bits(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Round float32 bits to bfloat16 bits, half up, to no infinity."""
    return np.minimum((numbers >> 16) + (numbers >> 15 & 1), _MAX_BFLOAT16)


def _widen(scales: NDArray[np.integer]) -> Floats:
    """Return bfloat16 bits as float32."""
    values: Floats = (scales.astype(np.int32) << 16).view(np.float32)
    return values


def first_moment(bits: int) -> BlockEncoding:
    """Return the encoding of Adam's first moment, which has signs."""
    return BlockEncoding(f"signed-sqrt-{bits}", bits, True, 1, _quantize_signed, _dequantize_signed)


def second_moment(bits: int) -> BlockEncoding:
    """Return the encoding of Adam's second moment, which is never negative."""
    return BlockEncoding(f"log-{bits}", bits, False, 2, _quantize_positive, _dequantize_positive)

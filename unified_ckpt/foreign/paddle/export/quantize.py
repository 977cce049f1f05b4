"""Quantizes Adam's moments as PaddleNLP's `ckpt_quant_stage` does, in float32 of numpy.

Rows and columns are those of Paddle's orientation. Of the second moment v, 1 / (sqrt(v) + 1e-8) is
quantized. How state could be lost: a value that is not finite spoils all that share its scale, and
PaddleNLP fails for some shapes. Both raise here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.paddle.quantized_moments import (
    GROUP_ROWS,
    MAX_SCALES,
    MIN_SCALES,
    SCALES,
)

QuantStage = Literal["O1", "O2"]
Rows = NDArray[np.float32]
Ranges = tuple[Rows, ...]  # the largest magnitude; of second moments the least and greatest value

_CHUNK_ELEMENTS = 8 << 20
_LEVELS = {"O1": (127, 255), "O2": (7, 15)}  # of the first and the second moment
_EPS, _LEAST = np.float32(1e-8), np.float32(1e-8)


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a parameter: `read(first, count)` returns rows [count, columns].

    A vector has one column.
    """

    name: str
    shape: tuple[int, ...]
    is_second: bool
    read: Callable[[int, int], Rows]

    def chunks(self) -> Iterator[tuple[int, Rows]]:
        """Yield some rows of what is quantized, after the number of the first."""
        rows, columns = self.shape[0], self.shape[1] if len(self.shape) > 1 else 1
        step = max(_CHUNK_ELEMENTS // columns // GROUP_ROWS, 1) * GROUP_ROWS
        for first in range(0, rows, step):
            values = self.read(first, min(step, rows - first))
            if not np.isfinite(values).all() or (self.is_second and (values < 0).any()):
                raise FormatError(
                    f"{self.name}: got infinite, NaN or negative second moments, which PaddleNLP "
                    'cannot quantize; export with compression="none"'
                )
            yield first, np.float32(1) / (np.sqrt(values) + _EPS) if self.is_second else values


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to write: its name, its spec in the file, and its bytes in chunks."""

    name: str
    spec: TensorSpec
    chunks: Callable[[], Iterator[memoryview]]


def quantize(stage: QuantStage, first: Moment, second: Moment) -> list[OutputTensor] | None:
    """Return what stores both moments of a parameter, None if they stay as they are.

    FormatError for shapes that PaddleNLP cannot quantize.
    """
    shape = first.shape
    if len(shape) not in (1, 2) or (stage == "O2" and len(shape) == 2 and shape[0] % GROUP_ROWS):
        expected = f" with a multiple of {GROUP_ROWS} rows" if stage == "O2" else ""
        raise FormatError(
            f"got shape {list(shape)}, expected one or two dims{expected} for {stage}; "
            'export with compression="none"'
        )
    moments, kinds = (first, second), ((SCALES,), (MIN_SCALES, MAX_SCALES))
    if stage == "O2" and len(shape) == 1:
        return None
    scale_shape = shape[1:] if stage == "O1" else (shape[0] // GROUP_ROWS, shape[1])
    scales = [
        OutputTensor(
            moment.name + suffix,
            TensorSpec("F32", scale_shape),
            partial(_scale_chunks, stage, moment, index),
        )
        for moment, suffixes in zip(moments, kinds, strict=True)
        for index, suffix in enumerate(suffixes)
    ]
    if stage == "O2":
        packed = partial(_packed_chunks, first, second)
        return [*scales, OutputTensor(second.name, TensorSpec("I8", shape), packed)]
    codes = [
        OutputTensor(moment.name, TensorSpec(dtype, shape), partial(_code_chunks, moment))
        for moment, dtype in zip(moments, ("I8", "U8"), strict=True)
    ]
    return [*scales, *codes]


def dequantized(stage: QuantStage, moment: Moment) -> Iterator[tuple[int, Rows]]:
    """Yield what PaddleNLP reads of some rows of a quantized moment, after the first's number."""
    levels = _LEVELS[stage][moment.is_second]
    reciprocal = np.float32(1 / levels)
    for first, codes, ranges in _codes(stage, moment):
        numbers = codes.astype(np.float32)
        if moment.is_second:
            low, high = ranges
            inverse = numbers * reciprocal * (high - low) + low
            values = np.square(np.float32(1) / inverse - _EPS)
        elif stage == "O1":
            values = numbers * reciprocal * ranges[0]
        else:
            values = numbers * ranges[0] * reciprocal
        yield first, values.reshape(-1, values.shape[-1])


def _scale_chunks(stage: QuantStage, moment: Moment, index: int) -> Iterator[memoryview]:
    if stage == "O1":
        yield _bytes(_ranges_of_columns(moment)[index])
        return
    for _, values in moment.chunks():
        yield _bytes(_ranges(moment, _groups(values))[index])


def _code_chunks(moment: Moment) -> Iterator[memoryview]:
    for _, codes, _ in _codes("O1", moment):
        yield _bytes(codes.astype(np.uint8))


def _packed_chunks(first: Moment, second: Moment) -> Iterator[memoryview]:
    for (_, high, _), (_, low, _) in zip(_codes("O2", first), _codes("O2", second), strict=True):
        yield _bytes((high << 4 | low & 15).astype(np.uint8))


def _bytes(array: NDArray[np.float32] | NDArray[np.uint8]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _codes(stage: QuantStage, moment: Moment) -> Iterator[tuple[int, NDArray[np.int16], Ranges]]:
    """Yield the codes of some rows, and their ranges, after the number of the first row."""
    ranges = _ranges_of_columns(moment) if stage == "O1" else None
    levels = np.float32(_LEVELS[stage][moment.is_second])
    for first, values in moment.chunks():
        if stage == "O2":
            values = _groups(values)
            ranges = tuple(bound[:, None] for bound in _ranges(moment, values))
        if ranges is None:
            raise AssertionError("O1 has the ranges of columns")
        with np.errstate(divide="ignore", invalid="ignore"):  # equal bounds give NaN, code 0
            if moment.is_second:
                low, high = ranges
                relative = (values - low) / (high - low)
            else:
                relative = values / ranges[0]
            codes = np.nan_to_num(np.round(relative * levels)).astype(np.int16)
        yield first, codes, ranges


def _groups(values: Rows) -> Rows:
    return values.reshape(-1, GROUP_ROWS, values.shape[1])


def _ranges(moment: Moment, values: Rows) -> Ranges:
    """Return the ranges over the rows of each group."""
    if moment.is_second:
        return values.min(-2), values.max(-2)
    return (np.abs(values).max(-2),)


def _ranges_of_columns(moment: Moment) -> Ranges:
    """Return the ranges over all rows, zeros replaced as PaddleNLP does."""
    combine = (np.minimum, np.maximum) if moment.is_second else (np.maximum,)
    by_chunk: Sequence[Ranges] = [_ranges(moment, values) for _, values in moment.chunks()]
    merged = (
        reduce(function, bounds)
        for function, bounds in zip(combine, zip(*by_chunk, strict=True), strict=True)
    )
    return tuple(np.where(bound == 0, _LEAST, bound) for bound in merged)

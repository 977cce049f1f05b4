"""Dequantizes Adam moments that PaddleNLP compressed (`ckpt_quant_stage`) to float32.

The result equals PaddleNLP's bit for bit. In place of the second moment v, it stores 1 /
(sqrt(v) + 1e-8). O1 uses 8 bits, with scales per column. O2 packs 4 + 4 bits into one byte under
the second moment's name, with scales per 32 rows of a column. Source:
`paddlenlp/quantization/checkpoint_quantization_utils.py`. Paddle divides by a constant by
multiplying with its float32 reciprocal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from unified_ckpt.core.recipes import External
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.paddle.slices import load

SCALES, MIN_SCALES, MAX_SCALES = "@scales", "@min_scales", "@max_scales"
GROUP_ROWS = 32
_EPS = 1e-8


def dequantize_o1(stored: External, *scales: External) -> External:
    """Dequantize [rows, columns] with scales F32 [columns], or a vector with one scale.

    The first moment is I8 with its scales; the second is U8 with its least and greatest values.
    """
    dtype = "I8" if len(scales) == 1 else "U8"
    return _dequantized(stored, scales, stored.shape[1:], dtype, _load_o1)


def dequantize_o2(stored: External, *scales: External) -> External:
    """Dequantize a half of I8 [rows, columns], with scales F32 [rows / 32, columns].

    The first moment, with its scales, is the high half. The second, with its least and greatest
    values, is the low half.
    """
    if len(stored.shape) != 2 or stored.shape[0] % GROUP_ROWS:
        raise FormatError(
            f"{stored.file}: got shape {stored.shape}, expected two dims, the first a multiple of "
            f"{GROUP_ROWS}"
        )
    shape = (stored.shape[0] // GROUP_ROWS, stored.shape[1])
    return _dequantized(stored, scales, shape, "I8", _load_o2)


def _load_o1(stored: External, scales: Sequence[External], box: Box) -> torch.Tensor:
    values = load(stored, box).float()
    ranges = [load(scale, Box(box.offsets[1:], box.shape[1:])) for scale in scales]
    if len(ranges) == 1:
        return values * _reciprocal(127) * ranges[0]
    return _second_moment(values * _reciprocal(255), *ranges)


def _load_o2(stored: External, scales: Sequence[External], box: Box) -> torch.Tensor:
    packed, ranges = load(stored, box), [_row_scales(scale, box) for scale in scales]
    if len(ranges) == 1:
        return (packed >> 4).float() * ranges[0] * _reciprocal(7)
    return _second_moment((packed & 15).float() * _reciprocal(15), *ranges)


def _second_moment(level: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return (1.0 / (level * (high - low) + low) - torch.tensor(_EPS, device="cpu")).square()


def _reciprocal(number: int) -> torch.Tensor:
    return torch.tensor(1 / number, dtype=torch.float32, device="cpu")


def _row_scales(scales: External, box: Box) -> torch.Tensor:
    """Return the scales of each row of the box, [rows, columns]."""
    first_group, stop_group = (
        box.offsets[0] // GROUP_ROWS,
        -(-(box.offsets[0] + box.shape[0]) // GROUP_ROWS),
    )
    group_scales = load(
        scales, Box((first_group, box.offsets[1]), (stop_group - first_group, box.shape[1]))
    )
    return group_scales[
        torch.arange(box.offsets[0], box.offsets[0] + box.shape[0], device="cpu") // GROUP_ROWS
        - first_group
    ]


def _dequantized(
    stored: External,
    scales: Sequence[External],
    shape: tuple[int, ...],
    dtype: str,
    dequantize: Callable[[External, Sequence[External], Box], torch.Tensor],
) -> External:
    if stored.dtype != dtype or any(
        scale.dtype != "F32" or scale.shape != shape for scale in scales
    ):
        actual = ", ".join(f"{scale.dtype} {scale.shape}" for scale in scales)
        raise FormatError(
            f"{stored.file}: got {stored.dtype} {stored.shape} with scales {actual}, expected "
            f"{dtype} with scales F32 {shape}"
        )
    return External("F32", stored.shape, partial(dequantize, stored, scales), file=stored.file)

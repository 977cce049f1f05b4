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

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.errors import FormatError
from unified_ckpt.sources.paddle.slices import StoredTensor

SCALES, MIN_SCALES, MAX_SCALES = "@scales", "@min_scales", "@max_scales"
GROUP_ROWS = 32
_EPS = 1e-8


def dequantize_o1(stored: StoredTensor, *scales: StoredTensor) -> StoredTensor:
    """Dequantize [rows, columns] with scales F32 [columns], or a vector with one scale.

    The first moment is I8 with its scales; the second is U8 with its least and greatest values.
    """
    dtype = torch.int8 if len(scales) == 1 else torch.uint8
    return _dequantized(stored, scales, stored.shape[1:], dtype, _load_o1)


def dequantize_o2(stored: StoredTensor, *scales: StoredTensor) -> StoredTensor:
    """Dequantize a half of I8 [rows, columns], with scales F32 [rows / 32, columns].

    The first moment, with its scales, is the high half. The second, with its least and greatest
    values, is the low half.
    """
    if len(stored.shape) != 2 or stored.shape[0] % GROUP_ROWS:
        raise FormatError(
            f"{stored.path}: got shape {stored.shape}, expected two dims, the first a multiple of "
            f"{GROUP_ROWS}"
        )
    shape = (stored.shape[0] // GROUP_ROWS, stored.shape[1])
    return _dequantized(stored, scales, shape, torch.int8, _load_o2)


def _load_o1(stored: StoredTensor, scales: Sequence[StoredTensor], box: Box) -> torch.Tensor:
    values = stored.copy(box).float()
    ranges = [scale.load(Box(box.offsets[1:], box.shape[1:])) for scale in scales]
    if len(ranges) == 1:
        return values * _reciprocal(127) * ranges[0]
    return _second_moment(values * _reciprocal(255), *ranges)


def _load_o2(stored: StoredTensor, scales: Sequence[StoredTensor], box: Box) -> torch.Tensor:
    packed, ranges = stored.copy(box), [_row_scales(scale, box) for scale in scales]
    if len(ranges) == 1:
        return (packed >> 4).float() * ranges[0] * _reciprocal(7)
    return _second_moment((packed & 15).float() * _reciprocal(15), *ranges)


def _second_moment(level: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return (1.0 / (level * (high - low) + low) - torch.tensor(_EPS, device="cpu")).square()


def _reciprocal(number: int) -> torch.Tensor:
    return torch.tensor(1 / number, dtype=torch.float32, device="cpu")


def _row_scales(scales: StoredTensor, box: Box) -> torch.Tensor:
    """Return the scales of each row of the box, [rows, columns]."""
    first_group, stop_group = (
        box.offsets[0] // GROUP_ROWS,
        -(-(box.offsets[0] + box.shape[0]) // GROUP_ROWS),
    )
    group_scales = scales.load(
        Box((first_group, box.offsets[1]), (stop_group - first_group, box.shape[1]))
    )
    return group_scales[
        torch.arange(box.offsets[0], box.offsets[0] + box.shape[0], device="cpu") // GROUP_ROWS
        - first_group
    ]


def _dequantized(
    stored: StoredTensor,
    scales: Sequence[StoredTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    load: Callable[[StoredTensor, Sequence[StoredTensor], Box], torch.Tensor],
) -> StoredTensor:
    if stored.dtype != dtype or any(
        scale.dtype != torch.float32 or scale.shape != shape for scale in scales
    ):
        actual = ", ".join(f"{scale.dtype} {scale.shape}" for scale in scales)
        raise FormatError(
            f"{stored.path}: got {stored.dtype} {stored.shape} with scales {actual}, expected "
            f"{dtype} with scales float32 {shape}"
        )
    load_box = partial(load, stored, scales)
    return StoredTensor(torch.float32, stored.shape, stored.path, load_box, computed=True)

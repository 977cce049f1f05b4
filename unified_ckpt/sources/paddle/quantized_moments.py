"""Dequantizes Adam moments that PaddleNLP compressed (`ckpt_quant_stage`) to float32.

The result equals PaddleNLP's bit for bit. In place of the second moment v, it stores 1 /
(sqrt(v) + 1e-8). O1 uses 8 bits, with scales per column. O2 packs 4 + 4 bits into one byte under
the second moment's name, with scales per 32 rows of a column. Source:
`paddlenlp/quantization/checkpoint_quantization_utils.py`. Paddle divides by a constant by
multiplying with its float32 reciprocal.
"""

from __future__ import annotations

from functools import partial

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.errors import FormatError
from unified_ckpt.sources.paddle.slices import StoredTensor

SCALES, MIN_SCALES, MAX_SCALES = "@scales", "@min_scales", "@max_scales"
GROUP_ROWS = 32
_EPS = 1e-8


def first_moment_o1(stored: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Dequantize I8 [rows, columns] with scales F32 [columns], or a vector with one scale."""
    _check(stored, [scales], stored.shape[1:], torch.int8)
    return _dequantized(stored, partial(_load_first_o1, stored, scales))


def second_moment_o1(
    stored: StoredTensor, min_scales: StoredTensor, max_scales: StoredTensor
) -> StoredTensor:
    """Dequantize U8 of the same shapes."""
    _check(stored, [min_scales, max_scales], stored.shape[1:], torch.uint8)
    return _dequantized(stored, partial(_load_second_o1, stored, min_scales, max_scales))


def first_moment_o2(stored: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Dequantize the high half of I8 [rows, columns], with scales F32 [rows / 32, columns]."""
    _check_o2(stored, [scales])
    return _dequantized(stored, partial(_load_first_o2, stored, scales))


def second_moment_o2(
    stored: StoredTensor, min_scales: StoredTensor, max_scales: StoredTensor
) -> StoredTensor:
    """Dequantize the low half of I8 [rows, columns]."""
    _check_o2(stored, [min_scales, max_scales])
    return _dequantized(stored, partial(_load_second_o2, stored, min_scales, max_scales))


def _load_first_o1(stored: StoredTensor, scales: StoredTensor, box: Box) -> torch.Tensor:
    return stored.copy(box).float() * _reciprocal(127) * _column_scales(scales, box)


def _load_second_o1(
    stored: StoredTensor, min_scales: StoredTensor, max_scales: StoredTensor, box: Box
) -> torch.Tensor:
    low, high = _column_scales(min_scales, box), _column_scales(max_scales, box)
    return _second_moment(stored.copy(box).float() * _reciprocal(255) * (high - low) + low)


def _load_first_o2(stored: StoredTensor, scales: StoredTensor, box: Box) -> torch.Tensor:
    return (stored.copy(box) >> 4).float() * _row_scales(scales, box) * _reciprocal(7)


def _load_second_o2(
    stored: StoredTensor, min_scales: StoredTensor, max_scales: StoredTensor, box: Box
) -> torch.Tensor:
    low, high = _row_scales(min_scales, box), _row_scales(max_scales, box)
    return _second_moment((stored.copy(box) & 15).float() * _reciprocal(15) * (high - low) + low)


def _second_moment(ratio: torch.Tensor) -> torch.Tensor:
    return (1.0 / ratio - torch.tensor(_EPS, device="cpu")).square()


def _reciprocal(number: int) -> torch.Tensor:
    return torch.tensor(1 / number, dtype=torch.float32, device="cpu")


def _column_scales(scales: StoredTensor, box: Box) -> torch.Tensor:
    return scales.load(Box(box.offsets[1:], box.shape[1:]))


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


def _dequantized(stored: StoredTensor, load: partial[torch.Tensor]) -> StoredTensor:
    return StoredTensor(torch.float32, stored.shape, stored.path, load, computed=True)


def _check(
    stored: StoredTensor, scales: list[StoredTensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if stored.dtype != dtype or any(
        scale.dtype != torch.float32 or scale.shape != shape for scale in scales
    ):
        actual = ", ".join(f"{scale.dtype} {scale.shape}" for scale in scales)
        raise FormatError(
            f"{stored.path}: got {stored.dtype} {stored.shape} with scales {actual}, expected "
            f"{dtype} with scales float32 {shape}"
        )


def _check_o2(stored: StoredTensor, scales: list[StoredTensor]) -> None:
    if len(stored.shape) != 2 or stored.shape[0] % GROUP_ROWS:
        raise FormatError(
            f"{stored.path}: got shape {stored.shape}, expected two dims, the first a multiple of "
            f"{GROUP_ROWS}"
        )
    _check(stored, scales, (stored.shape[0] // GROUP_ROWS, stored.shape[1]), torch.int8)

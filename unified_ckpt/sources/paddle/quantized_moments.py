"""Adam's moments as PaddleNLP compresses them (`ckpt_quant_stage`), back in float32, bit for bit as it does it.

Instead of the second moment v it keeps 1 / (sqrt(v) + 1e-8). O1: 8 bits, scales for each column. O2: 4 bits and 4 bits in one byte under
the second moment's name, scales for each 32 rows of a column. Source: `paddlenlp/quantization/checkpoint_quantization_utils.py`; Paddle
divides by a constant as it multiplies with its float32 reciprocal.
"""

from __future__ import annotations

from functools import partial

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.errors import FormatError
from unified_ckpt.sources.paddle.slices import Held

SCALES, LOWEST, HIGHEST = "@scales", "@min_scales", "@max_scales"
GROUP = 32  # rows
_EPS = 1e-8


def first_of_o1(stored: Held, scales: Held) -> Held:
    """I8 [rows, columns], scales F32 [columns]; or a vector and one scale."""
    _check(stored, [scales], stored.shape[1:], torch.int8)
    return _made(stored, partial(_first_of_o1, stored, scales))


def second_of_o1(stored: Held, lowest: Held, highest: Held) -> Held:
    """U8, as above."""
    _check(stored, [lowest, highest], stored.shape[1:], torch.uint8)
    return _made(stored, partial(_second_of_o1, stored, lowest, highest))


def first_of_o2(stored: Held, scales: Held) -> Held:
    """The high half of each byte of I8 [rows, columns], scales F32 [rows / 32, columns]."""
    _check_o2(stored, [scales])
    return _made(stored, partial(_first_of_o2, stored, scales))


def second_of_o2(stored: Held, lowest: Held, highest: Held) -> Held:
    """The low half."""
    _check_o2(stored, [lowest, highest])
    return _made(stored, partial(_second_of_o2, stored, lowest, highest))


def _first_of_o1(stored: Held, scales: Held, box: Box) -> torch.Tensor:
    return stored.copy(box).float() * _inverse(127) * _columns(scales, box)


def _second_of_o1(stored: Held, lowest: Held, highest: Held, box: Box) -> torch.Tensor:
    low, high = _columns(lowest, box), _columns(highest, box)
    return _squared(stored.copy(box).float() * _inverse(255) * (high - low) + low)


def _first_of_o2(stored: Held, scales: Held, box: Box) -> torch.Tensor:
    return (stored.copy(box) >> 4).float() * _groups(scales, box) * _inverse(7)


def _second_of_o2(stored: Held, lowest: Held, highest: Held, box: Box) -> torch.Tensor:
    low, high = _groups(lowest, box), _groups(highest, box)
    return _squared((stored.copy(box) & 15).float() * _inverse(15) * (high - low) + low)


def _squared(ratio: torch.Tensor) -> torch.Tensor:
    return (1.0 / ratio - torch.tensor(_EPS, device="cpu")).square()


def _inverse(number: int) -> torch.Tensor:
    return torch.tensor(1 / number, dtype=torch.float32, device="cpu")


def _columns(scales: Held, box: Box) -> torch.Tensor:
    return scales.load(Box(box.offsets[1:], box.shape[1:]))


def _groups(scales: Held, box: Box) -> torch.Tensor:
    """The scales of each row of the box. [rows, columns]"""
    first, stop = box.offsets[0] // GROUP, -(-(box.offsets[0] + box.shape[0]) // GROUP)
    found = scales.load(Box((first, box.offsets[1]), (stop - first, box.shape[1])))
    return found[
        torch.arange(box.offsets[0], box.offsets[0] + box.shape[0], device="cpu") // GROUP - first
    ]


def _made(stored: Held, load: partial[torch.Tensor]) -> Held:
    return Held(torch.float32, stored.shape, stored.where, load, costs=True)


def _check(stored: Held, scales: list[Held], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if stored.dtype != dtype or any(
        one.dtype != torch.float32 or one.shape != shape for one in scales
    ):
        has = ", ".join(f"{one.dtype} {one.shape}" for one in scales)
        raise FormatError(
            f"{stored.where}: is {stored.dtype} {stored.shape} with scales {has}; needed {dtype} and float32 {shape}"
        )


def _check_o2(stored: Held, scales: list[Held]) -> None:
    if len(stored.shape) != 2 or stored.shape[0] % GROUP:
        raise FormatError(
            f"{stored.where}: is {stored.shape}; needed two dims, the first a multiple of {GROUP}"
        )
    _check(stored, scales, (stored.shape[0] // GROUP, stored.shape[1]), torch.int8)

"""The tensors of a PaddleNLP checkpoint to write, and which of them must lie in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Source, read_box
from unified_ckpt.errors import error_prefix
from unified_ckpt.exports.paddle_quantize import (
    Moment,
    QuantizedTensor,
    QuantStage,
    Rows,
    dequantized,
    quantize,
)

_MOMENTS = ("moment1_0", "moment2_0")


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to write: a stored one, possibly transposed, or the number `power`."""

    name: str
    spec: TensorSpec  # in PaddleNLP's orientation
    stored: Key | None = None
    transposed: bool = False
    power: float = 0.0


# names in the index, and tensors that must lie in one file
Unit = tuple[Sequence[str], Sequence[OutputTensor | QuantizedTensor]]


def file_units(
    source: Source, outputs: Sequence[OutputTensor], stage: QuantStage | None
) -> list[Unit]:
    """Return what must lie in one file: each tensor, or all state of a parameter if quantized."""
    if stage is None:
        return [([output.name], [output]) for output in outputs]
    moments, units = _moments(source, outputs), list[Unit]()
    for owner, grouped in groupby(outputs, key=lambda output: output.name.partition("/")[0]):
        group = list(grouped)
        pair = [moments.get(f"{owner}/{state}") for state in _MOMENTS]
        tensors: list[OutputTensor | QuantizedTensor] = list(group)
        if pair[0] is not None and pair[1] is not None:
            with error_prefix(owner):
                quantized = quantize(stage, pair[0], pair[1])
            if quantized is not None:
                others = [output for output in group if output.name not in moments]
                tensors = [*quantized, *others]
        units.append(([output.name for output in group], tensors))
    return units


def _moments(source: Source, outputs: Sequence[OutputTensor]) -> dict[str, Moment]:
    """Return Adam's moments by name."""
    return {
        output.name: Moment(
            output.name,
            output.spec.shape,
            output.name.endswith(_MOMENTS[1]),
            partial(_read_rows, source, output),
        )
        for output in outputs
        if output.stored is not None and output.name.rpartition("/")[2] in _MOMENTS
    }


def _read_rows(source: Source, output: OutputTensor, first: int, count: int) -> Rows:
    """Return rows of a float32 tensor in Paddle's orientation."""
    if output.stored is None:
        raise AssertionError(f"{output.name}: is computed")
    shape = output.spec.shape
    box = Box((first, *(0 for _ in shape[1:])), (count, *shape[1:]))
    if output.transposed:
        box = Box(box.offsets[::-1], box.shape[::-1])
    rows = np.frombuffer(read_box(source, output.stored, box), np.float32).reshape(box.shape)
    return rows.T if output.transposed else rows.reshape(count, -1)


def readable_moments(
    source: Source, written: Source, outputs: Sequence[OutputTensor], stage: QuantStage
) -> set[Key]:
    """Return the stored names of quantized moments that read back as PaddleNLP reads them."""
    theirs, readable = _moments(written, outputs), set[Key]()
    for output in outputs:
        moment = _moments(source, [output]).get(output.name)
        if output.stored is None or moment is None or (stage == "O2" and len(moment.shape) == 1):
            continue
        if all(
            np.array_equal(values, theirs[output.name].read(first, len(values)))
            for first, values in dequantized(stage, moment)
        ):
            readable.add(output.stored)
    return readable

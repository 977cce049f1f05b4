"""The tensors of a PaddleNLP checkpoint to write, and which of them must lie in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

import numpy as np

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Source, read_box, read_chunks
from unified_ckpt.errors import error_prefix
from unified_ckpt.foreign.paddle.export.quantize import (
    Moment,
    OutputTensor,
    QuantStage,
    Rows,
    dequantized,
    quantize,
)
from unified_ckpt.format.names import OPTIMIZER

DTYPES = ("BF16", "F16", "F32")
_MOMENTS = ("moment1_0", "moment2_0")
_CHUNK_NBYTES = 32 << 20

# names in the index, and tensors that must lie in one file
Unit = tuple[Sequence[str], Sequence[OutputTensor]]


def file_units(
    view: Source, part: str, dtypes: Mapping[str, str], stage: QuantStage | None
) -> list[Unit]:
    """Return what must lie in one file: each tensor, or all state of a parameter if quantized.

    `view` has Paddle's names and orientation. `dtypes`: names of dtypes that differ in files.
    """
    outputs = [
        OutputTensor(
            name,
            TensorSpec(dtypes.get(spec.dtype, spec.dtype), spec.shape),
            partial(read_chunks, view, (part, name), spec.nbytes, chunk_nbytes=_CHUNK_NBYTES),
        )
        for name, spec in view.specs(part, view.names(part)).items()
    ]
    if stage is None:
        return [([output.name], [output]) for output in outputs]
    moments, units = _moments(view), list[Unit]()
    for owner, grouped in groupby(outputs, key=lambda output: output.name.partition("/")[0]):
        tensors = list(grouped)
        names = [tensor.name for tensor in tensors]
        first, second = (moments.get(f"{owner}/{state}") for state in _MOMENTS)
        if first is not None and second is not None:
            with error_prefix(owner):
                quantized = quantize(stage, first, second)
            if quantized is not None:
                tensors = [*quantized, *(item for item in tensors if item.name not in moments)]
        units.append((names, tensors))
    return units


def _moments(view: Source) -> dict[str, Moment]:
    """Return Adam's moments by name."""
    names = [name for name in view.names(OPTIMIZER) if name.rpartition("/")[2] in _MOMENTS]
    return {
        name: Moment(
            name,
            spec.shape,
            name.endswith(_MOMENTS[1]),
            partial(_read_rows, view, name, spec.shape[1:]),
        )
        for name, spec in view.specs(OPTIMIZER, names).items()
    }


def _read_rows(view: Source, name: str, columns: tuple[int, ...], first: int, count: int) -> Rows:
    """Return rows of a float32 tensor."""
    box = Box((first, *(0 for _ in columns)), (count, *columns))
    body = read_box(view, (OPTIMIZER, name), box)
    return np.frombuffer(body, np.float32).reshape(count, -1)


def readable_moments(view: Source, written: Source, stage: QuantStage) -> set[str]:
    """Return the names of quantized moments that `written` has as PaddleNLP reads them."""
    theirs = _moments(written)
    return {
        name
        for name, moment in _moments(view).items()
        if not (stage == "O2" and len(moment.shape) == 1)
        and all(
            np.array_equal(values, theirs[name].read(first, len(values)))
            for first, values in dequantized(stage, moment)
        )
    }

"""Which tensors a compressed checkpoint encodes, and which stored tensors replace each.

Everything follows from names, dtypes and shapes, so every rank plans the same without a message.
A row of a tensor is a run along its last dimension. Each row is encoded for itself, so a range of
rows is a byte range of every stored tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec, spec_of
from unified_ckpt.errors import FormatError
from unified_ckpt.format.encodings import (
    BLOCK_SIZE,
    BlockEncoding,
    EncodedBlocks,
    decode_masters,
    first_moment,
    second_moment,
)

Compression = Literal["none", "lossless", "O1", "O2"]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint32]

_MODEL, _MASTERS, _OPTIMIZER = "model", "master_weights", "optimizer"
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_MOMENT_BITS = {"O1": (8, 8), "O2": (6, 4)}  # of the first and the second moment
_MIN_ROW = 32  # in shorter rows, scales cost more than codes save
_MAX_LONE_ROW = 1 << 20  # elements of a tensor with one dim, which is one row


class MasterEncoding:
    """Master weights as 16 bits beside a bfloat16 model tensor of the same name and shape."""

    name = "masters-16"
    needs_model = True

    def stored_specs(self, fqn: str, shape: Sequence[int]) -> dict[str, TensorSpec]:
        """Return the stored tensors by name: one, I16, with the tensor's own shape."""
        return {fqn: spec_of("I16", tuple(shape))}

    def encode(self, rows: Bits) -> tuple[Bytes, ...]:
        """Encode float32 rows, given as bits: (rows, length) -> one (rows, bytes) each."""
        return (np.ascontiguousarray(rows.astype(np.uint16)).view(np.uint8),)

    def decode(self, stored: Sequence[Bytes], length: int, model: NDArray[np.uint16]) -> Bits:
        """Decode rows beside the bits of the model's rows; wrong at exceptions."""
        (low,) = stored
        return decode_masters(low.view(np.int16).reshape(-1, length), model)


@dataclass(frozen=True, slots=True)
class MomentEncoding:
    """A moment of Adam as packed codes, and scales of blocks in a tensor beside them."""

    blocks: BlockEncoding
    needs_model = False

    @property
    def name(self) -> str:
        """The name in the manifest."""
        return self.blocks.name

    def stored_specs(self, fqn: str, shape: Sequence[int]) -> dict[str, TensorSpec]:
        """Return the stored tensors by name: codes, and scales as `<fqn>.scale`."""
        *outer, length = shape
        scales = -(-length // BLOCK_SIZE) * self.blocks.scales_per_block
        return {
            fqn: spec_of("U8", (*outer, self.blocks.packed_nbytes(length))),
            scale_name(fqn): spec_of("BF16", (*outer, scales)),
        }

    def encode(self, rows: Bits) -> tuple[Bytes, ...]:
        """Encode float32 rows, given as bits; values of `exceptions` are encoded as zero."""
        values = np.ascontiguousarray(rows).view(np.float32)
        unfit = self.exceptions(rows)
        if len(unfit):
            values = values.copy()
            values.reshape(-1)[unfit] = 0
        encoded = self.blocks.encode(values)
        scales = np.ascontiguousarray(encoded.scales).reshape(len(rows), -1)
        return encoded.codes, scales.view(np.uint8)

    def exceptions(self, rows: Bits) -> NDArray[np.intp]:
        """Return the flat indices of values that are infinite, NaN, or a negative second moment."""
        magnitudes = rows & np.uint32(0x7FFFFFFF)
        limit = magnitudes if self.blocks.signed else rows
        return np.flatnonzero(limit >= np.uint32(0x7F800000))

    def decode(self, stored: Sequence[Bytes], length: int) -> Bits:
        """Decode rows; zero at exceptions."""
        codes, scales = stored
        shape = len(codes), -1, self.blocks.scales_per_block
        return self.blocks.decode(
            EncodedBlocks(codes, scales.view(np.uint16).reshape(shape)), length
        ).view(np.uint32)


Encoding = MasterEncoding | MomentEncoding


def scale_name(fqn: str) -> str:
    """Return the name of the stored tensor with the scales of an encoded tensor."""
    return f"{fqn}.scale"


def state_name(key: Key) -> str:
    """Return the state that an optimizer tensor holds of its parameter, "" in other parts."""
    part, fqn = key
    return fqn.rpartition("/")[2] if part == _OPTIMIZER else ""


_KNOWN: tuple[Encoding, ...] = (
    MasterEncoding(),
    *(MomentEncoding(first_moment(bits)) for bits in (8, 6)),
    *(MomentEncoding(second_moment(bits)) for bits in (8, 4)),
)
_ENCODINGS = {encoding.name: encoding for encoding in _KNOWN}


def encoding_named(name: str, *, file: str) -> Encoding:
    """Return an encoding by its name in the manifest. FormatError if it is unknown."""
    if name not in _ENCODINGS:
        raise FormatError(
            f"{file}: got tensors in the encoding {name[:80]!r}, expected one of "
            f"{', '.join(_ENCODINGS)}; install a newer unified_ckpt"
        )
    return _ENCODINGS[name]


def choose_encodings(
    specs: Mapping[Key, TensorSpec], compression: Compression
) -> dict[Key, Encoding]:
    """Return the encoding of each tensor that this compression encodes.

    `specs`: all tensors of the checkpoint, or of one rank. Encoded are float32 masters beside a
    bfloat16 model tensor, and float32 moments of Adam: a parameter's `exp_avg` and `exp_avg_sq`
    together. Rows of moments have at least 32 elements. A tensor of one dim, at most 2**20.
    """
    chosen: dict[Key, Encoding] = {}
    if compression == "none":
        return chosen
    moments = {}
    if compression in _MOMENT_BITS:
        first_bits, second_bits = _MOMENT_BITS[compression]
        moments = {
            _FIRST: _ENCODINGS[first_moment(first_bits).name],
            _SECOND: _ENCODINGS[second_moment(second_bits).name],
        }
    for key, spec in specs.items():
        part, fqn = key
        if spec.dtype != "F32" or not _has_rows(spec.shape):
            continue
        if part == _MASTERS:
            if specs.get((_MODEL, fqn)) == spec_of("BF16", spec.shape):
                chosen[key] = _ENCODINGS[MasterEncoding.name]
        elif part == _OPTIMIZER and state_name(key) in moments and spec.shape[-1] >= _MIN_ROW:
            owner = fqn.rpartition("/")[0]
            if all(specs.get((part, f"{owner}/{state}")) == spec for state in moments):
                chosen[key] = moments[state_name(key)]
    return chosen


def _has_rows(shape: Sequence[int]) -> bool:
    return bool(shape) and prod(shape) > 0 and (len(shape) > 1 or shape[0] <= _MAX_LONE_ROW)

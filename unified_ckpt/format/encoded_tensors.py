"""Which tensors a compressed checkpoint encodes, and which stored tensors replace each.

Everything follows from names, dtypes and shapes, so every rank plans the same without a message.
A row of a tensor is a run along its last dimension. Each row is encoded for itself, so a range of
rows is a byte range of every stored tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    encode_masters,
    first_moment,
    second_moment,
)
from unified_ckpt.format.manifest_fields import EncodingRecord
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER

Compression = Literal["none", "lossless", "O1", "O2"]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint32]

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_MOMENT_BITS = {"O1": (8, 8), "O2": (6, 4)}  # of the first and the second moment
_SCALE = ".scale"
_RUN_LENGTH = 1 << 18  # elements encoded or decoded at a time, which stay in the CPU cache
_MIN_ROW = 32  # in shorter rows, scales cost more than codes save
_MAX_ROW = 1 << 20  # a rank encodes whole rows, and holds one in memory


class MasterEncoding:
    """Master weights as 16 bits beside a bfloat16 model tensor of the same name and shape."""

    name = "masters-16"
    dtype = "I16"
    needs_model = True

    def stored_specs(self, fqn: str, shape: Sequence[int]) -> dict[str, TensorSpec]:
        """Return the stored tensors by name: one, I16, with the tensor's own shape."""
        return {fqn: spec_of("I16", tuple(shape))}

    def row_nbytes(self, length: int) -> tuple[int, ...]:
        """Return the bytes of a row of this length in each stored tensor."""
        return (2 * length,)

    def row_length(self, stored_length: int) -> int:
        """Return the longest row that is stored with this last dim."""
        return stored_length

    def outliers(self, rows: Bits, model: NDArray[np.uint16]) -> NDArray[np.intp]:
        """Return the flat indices of elements that 16 bits beside the model do not give back."""
        return encode_masters(rows, model)[1]

    def encode(self, rows: Bits) -> tuple[Bytes, ...]:
        """Encode float32 rows, given as bits: (rows, length) -> one (rows, bytes) each."""
        return (np.ascontiguousarray(rows.astype(np.uint16)).view(np.uint8),)

    def decode(self, stored: Sequence[Bytes], length: int, model: NDArray[np.uint16]) -> Bits:
        """Decode rows beside the bits of the model's rows; wrong at outliers."""
        (low,) = stored
        return decode_masters(low.view(np.int16).reshape(-1, length), model)


@dataclass(frozen=True, slots=True)
class MomentEncoding:
    """A moment of Adam as packed codes, and scales of blocks in a tensor beside them.

    Blocks are encoded alone: a run of whole blocks in a row is encoded and decoded like a row.
    """

    blocks: BlockEncoding
    dtype = "U8"
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

    def row_nbytes(self, length: int) -> tuple[int, ...]:
        """Return the bytes of a row of this length in each stored tensor."""
        scales = -(-length // BLOCK_SIZE) * self.blocks.scales_per_block
        return self.blocks.packed_nbytes(length), 2 * scales

    def row_length(self, stored_length: int) -> int:
        """Return the longest row whose codes take this many bytes."""
        whole, rest = divmod(stored_length, BLOCK_SIZE * self.blocks.bits // 8)
        return whole * BLOCK_SIZE + rest * 8 // self.blocks.bits

    def encode(self, rows: Bits) -> tuple[Bytes, ...]:
        """Encode float32 rows, given as bits; values of `outliers` are encoded as zero."""
        values = np.ascontiguousarray(rows).view(np.float32)
        unfit = self.outliers(rows)
        if len(unfit):
            values = values.copy()
            values.reshape(-1)[unfit] = 0
        encoded = self.blocks.encode(values)
        scales = np.ascontiguousarray(encoded.scales).reshape(len(rows), -1)
        return encoded.codes, scales.view(np.uint8)

    def outliers(self, rows: Bits, _model: object = None) -> NDArray[np.intp]:
        """Return the flat indices of values that are infinite, NaN, or a negative second moment."""
        magnitudes = rows & np.uint32(0x7FFFFFFF)
        limit = magnitudes if self.blocks.signed else rows
        return np.flatnonzero(limit >= np.uint32(0x7F800000))

    def decode(self, stored: Sequence[Bytes], length: int, _model: object = None) -> Bits:
        """Decode rows; zero at outliers."""
        codes, scales = stored
        shape = len(codes), -1, self.blocks.scales_per_block
        return self.blocks.decode(
            EncodedBlocks(codes, scales.view(np.uint16).reshape(shape)), length
        ).view(np.uint32)

    def has_valid_scales(self, scales: Bytes) -> bool:
        """Return whether scales are finite and positive or zero, and bounds in order."""
        bounds = scales.view(np.uint16).reshape(-1, self.blocks.scales_per_block)
        low, high = bounds[:, 0], bounds[:, -1]
        if not self.blocks.signed:
            low = low & np.uint16(0x7FFF)  # the sign bit says that the block has zeros
        return bool((high < 0x7F80).all() and (low <= high).all())


Encoding = MasterEncoding | MomentEncoding


@dataclass(frozen=True, slots=True)
class RowRun:
    """Columns [low, high) of `count` rows of `length` elements, from row `row`; one flat range.

    Several rows are whole rows. Columns are whole blocks.
    """

    length: int
    row: int
    count: int
    low: int
    high: int

    @property
    def start(self) -> int:
        """The first element, counted in the whole tensor."""
        return self.row * self.length + self.low

    @property
    def width(self) -> int:
        """The elements in each row."""
        return self.high - self.low

    def stored_ranges(self, encoding: Encoding) -> list[tuple[int, int]]:
        """Return the byte range of this run in each stored tensor."""
        columns = (encoding.row_nbytes(column) for column in (self.length, self.low, self.high))
        return [
            (self.row * row + low, (self.row + self.count - 1) * row + high)
            for row, low, high in zip(*columns, strict=True)
        ]


def row_runs(start: int, stop: int, length: int) -> Iterator[RowRun]:
    """Yield runs that together cover elements [start, stop), each of at most 1 MiB when decoded."""
    while start < stop:
        row, column = divmod(start, length)
        low = column // BLOCK_SIZE * BLOCK_SIZE
        wanted = stop - row * length  # elements from the first of this row
        count = 0 if low else min(wanted, _RUN_LENGTH) // length
        high = length
        if not count:
            count, last = 1, min(wanted, low + _RUN_LENGTH)
            high = min(-(-last // BLOCK_SIZE) * BLOCK_SIZE, length)
        yield RowRun(length, row, count, low, high)
        start = (row + count - 1) * length + high


def aligned_runs(start: int, stop: int, shape: Sequence[int]) -> Iterator[RowRun]:
    """Yield the runs that touch elements [start, stop), of a fixed division of the tensor."""
    length = shape[-1]
    unit = _RUN_LENGTH // length * length
    row_start = start // length * length
    first = start // unit * unit if unit else start - (start - row_start) % _RUN_LENGTH
    for run in row_runs(first, prod(shape), length):
        if run.start >= stop:
            return
        yield run


def stored_elements(
    encoding: Encoding, index: int, length: int, start: int, stop: int
) -> tuple[int, int]:
    """Return the elements in whose blocks bytes [start, stop) of a stored tensor lie.

    `index`: of the stored tensor; `length`: of a row of elements.
    """
    if start == stop:
        return 0, 0
    row_nbytes = encoding.row_nbytes(length)[index]
    block_nbytes = encoding.row_nbytes(BLOCK_SIZE)[index]
    first_row, first = divmod(start, row_nbytes)
    last_row, last = divmod(stop - 1, row_nbytes)
    end = min((last // block_nbytes + 1) * BLOCK_SIZE, length)
    return first_row * length + first // block_nbytes * BLOCK_SIZE, last_row * length + end


def scale_name(fqn: str) -> str:
    """Return the name of the stored tensor with the scales of an encoded tensor."""
    return fqn + _SCALE


def state_name(key: Key) -> str:
    """Return the state that an optimizer tensor holds of its parameter, "" in other parts."""
    part, fqn = key
    return fqn.rpartition("/")[2] if part == OPTIMIZER else ""


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


def encoding_records(
    encodings: Mapping[Key, Encoding], specs: Mapping[Key, TensorSpec]
) -> dict[str, dict[str, EncodingRecord]]:
    """Return the manifest's records of these encodings, by part and state.

    `specs`: of all tensors as they are when decoded. FormatError if a reader would take a plain
    tensor for an encoded one.
    """
    names: dict[str, dict[str, str]] = {}
    row_lengths: dict[str, dict[str, dict[str, int]]] = {}
    for key, encoding in sorted(encodings.items()):
        (part, fqn), state, spec = key, state_name(key), specs[key]
        names.setdefault(part, {})[state] = encoding.name
        lengths = row_lengths.setdefault(part, {}).setdefault(state, {})
        stored_length = encoding.stored_specs(fqn, spec.shape)[fqn].shape[-1]
        if encoding.row_length(stored_length) != spec.shape[-1]:
            lengths[fqn] = spec.shape[-1]
    for key in specs.keys() - encodings.keys():
        states = names.get(key[0], {})
        of_state = _ENCODINGS.get(states.get(state_name(key), ""))
        is_code = of_state is not None and specs[key].dtype == of_state.dtype
        if is_code or is_scale(*key, states):
            raise FormatError(
                f"{':'.join(key)}: got {specs[key].dtype} beside encoded tensors, which a reader "
                'takes for encoded, too; save with compression="none"'
            )
    return {
        part: {
            state: EncodingRecord(name=name, row_lengths=row_lengths[part][state])
            for state, name in states.items()
        }
        for part, states in names.items()
    }


def is_scale(part: str, fqn: str, states: Collection[str]) -> bool:
    """Return whether a stored tensor has the scales of a tensor in one of the encoded states."""
    scaled = fqn.removesuffix(_SCALE)
    return scaled != fqn and part == OPTIMIZER and state_name((part, scaled)) in states


def compression_name(records: Iterable[EncodingRecord]) -> str:
    """Return the compression that gives these encodings; their names if none does."""
    names = {record.name for record in records}
    moments = names - {MasterEncoding.name}
    for compression, (first, second) in _MOMENT_BITS.items():
        if moments == {first_moment(first).name, second_moment(second).name}:
            return compression
    return ", ".join(sorted(moments)) or ("lossless" if names else "none")


def decoded_specs(
    part: str,
    records: Mapping[str, EncodingRecord],
    stored: Mapping[str, TensorSpec],
    *,
    file: str,
) -> dict[str, tuple[Encoding, TensorSpec]]:
    """Return the encoding and the decoded spec of each encoded tensor among these.

    `stored`: specs of stored tensors, with the scales of each. FormatError, naming `file` and the
    tensor, if they do not fit the records.
    """
    decoded = {}
    for fqn, spec in stored.items():
        record = records.get(state_name((part, fqn)))
        if record is None:
            continue
        encoding = encoding_named(record.name, file=file)
        if spec.dtype != encoding.dtype and not (part == OPTIMIZER and scale_name(fqn) in stored):
            continue
        *outer, stored_length = spec.shape or (0,)
        length = record.row_lengths.get(fqn, encoding.row_length(stored_length))
        shape = (*outer, length)
        expected = encoding.stored_specs(fqn, shape)
        actual = {name: stored.get(name) for name in expected}
        if actual != expected:
            raise FormatError(
                f"{file}: {part}:{fqn}: got {_specs_text(actual)}, "
                f"expected {_specs_text(expected)} for the encoding {encoding.name}"
            )
        decoded[fqn] = encoding, spec_of("F32", shape)
    return decoded


def _specs_text(specs: Mapping[str, TensorSpec | None]) -> str:
    texts = (f"{spec.dtype} {list(spec.shape)}" if spec else "none" for spec in specs.values())
    return " with ".join(texts)


def choose_encodings(
    specs: Mapping[Key, TensorSpec], compression: Compression
) -> dict[Key, Encoding]:
    """Return the encoding of each tensor that this compression encodes.

    `specs`: all tensors of the checkpoint, or of one rank. Encoded are float32 masters beside a
    bfloat16 model tensor, and float32 moments of Adam: a parameter's `exp_avg` and `exp_avg_sq`
    together. Rows have at most 2**20 elements, and rows of moments at least 32.
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
        shape = spec.shape
        if spec.dtype != "F32" or not shape or not prod(shape) or shape[-1] > _MAX_ROW:
            continue
        if part == MASTER:
            if specs.get((MODEL, fqn)) == spec_of("BF16", spec.shape):
                chosen[key] = _ENCODINGS[MasterEncoding.name]
        elif part == OPTIMIZER and state_name(key) in moments and spec.shape[-1] >= _MIN_ROW:
            owner = fqn.rpartition("/")[0]
            if all(specs.get((part, f"{owner}/{state}")) == spec for state in moments):
                chosen[key] = moments[state_name(key)]
    return chosen

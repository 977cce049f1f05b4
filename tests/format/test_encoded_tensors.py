"""Which tensors are encoded, what is recorded of them, and what a reader derives from that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unified_ckpt as uc
from unified_ckpt.core.sharding.shardings import TensorSpec, spec_of
from unified_ckpt.format.encoded_tensors import (
    Compression,
    aligned_runs,
    choose_encodings,
    compression_name,
    decoded_specs,
    encoding_named,
    encoding_records,
    is_scale,
    row_runs,
    stored_elements,
)
from unified_ckpt.format.manifest_fields import EncodingRecord

Key = tuple[str, str]
NAMES = ["masters-16", "signed-sqrt-8", "signed-sqrt-6", "log-8", "log-4"]


def state_of(fqn: str, shape: tuple[int, ...]) -> dict[Key, TensorSpec]:
    """A parameter in mixed precision with Adam's state."""
    moments = {
        ("optimizer", f"{fqn}/{m}"): spec_of("F32", shape) for m in ("exp_avg", "exp_avg_sq")
    }
    return {
        ("model", fqn): spec_of("BF16", shape),
        ("master_weights", fqn): spec_of("F32", shape),
        **moments,
    }


def stored_of(specs: dict[Key, TensorSpec], compression: Compression) -> dict[Key, TensorSpec]:
    encodings = choose_encodings(specs, compression)
    stored = {key: spec for key, spec in specs.items() if key not in encodings}
    for (part, fqn), encoding in encodings.items():
        replacing = encoding.stored_specs(fqn, specs[part, fqn].shape)
        stored |= {(part, name): spec for name, spec in replacing.items()}
    return stored


@pytest.mark.parametrize("compression", ["lossless", "O1", "O2"])
def test_a_reader_derives_the_specs_that_were_encoded(compression: Compression) -> None:
    specs: dict[Key, TensorSpec] = {}
    for length in [*range(1, 140), 4096]:
        specs |= state_of(f"layer{length}.w", (3, length))
    specs |= state_of("scalar", ()) | state_of("empty", (0, 64)) | state_of("long", (1 << 21,))
    specs |= {("model", "b.scale"): spec_of("BF16", (64,)), ("model", "b"): spec_of("F16", (64,))}
    specs |= {("master_weights", fqn): spec_of("F32", (64,)) for fqn in ("b", "b.scale")}
    encodings, stored = choose_encodings(specs, compression), stored_of(specs, compression)
    records = encoding_records(encodings, specs)
    decoded = {}
    for part in {part for part, _ in stored}:
        tensors = {name: spec for (other, name), spec in stored.items() if other == part}
        for fqn, entry in decoded_specs(part, records.get(part, {}), tensors, file="f").items():
            decoded[part, fqn] = entry
    assert decoded == {key: (encodings[key], specs[key]) for key in encodings}
    all_records = [record for states in records.values() for record in states.values()]
    assert compression_name(all_records) == compression
    scales = {key for key in stored if is_scale(*key, records.get(key[0], {}))}
    assert scales == stored.keys() - specs.keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_runs_of_blocks_are_byte_ranges(name: str, length: int) -> None:
    """A run of whole blocks of a row, encoded alone, is a range of each stored row."""
    encoding = encoding_named(name, file="")
    rows = np.random.default_rng(0).random((3, length), np.float32).view(np.uint32)
    whole = encoding.encode(rows)
    assert tuple(stored.shape[1] for stored in whole) == encoding.row_nbytes(length)
    for start in range(0, length, 64):
        for stop in {*range(start + 64, length, 64), length}:
            part = encoding.encode(np.ascontiguousarray(rows[:, start:stop]))
            low, high = encoding.row_nbytes(start), encoding.row_nbytes(stop)
            for actual, stored, first, last in zip(part, whole, low, high, strict=True):
                assert np.array_equal(actual, stored[:, first:last])


LENGTHS = st.sampled_from([1, 63, 64, 65, 200, 2**18 - 1, 2**18, 2**18 + 65, 2**20 - 70, 2**20])


@given(LENGTHS, st.integers(1, 5), st.data())
def test_runs_are_the_blocks_of_a_range(length: int, rows: int, data: st.DataObject) -> None:
    """`aligned_runs` divides a tensor in one way, whatever part of it is read."""
    total = rows * length
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    runs = list(row_runs(start, stop, length))
    ends = [run.start + (run.count - 1) * length + run.width for run in runs]
    assert [run.start for run in runs[1:]] == ends[:-1]
    assert 0 <= start - runs[0].start < 64
    assert 0 <= ends[-1] - stop < 64
    division = list(aligned_runs(0, total, (rows, length)))
    for run in runs + division:
        assert run.low % 64 == 0
        assert run.high % 64 == 0 or run.high == length
        assert run.count == 1 or run.width == length
        assert run.count * run.width <= 2**18
    assert list(aligned_runs(start, stop, (rows, length))) == [
        run for run in division if run.start < stop and run.start + run.count * run.width > start
    ]


@given(st.sampled_from(NAMES), st.sampled_from([1, 63, 64, 65, 200]), st.data())
def test_elements_of_stored_bytes(name: str, length: int, data: st.DataObject) -> None:
    encoding = encoding_named(name, file="")
    index = data.draw(st.integers(0, len(encoding.row_nbytes(64)) - 1))
    elements = [  # of each byte of the stored tensor: those of its block
        range(row * length + first, row * length + min(first + 64, length))
        for row in range(3)
        for first in range(0, length, 64)
        for _ in range(
            encoding.row_nbytes(min(first + 64, length))[index] - encoding.row_nbytes(first)[index]
        )
    ]
    start = data.draw(st.integers(0, len(elements)))
    stop = data.draw(st.integers(start, len(elements)))
    expected = (elements[start].start, elements[stop - 1].stop) if start < stop else (0, 0)
    assert stored_elements(encoding, index, length, start, stop) == expected


@pytest.mark.parametrize(
    ("names", "text"),
    [([], "none"), (["masters-16", "log-4", "signed-sqrt-8"], "log-4, signed-sqrt-8")],
)
def test_compression_of_other_encodings_is_their_names(names: list[str], text: str) -> None:
    assert compression_name(EncodingRecord(name=name) for name in names) == text


def test_unknown_encodings_are_refused_by_name() -> None:
    with pytest.raises(uc.FormatError, match=r"^the file: .*'zip-9'.*masters-16"):
        encoding_named("zip-9", file="the file")


MOMENT = {"exp_avg": EncodingRecord(name="signed-sqrt-6")}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"w/exp_avg": ("U8", (2, 48))}, r"w/exp_avg: got U8 \[2, 48\] with none"),
        ({"w/exp_avg": ("F32", (2, 48)), "w/exp_avg.scale": ("BF16", (2, 1))}, "got F32"),
        ({"w/exp_avg": ("U8", (2, 48)), "w/exp_avg.scale": ("F16", (2, 1))}, r"F16 \[2, 1\]"),
        ({"w/exp_avg": ("U8", (2, 48)), "w/exp_avg.scale": ("BF16", (2, 2))}, r"BF16 \[2, 2\]"),
        ({"w/exp_avg": ("U8", ()), "w/exp_avg.scale": ("BF16", ())}, "w/exp_avg: got U8"),
    ],
)
def test_stored_tensors_that_do_not_fit_are_refused(
    stored: dict[str, tuple[str, tuple[int, ...]]], message: str
) -> None:
    specs = {name: spec_of(*spec) for name, spec in stored.items()}
    with pytest.raises(uc.FormatError, match=f"^the file: optimizer:.*{message}"):
        decoded_specs("optimizer", MOMENT, specs, file="the file")


@pytest.mark.parametrize("length", [0, 62, 65, 2**62])
def test_row_lengths_that_do_not_fit_are_refused(length: int) -> None:
    record = EncodingRecord(name="signed-sqrt-6", row_lengths={"w/exp_avg": length})
    stored = {"w/exp_avg": spec_of("U8", (2, 48)), "w/exp_avg.scale": spec_of("BF16", (2, 1))}
    with pytest.raises(uc.FormatError, match="w/exp_avg: got"):
        decoded_specs("optimizer", {"exp_avg": record}, stored, file="")


@pytest.mark.parametrize(
    ("key", "dtype"), [("v/exp_avg", "U8"), ("v/exp_avg.scale", "BF16"), ("w/exp_avg.scale", "F32")]
)
def test_state_that_looks_encoded_is_refused_when_it_is_written(key: str, dtype: str) -> None:
    specs = state_of("w", (2, 64))
    encodings = choose_encodings(specs, "O1")
    with pytest.raises(uc.FormatError, match=f"^optimizer:{key}: got {dtype}"):
        encoding_records(encodings, specs | {("optimizer", key): spec_of(dtype, (2, 64))})


@pytest.mark.parametrize(
    ("name", "bits", "valid"),
    [
        ("signed-sqrt-8", [0x7F7F], True),
        ("signed-sqrt-8", [0x7F80], False),
        ("signed-sqrt-8", [0x7FC0], False),
        ("signed-sqrt-8", [0x8001], False),
        ("log-4", [0x8000, 0], True),
        ("log-4", [0x8001, 1], True),
        ("log-4", [2, 1], False),
        ("log-4", [0, 0x8001], False),
        ("log-4", [0, 0x7F80], False),
        ("log-4", [0x7F80, 0x7F7F], False),
    ],
)
def test_scales_are_checked(name: str, bits: list[int], valid: bool) -> None:
    encoding = encoding_named(name, file="")
    scales = np.array([bits], np.uint16).view(np.uint8)
    assert encoding.has_valid_scales(scales) == valid  # type: ignore[union-attr]

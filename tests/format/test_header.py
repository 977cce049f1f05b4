from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors import deserialize as safetensors_deserialize
from safetensors.torch import save

from unified_ckpt.core.sharding.dtypes import ITEM_BITS
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.format import header
from unified_ckpt.format.header import Entry, encode_header, file_order, header_nbytes, parse_header

FILE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}
Items = list[tuple[str, str, tuple[int, ...]]]
deserialize: Callable[[bytes], list[tuple[str, Any]]] = safetensors_deserialize


def tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype != "F4":
        return torch.empty(shape, dtype=DTYPES[dtype])
    # two elements per byte
    return torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8).view(DTYPES[dtype])


def written_by_safetensors(items: Items) -> bytes:
    return save(
        {name: tensor(dtype, shape) for name, dtype, shape in items}, metadata={"format": "pt"}
    )


def raw(header: object, size: int = 0) -> bytes:
    body = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )  # as it is written
    return len(body).to_bytes(8, "little") + body + bytes(size)


def tensor_header(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def parse(stored: bytes) -> dict[str, Entry]:
    return parse_header(stored, file_size=len(stored), file=FILE)


def check_equal_to_safetensors(items: Items) -> None:
    expected = written_by_safetensors(items)
    head, entries = encode_header(file_order(items))
    assert expected[: len(head)] == head
    assert parse(expected) == entries
    assert list(parse(expected)) == [name for name, _, _ in file_order(items)]


def test_every_dtype_equals_safetensors_byte_for_byte() -> None:
    for shape in ((2, 4), (0, 4), (2,)):
        items = [(f"{name}.{dtype}", dtype, shape) for dtype in DTYPES for name in ("b", "a")]
        check_equal_to_safetensors([*items, ("scalar", "BF16", ())])


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(
            st.sampled_from(["F32", "BF16", "U8", "BOOL", "I64"]),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
        ),
        max_size=6,
    )
)
def test_any_names_equal_safetensors(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    check_equal_to_safetensors([(name, *spec) for name, spec in tensors.items()])


def test_names_are_ordered_as_their_utf8_bytes() -> None:
    items: Items = [
        ("\U0001f642", "F32", ()),
        ("\uffff", "F32", ()),
        ("z", "F32", ()),
        ("é", "F32", ()),
        ("w", "U8", ()),
        ("v", "U64", ()),
    ]
    assert [name for name, _, _ in file_order(items)] == [
        "v",
        "z",
        "é",
        "\uffff",
        "\U0001f642",
        "w",
    ]
    check_equal_to_safetensors(items)


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {}])
def test_a_canonical_header_is_parsed_without_json(
    metadata: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load parses the headers of every folder, so the fast path must be taken."""
    items = [("é", "BOOL", ()), ("w@0:2/4", "F32", (2, 0)), ("x", "F8_E4M3", (3, 2))]
    head, entries = encode_header(items, metadata=metadata)
    monkeypatch.setattr(header, "parse_json", lambda *_, **__: pytest.fail("the long way"))
    assert list(parse(head + bytes(7)).items()) == list(entries.items())


def outcome(stored: bytes) -> object:
    try:
        return list(parse(stored).items())
    except (FormatError, IntegrityError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("names", "reason"),
    [(b"ww", "got key 'w' twice"), (b"_w", "header: __metadata__ is not an object")],
)
def test_names_that_the_canonical_parser_must_refuse(names: bytes, reason: str) -> None:
    """Everything else in the file is valid."""
    keys = [b"__metadata__" if char == b"_"[0] else b"w" for char in names]
    items = [b'"%b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % key for key in keys]
    with pytest.raises(FormatError, match=reason):
        parse(raw(b"{" + b",".join(items) + b"}"))


@given(st.data())
@settings(max_examples=150)
def test_both_parsers_agree(data: st.DataObject) -> None:
    """Headers are canonical, with some bytes changed."""
    names = st.lists(
        st.text(st.sampled_from('ab"\\,}é\n'), max_size=3) | st.just("__metadata__ "),
        unique=True,
        max_size=4,
    )
    shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    items = [
        (name, data.draw(st.sampled_from(["F32", "U8", "BF16", "I64"])), data.draw(shapes))
        for name in data.draw(names)
    ]
    head, entries = encode_header(items)
    body = bytearray(head[8:])
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(body) - 1))
        stop = start + data.draw(st.integers(0, 2))
        body[start:stop] = data.draw(
            st.sampled_from(
                [
                    b"",
                    b"0",
                    b"1",
                    b"9",
                    b"}",
                    b",",
                    b" ",
                    b'"',
                    b"[",
                    b"-",
                    b"\n",
                    b"\xff",
                    b"\\u0061",
                ]
            )
        )
    last = max((entry.stop for entry in entries.values()), default=len(head))
    stored = raw(bytes(body), last - len(head) + data.draw(st.sampled_from([0, 0, 0, 1])))
    expected = outcome(stored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "_parse_canonical", lambda *_: None)
        assert outcome(stored) == expected


@pytest.mark.parametrize("metadata", [{}, {"format": "pt", "a": 'é"\n'}])
def test_other_metadata(metadata: dict[str, str]) -> None:
    head, entries = encode_header([("w", "F32", (1,))], metadata=metadata)
    assert json.loads(head[8:]).get("__metadata__", {}) == metadata
    assert len(head) % 8 == 0
    assert parse(head + bytes(4)) == entries == {"w": Entry("F32", (1,), len(head), len(head) + 4)}
    assert [name for name, _ in deserialize(head + bytes(4))] == ["w"]


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([("w", "F32", (1,)), ("w", "F32", (1,))], "got a repeated name 'w'"),
        ([("__metadata__", "F32", (1,))], "got the reserved name '__metadata__'"),
        ([("w", "F33", (1,))], "'w': dtype: got 'F33'"),
        ([("w", "F32", (-1,))], r"'w': got shape \(-1,\)"),
        ([("w", "F32", (True,))], r"'w': got shape \(True,\)"),
        ([("w", "F32", (1,) * 256)], "expected at most 255"),
        ([("w", "F4", (3,))], "'w': F4 tensor .* multiple of 8"),
        ([("\ud800", "F32", (1,))], "not valid Unicode"),
        ([("w" * 500, "F32", (1,))], "expected at most 500; divide"),
    ],
)
def test_invalid_headers_are_not_written(
    monkeypatch: pytest.MonkeyPatch, items: Items, reason: str
) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_NBYTES", 500)
    with pytest.raises(FormatError, match=reason):
        encode_header(items)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"", "got 0 bytes, expected at least 8"),
        (b"\0" * 7, "got 7 bytes, expected at least 8"),
        (
            (100_000_001).to_bytes(8, "little"),
            "length of 100000001 bytes, expected at most 100000000",
        ),
        ((2**63).to_bytes(8, "little"), "length of 9223372036854775808 bytes"),
        ((2**64 - 1).to_bytes(8, "little"), "length of 18446744073709551615 bytes"),
        ((3).to_bytes(8, "little") + b"{}", "length of 3 bytes in a file of 10"),
    ],
)
def test_impossible_header_lengths_are_refused(stored: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=f"{FILE}: .*{reason}"):
        header_nbytes(stored[:8], file_size=len(stored), file=FILE)
    with pytest.raises(FormatError, match=f"{FILE}: .*{reason}"):
        parse(stored)


NOT_VALID = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"{}\0", "not valid JSON"),
    (b"\xff{}", "not valid JSON"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"w": NaN}', "NaN is not a JSON number"),
    (b"[]", "got a JSON list, expected an object"),
    (b"null", "got a JSON NoneType"),
    (
        b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        "got key 'w' twice",
    ),
    (
        b'{"w":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        "got key 'dtype' twice",
    ),
    (b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "are not valid Unicode"),
    (b'{"__metadata__":{"a":"\\udfff"}}', "are not valid Unicode"),
    (
        b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":"\\ud800"}}',
        "are not valid Unicode",
    ),
    ({"__metadata__": []}, "header: __metadata__ is not an object of strings"),
    ({"__metadata__": {"a": 1}}, "header: __metadata__ is not an object of strings"),
    ({"w": []}, "'w': expected an object with dtype, shape and data_offsets"),
    (
        {"w": {"dtype": "F32", "shape": [2]}},
        "'w': expected an object with dtype, shape and data_offsets",
    ),
    (tensor_header(dtype="F33"), "'w': got unknown dtype 'F33'"),
    (tensor_header(dtype=["F32"]), r"'w': got unknown dtype \['F32'\]"),
    (tensor_header(shape=2), "'w': got shape 2"),
    (tensor_header(shape=[-2]), r"'w': got shape \[-2\]"),
    (tensor_header(shape=[2.0]), r"'w': got shape \[2.0\]"),
    (tensor_header(shape=[True, 2]), r"'w': got shape \[True, 2\]"),
    (tensor_header(shape=["2"]), r"'w': got shape \['2'\]"),
    (tensor_header(shape=[0, 2**63]), "'w': got shape"),
    (tensor_header(shape=[1] * 256), "'w': got shape"),
    (tensor_header(data_offsets=[0]), r"'w': got data_offsets \[0\], expected two"),
    (tensor_header(data_offsets=[0, 8, 8]), "'w': got data_offsets"),
    (tensor_header(data_offsets=8), "'w': got data_offsets 8"),
    (tensor_header(data_offsets=[-8, 0]), r"'w': got data_offsets \[-8, 0\]"),
    (tensor_header(data_offsets=[0, 8.0]), "'w': got data_offsets"),
    (tensor_header(data_offsets=[False, 8]), "'w': got data_offsets"),
    (tensor_header(data_offsets=[0, 2**63]), "'w': got data_offsets"),
    (tensor_header(data_offsets=[8, 0]), r"'w': got data_offsets \[8, 0\], expected start <= stop"),
    (
        tensor_header(shape=[3]),
        r"'w': got 8 bytes from data_offsets, expected 12 for F32 of shape \(3,\)",
    ),
    (tensor_header(shape=[2**62, 2**62]), "'w': got shape .*a product below"),
    (tensor_header(dtype="F4", shape=[3], data_offsets=[0, 1]), "'w': F4 tensor .* multiple of 8"),
    (tensor_header(data_offsets=[4, 12]), "'w' leaves a gap after the header"),
    (
        {**tensor_header(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
        "'v' overlaps tensor 'w'",
    ),
    (
        {**tensor_header(), "v": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}},
        "'v' overlaps tensor 'w'",
    ),
    (
        {**tensor_header(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        "overlaps tensor",
    ),
    (
        {**tensor_header(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [9, 13]}},
        "'v' leaves a gap after tensor 'w'",
    ),
]


@pytest.mark.parametrize(("header", "reason"), NOT_VALID)
def test_every_invalid_header_is_refused(header: object, reason: str) -> None:
    stored = raw(header, 8)
    with pytest.raises(FormatError, match=f"{FILE}: .*{reason}"):
        parse(stored)
    with pytest.raises(SafetensorError, match=r".+"):
        deserialize(stored)


def test_files_of_another_size_are_refused() -> None:
    assert header_nbytes(raw(b"{}")[:8], file_size=10, file=FILE) == 10
    with pytest.raises(FormatError, match="header: got 9 bytes, expected 10"):
        parse_header(raw(b"{}")[:9], file_size=10, file=FILE)
    whole = raw(tensor_header(), 8)
    text = f"{FILE}: file is truncated: got {len(whole) - 3} bytes, expected {len(whole)}"
    with pytest.raises(IntegrityError, match=text):
        parse(whole[:-3])
    with pytest.raises(FormatError, match="2 bytes belong to no tensor"):
        parse(raw(tensor_header(), 10))


def test_headers_of_other_writers_are_parsed() -> None:
    header = {
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [8, 9], "more": 1},
        **tensor_header(),
        "e": {"dtype": "U8", "shape": [0], "data_offsets": [8, 8]},
    }
    assert list(parse(raw(header, 9))) == ["w", "e", "b"]
    assert (
        parse(raw(b'{"w":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}   ', 3))["w"].stop
        == 8 + 61 + 3
    )


@given(st.binary(max_size=40))
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises((FormatError, IntegrityError), match=f"^{FILE}: "):
        parse(raw(body, 8))


def test_every_dtype_of_the_table_is_known_to_safetensors() -> None:
    items = [(dtype, dtype, (8,)) for dtype in ITEM_BITS]
    head, entries = encode_header(file_order(items))
    stored = head + bytes(max(entry.stop for entry in entries.values()) - len(head))
    assert {name for name, _ in deserialize(stored)} == set(ITEM_BITS)

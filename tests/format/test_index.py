from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.errors import FormatError
from unified_ckpt.format.index import check_file_name, encode_index, parse_index

FILE = "model.safetensors.index.json"


def test_index_equals_that_of_transformers() -> None:
    weight_map = {
        "b": "model-00002-of-00002.safetensors",
        "a": "model-00001-of-00002.safetensors",
        "é": "model.safetensors",
    }
    expected = (
        json.dumps(
            {"metadata": {"total_size": 12}, "weight_map": weight_map}, indent=2, sort_keys=True
        )
        + "\n"
    )
    assert encode_index(total_size=12, weight_map=weight_map) == expected.encode()


@given(
    st.integers(0, 2**62),
    st.dictionaries(
        st.text(st.characters(codec="utf-8")), st.sampled_from(["a.safetensors", "b.safetensors"])
    ),
)
def test_round_trip(total_size: int, weight_map: dict[str, str]) -> None:
    body = encode_index(total_size=total_size, weight_map=weight_map)
    assert parse_index(body, file=FILE) == weight_map


@pytest.mark.parametrize("metadata", ["{}", "[]", "null", '{"total_size": NaN}'])
def test_metadata_of_other_writers_is_ignored(metadata: str) -> None:
    assert parse_index(f'{{"metadata": {metadata}, "weight_map": {{}}}}'.encode(), file=FILE) == {}


@pytest.mark.parametrize(
    ("text", "bodies"),
    [
        ("not valid JSON", [b"", b"{", b"\xff", b"[" * 100_000]),
        ("got no weight_map", [b"[]", b"{}", b'{"weight_map": []}', b"null"]),
        (
            "tensor 'w': got file",
            [b'{"weight_map": {"w": %b}}' % value for value in (b"1", b"null", b'["a"]', b"{}")],
        ),
    ],
)
def test_invalid_index_is_refused(text: str, bodies: list[bytes]) -> None:
    for body in bodies:
        with pytest.raises(FormatError, match=f"{FILE}: {text}"):
            parse_index(body, file=FILE)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../x", "a/b", "a\\b", "C:x", "a\0b"]
)
def test_files_outside_the_folder_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="leads out of the folder"):
        check_file_name(name)
    with pytest.raises(FormatError, match=f"{FILE}: file name .* leads out of the folder"):
        parse_index(json.dumps({"weight_map": {"w": name}}).encode(), file=FILE)
    with pytest.raises(FormatError, match="leads out of the folder"):
        encode_index(total_size=0, weight_map={"w": name})

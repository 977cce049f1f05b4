from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.errors import FormatError
from unified_ckpt.format.index import Index, check_file_name, encode_index, parse_index

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
    assert parse_index(
        encode_index(total_size=total_size, weight_map=weight_map), file=FILE
    ) == Index(total_size, weight_map)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"total_size": None},
        {"total_size": "12"},
        {"total_size": True},
        {"total_size": -1},
        [],
        None,
    ],
)
def test_the_total_size_of_other_writers_may_be_absent(metadata: object) -> None:
    assert parse_index(
        json.dumps({"metadata": metadata, "weight_map": {}}).encode(), file=FILE
    ) == Index(None, {})


def test_the_total_size_of_other_writers_may_be_a_float() -> None:
    assert (
        parse_index(b'{"metadata": {"total_size": 12.0}, "weight_map": {}}', file=FILE).total_size
        == 12
    )
    assert (
        parse_index(b'{"metadata": {"total_size": NaN}, "weight_map": {}}', file=FILE).total_size
        is None
    )


@pytest.mark.parametrize("encoded", [b"", b"{", b"\xff", b"[" * 100_000])
def test_text_that_is_not_json_is_refused(encoded: bytes) -> None:
    with pytest.raises(FormatError, match=f"{FILE}: not valid JSON"):
        parse_index(encoded, file=FILE)


@pytest.mark.parametrize("encoded", [b"[]", b"{}", b'{"weight_map": []}', b"null"])
def test_an_index_without_weight_map_is_refused(encoded: bytes) -> None:
    with pytest.raises(FormatError, match=f"{FILE}: got no weight_map"):
        parse_index(encoded, file=FILE)


@pytest.mark.parametrize("value", [1, None, ["a"], {}])
def test_files_that_are_not_strings_are_refused(value: object) -> None:
    with pytest.raises(FormatError, match=f"{FILE}: tensor 'w': got file"):
        parse_index(json.dumps({"weight_map": {"w": value}}).encode(), file=FILE)


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

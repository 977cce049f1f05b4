from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import unified_ckpt
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.format.renames import parse_renames

FILE = "a/b.json"
ROOT = Path(unified_ckpt.__file__).parent


@pytest.mark.parametrize(
    "body", [b'{"a": 1, "a": 1}', b'[{"b": {"c": 1, "a": [], "a": {}}}]', b'{"a": 1, "\\u0061": 2}']
)
@pytest.mark.parametrize("constants", [False, True])
def test_a_key_that_occurs_twice_is_refused(body: bytes, constants: bool) -> None:
    """Duplicates are found at any depth and in any spelling."""
    with pytest.raises(FormatError, match=f"{FILE}: got key 'a' twice in one object"):
        parse_json(body, file=FILE, constants=constants)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"\xef\xbb\xbf{}", b"[" * 100_000, b"1" * 5000]
)
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError, match=f"{FILE}: not valid JSON"):
        parse_json(body, file=FILE, constants=True)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b"-1e999"])
def test_nan_and_infinity_need_constants(number: bytes) -> None:
    with pytest.raises(FormatError, match=f"{FILE}: not valid JSON"):
        parse_json(b"[" + number + b"]", file=FILE)
    assert isinstance(parse_json(b"[" + number + b"]", file=FILE, constants=True)[0], float)


def test_values_are_those_of_json() -> None:
    value = {"a": [1, -2.5, 10**30, "é\ud83d\ude42", None, True], "b": {}}
    body = json.dumps(value).encode()
    assert (
        parse_json(body, file=FILE)
        == parse_json(memoryview(body), file=FILE)
        == parse_json(body.decode(), file=FILE)
    )
    assert parse_json(body, file=FILE) == json.loads(body)


def test_configs_and_rename_rules_use_this_parser(tmp_path: Path) -> None:
    body = b'{"rules": [], "rules": []}'
    (tmp_path / "config.json").write_bytes(body)
    with pytest.raises(FormatError, match=r"config.json: got key 'rules' twice"):
        read_json_object(str(tmp_path / "config.json"))
    with pytest.raises(FormatError, match=r"rules.json: got key 'rules' twice"):
        parse_renames(body, file="rules.json")


def test_no_other_module_parses_json_files() -> None:
    """JSON that ranks exchange does not come from files."""
    modules = [
        str(path.relative_to(ROOT))
        for folder in ("format", "sources", "exports", "views")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("load", "loads")
        and ast.unparse(node.value) == "json"
    ]
    assert set(modules) == {"format/json_text.py"}

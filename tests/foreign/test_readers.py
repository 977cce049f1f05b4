"""Other libraries open our folders: each tensor has the bytes that lie in the file.

Three readings are compared: theirs, ours, and plain JSON with slices of bytes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.foreign.readers import table
from tests.support.foreign.readers.program import READERS, described
from tests.support.format.golden import GOLDEN

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
INTERPRETERS = "UNIFIED_CKPT_READERS"


def documented_rows() -> list[str]:
    section = PAGE.read_text().partition("## Opens in\n")[2].partition("\n## ")[0]
    return section.partition(table.HEAD + "\n")[2].partition("\n\n")[0].splitlines()


def without_versions(rows: list[str]) -> set[tuple[str, ...]]:
    cells = [row.split(" | ") for row in rows]
    return {(call, *outcomes) for call, _, *outcomes in cells}


@pytest.mark.parametrize("reader", READERS[:2], ids=lambda reader: reader.call)
def test_safetensors_reads_every_golden_file(reader: table.Reader) -> None:
    for file in table.files():
        assert reader.read(str(GOLDEN / file)) == table.stored(GOLDEN / file), file


@pytest.mark.parametrize("name", [*table.ALONE, "everything", "without-model", "adapter"])
def test_we_read_what_lies_in_the_files(name: str) -> None:
    with uc.open(GOLDEN / name) as opened:
        for part in opened.parts:
            actual = described((fqn, opened[part][fqn][...]) for fqn in opened[part])
            expected = {}
            for path in (GOLDEN / name).glob(f"{part}*.safetensors"):
                if path.name.removeprefix(part).startswith((".safetensors", "-0")):
                    expected |= table.stored(path)
            assert {fqn: actual[fqn] for fqn in expected} == expected, part


def test_the_page_lists_every_call() -> None:
    calls = [row.split(" | ")[0].removeprefix("| ").strip("`") for row in documented_rows()]
    assert list(dict.fromkeys(calls)) == [reader.call for reader in READERS]


@pytest.mark.slow
def test_installed_libraries_read_as_documented(tmp_path: Path) -> None:
    rows = table.rows([table.run_program(sys.executable, table.export(tmp_path))])
    assert without_versions(rows) - without_versions(documented_rows()) == set()


@pytest.mark.long
def test_the_page_is_what_all_libraries_read(tmp_path: Path) -> None:
    """The interpreters have the oldest and the newest versions: see CONTRIBUTING.md."""
    pythons = os.environ.get(INTERPRETERS, "")
    if not pythons:
        pytest.skip(f"{INTERPRETERS} lists no interpreters; CONTRIBUTING.md says how to make them")
    exported = table.export(tmp_path)
    rows = table.rows(table.run_program(python, exported) for python in pythons.split(os.pathsep))
    assert documented_rows() == rows

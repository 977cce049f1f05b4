"""Runs the environments of docs/versions.md, and compares the page and the workflow with them.

`VERSIONS_FOLDER=FOLDER` keeps the environments, which take minutes to build.
"""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys

import pytest

from tests.versions.run import (
    CHECKOUT,
    COLUMNS,
    ENVIRONMENTS,
    OTHERS,
    PAGE,
    SELECTION,
    lower_bounds,
    outcome,
    row,
)

WORKFLOW = CHECKOUT / ".github" / "workflows" / "versions.yml"


def rows() -> dict[str, list[str]]:
    """The cells of each row of the page, by the name of the environment."""
    lines = re.findall(r"^\| `([\w.-]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: text.split(" | ") for name, text in lines}


def test_page_and_workflow_have_each_environment() -> None:
    assert list(rows()) == list(ENVIRONMENTS)
    names = re.findall(r"^ {10}- ([\w.-]+)$", WORKFLOW.read_text(), re.MULTILINE)
    assert names == list(ENVIRONMENTS)


def test_no_environment_failed() -> None:
    assert [name for name, cells in rows().items() if "failed" in cells[-1]] == []


def test_lowest_versions_are_the_bounds_of_pyproject() -> None:
    """A bound that moves needs another run."""
    python, *cells = rows()["lowest"]
    versions = dict(zip(COLUMNS, cells, strict=False))
    versions |= dict(pair.split(" ") for pair in cells[len(COLUMNS)].split(", "))
    bounds = {name: version for name, version in lower_bounds().items() if name in versions}
    assert bounds.keys() == {*COLUMNS, *OTHERS}
    assert {
        name: version
        for name, version in versions.items()
        if not f"{version}.".startswith(f"{bounds[name]}.")
    } == {}
    assert python.startswith("3.11.")


@pytest.mark.parametrize(
    ("end", "result"),
    [
        ("12 passed, 3 skipped, 1 warning in 60.12s (0:01:00)", "run: 12 passed"),
        ("1 failed, 12 passed, 2 errors in 9.1s", "run: 1 failed, 12 passed, 2 errors"),
        ("ImportError: no torch", "run: failed"),
        ("", "run: failed"),
    ],
)
def test_result_names_what_failed(end: str, result: str) -> None:
    assert outcome(["..F", end] if end else []) == result


def test_row_names_versions() -> None:
    text = row("lowest", "3.11.7", {"torch": "2.10.0+cu128", "numpy": "1.26.0"}, "run: 1 passed")
    assert text.startswith("| `lowest` | 3.11.7 | 2.10.0 | ? |")
    assert "numpy 1.26.0, safetensors ?" in text


def test_selection_exists() -> None:
    assert [path for path in SELECTION if not (CHECKOUT / path).exists()] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment_passes(name: str) -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest's limit; an environment takes longer
    command = [sys.executable, str(CHECKOUT / "tests" / "versions" / "run.py"), name, "--keep-page"]
    if folder := os.environ.get("VERSIONS_FOLDER"):
        command += ["--folder", folder]
    subprocess.run(command, check=True)

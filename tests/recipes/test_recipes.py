"""Runs each recipe of docs/guide/recipes in an environment of its own, and compares its page.

`RECIPE_ENVIRONMENTS=FOLDER` keeps the environments, which take minutes to build.
"""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys

import pytest

from tests.recipes.run import CHECKOUT, RECIPES, names

PAGES = CHECKOUT / "docs" / "guide" / "recipes"


@pytest.mark.long
@pytest.mark.parametrize("name", names())
def test_recipe_runs(name: str) -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest's limit; an environment takes longer
    command = [sys.executable, str(RECIPES / "run.py"), name]
    if folder := os.environ.get("RECIPE_ENVIRONMENTS"):
        command += ["--environments", folder]
    subprocess.run(command, check=True)


@pytest.mark.parametrize("name", names())
def test_index_names_command_and_versions(name: str) -> None:
    """The recipe's row has its page, its command, the date of its last run, and what it pins."""
    lines = (PAGES / "index.md").read_text().splitlines()
    (row,) = (line for line in lines if f"({name}.md)" in line)
    assert f"`python tests/recipes/run.py {name}`" in row
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", row)
    text = (RECIPES / name / "requirements.txt").read_text()
    pins = re.findall(r"^([\w.-]+).*==(\S+)", text, re.MULTILINE)
    assert [pin for pin in map(" ".join, pins) if pin not in row] == []

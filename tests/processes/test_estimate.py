"""Estimates of ranks before their first step name the bytes of every file that they save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize("case", ["ddp", "fsdp", "meta", "without"])
def test_files_equal_those_of_the_save(two_ranks: Path, case: str) -> None:
    root = two_ranks / "estimate"
    sizes = {file.name: file.stat().st_size for file in (root / case).iterdir()}
    assert sizes.pop("unified_checkpoint.json")
    assert json.loads((root / f"{case}.json").read_text()) == sizes

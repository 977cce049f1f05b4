"""Runs the command line in this process."""

from __future__ import annotations

import pytest

from unified_ckpt.cli.main import main


def run_verb(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Return what the command prints; it must end with `code`, without a warning."""
    assert main([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out

"""The recipe `accelerate-dcp` on two processes: Accelerate, switched by one line, ends as stock."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from unittest import mock

import pytest

from tests.support.processes.launch import torchrun

RECIPE = Path(__file__).parents[1] / "recipes" / "accelerate-dcp"


def launch(world: int, arguments: list[str], environment: dict[str, str]) -> tuple[bool, str]:
    """Start on_cpu.py as the recipe does, in processes that have done their imports."""
    with mock.patch.dict(os.environ, environment):
        try:
            return True, torchrun(world, str(RECIPE / "on_cpu.py"), *arguments, timeout_seconds=300)
        except RuntimeError as error:
            return False, str(error)


@pytest.mark.integration
@pytest.mark.parametrize("version", [2, 1])
def test_fsdp_is_killed_and_resumes_bitwise(tmp_path: Path, version: int) -> None:
    scenario = runpy.run_path(str(RECIPE / "scenario.py"))
    scenario["check_run"](tmp_path, launch, 2, version=version, killed_at="optimizer")

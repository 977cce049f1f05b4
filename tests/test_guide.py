"""Runs the pages of the guide: every program on them, by the command that stands below it, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs" / "guide").glob("*.md"))
LAUNCH = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_of_the_guide_run(page: Path, tmp_path: Path) -> None:
    ran = 0
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if language == "python":
            (tmp_path / body.split()[1]).write_text(body)
            continue
        for line in body.splitlines():
            program, *arguments = line.split()
            if program in LAUNCH:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
                command = [*LAUNCH[program], *arguments]
                done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
                print(line, done.stdout, sep="\n")
                ran += 1
    assert ran

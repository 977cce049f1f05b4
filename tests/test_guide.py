"""Runs the pages of the guide: every program on them, by the command that stands below it, in the order of the page."""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PAGES = [page for page in sorted((Path(__file__).parents[1] / "docs" / "guide").glob("*.md")) if "\n```python\n" in page.read_text()]
LAUNCH = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}
SECONDS = 600.0  # for one program, which takes ten on a machine that does nothing else


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_of_the_guide_run(page: Path, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest's limit is for a test, not for a page of programs: `SECONDS` is theirs
    ran = 0
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if language == "python":
            (tmp_path / body.split()[1]).write_text(body)
            continue
        for line in filter(str.strip, body.splitlines()):
            program, *arguments = line.split()
            if program in LAUNCH:
                print(line, run([*LAUNCH[program], *arguments], tmp_path), sep="\n")
                ran += 1
    assert ran


def run(command: Sequence[str], folder: Path) -> str:
    """What the program said. When it fails or hangs, everything that it and its ranks have said; none of them is left behind."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    said = folder / "said.txt"
    with said.open("w") as output, subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output) as child:
        try:
            code: int | str = child.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = f"not ended within {SECONDS:g} s"
            child.terminate()  # torchrun ends its ranks when it is told to stop
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
    assert code == 0, f"{' '.join(command)}: {code}\n{said.read_text(errors='replace')}"
    return said.read_text(errors="replace")

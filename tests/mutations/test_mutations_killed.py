"""Each patch puts a bug back into the package; the tests that it names must fail.

A patch begins with the bug in one sentence and a line `Killed by:` with test files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PATCHES = sorted(FOLDER.glob("*.patch"))
SECONDS = 900.0


def apply_patch(patch: Path, root: Path, *options: str) -> None:
    command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", *options, "-i", str(patch)]
    applied = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, f"{patch.name} no longer applies:\n{applied.stdout}"


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the program patch")
def test_patches_apply() -> None:
    for patch in PATCHES:
        apply_patch(patch, ROOT, "--dry-run", "--force")


@pytest.mark.long
@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_mutation_is_killed(patch: Path, tmp_path: Path) -> None:
    for name in ("unified_ckpt", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    apply_patch(patch, tmp_path)
    killers = re.search(r"^Killed by: (.+)$", patch.read_text(), re.MULTILINE)
    assert killers is not None
    options = ["-x", "-q", "-m", "", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk"]
    options += ["-o", "faulthandler_timeout=0"]  # a slow test finds nothing
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *killers[1].split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, (
        f"{killers[1]} do not find the bug:\n{result.stdout[-2000:]}"
    )

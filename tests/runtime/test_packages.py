"""What is said where an optional package is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

import unified_ckpt as uc
from unified_ckpt.cli.main import main
from unified_ckpt.runtime.packages import missing_package

ROOT = Path(__file__).parents[2]
CALL = re.compile(r'missing_package\([^)]*extra="(\w+)"')
SOURCES = [path.read_text() for path in ROOT.glob("unified_ckpt/**/*.py")]
EXTRAS = sorted({extra for text in SOURCES for extra in CALL.findall(text)})


def advice(extra: str) -> str:
    error = missing_package("feature", ImportError("No module named 'x'"), extra=extra)
    assert isinstance(error, uc.CheckpointError)
    assert isinstance(error, ImportError)
    assert str(error).startswith("feature: No module named 'x'; run: pip install ")
    return str(error).partition("; run: ")[2]


@pytest.mark.parametrize("extra", EXTRAS)
def test_advice_installs_the_packages_of_an_extra(extra: str) -> None:
    """As a shell splits it, and without our own name, which no index may know."""
    pip, install, *packages = shlex.split(advice(extra))
    assert (pip, install) == ("pip", "install")
    assert packages
    assert not [package for package in packages if package.startswith("unified-ckpt")]


def test_advice_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert advice("report") == "pip install '.[report]' in a clone of unified-ckpt"


@pytest.mark.parametrize(
    ("verb", "module", "package"),
    [
        (["report", "a"], "jinja2", "jinja2"),
        (["completion", "bash"], "shtab", "shtab"),
        (["demo"], "transformers", "transformers"),
    ],
)
def test_verbs_fail_alike(
    verb: list[str],
    module: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    uc.save("a", model={})
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(verb) == 1
    error = capsys.readouterr().err
    assert re.search(rf"^unified-ckpt {verb[0]}: .*; run: pip install .*'{package}>=", error)
    assert error.count("\n") == 1

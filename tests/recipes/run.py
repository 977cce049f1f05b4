"""Builds the environment of a recipe and runs it: `python tests/recipes/run.py ray`.

A recipe is a folder beside this file:

- `requirements.txt`: what its environment has beside this checkout and the torch of
  constraints.txt. It pins the versions that the page names.
- `requirements-no-deps.txt`, if there is one: installed after it, without dependencies.
- `scenario.py`: runs in an empty folder. It exits with 0 only if all holds that the page says.

Its page, docs/guide/recipes/NAME.md, shows lines of these files and of the files beside them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

RECIPES = Path(__file__).resolve().parent
CHECKOUT = RECIPES.parents[1]


def names() -> list[str]:
    """The names of all recipes."""
    return sorted(scenario.parent.name for scenario in RECIPES.glob("*/scenario.py"))


def requirements(name: str) -> list[str]:
    """The projects that a recipe requires, and torch."""
    texts = [path.read_text() for path in sorted((RECIPES / name).glob("requirements*.txt"))]
    return [*re.findall(r"^([A-Za-z][\w.-]*)", "\n".join(texts), re.MULTILINE), "torch"]


def build(name: str, environment: Path) -> Path:
    """Build or update an environment. Returns its Python."""
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    torch = re.findall(r"^torch==.*$", (CHECKOUT / "constraints.txt").read_text(), re.MULTILINE)
    constraints = environment / "constraints.txt"
    constraints.write_text("\n".join(torch))
    install = [python, "-m", "pip", "install", "-q"]
    needed = ["-c", constraints, "-r", RECIPES / name / "requirements.txt", "-e", CHECKOUT]
    subprocess.run([*install, *needed], check=True)
    if (no_deps := RECIPES / name / "requirements-no-deps.txt").exists():
        subprocess.run([*install, "--no-deps", "-r", no_deps], check=True)
    return python


def versions(name: str, python: Path) -> str:
    """The installed versions of what a recipe requires."""
    code = "import sys, importlib.metadata as m; [print(n, m.version(n)) for n in sys.argv[1:]]"
    lines = subprocess.check_output([python, "-c", code, *requirements(name)], text=True)
    return ", ".join(lines.splitlines())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe. Returns the exit code of its scenario."""
    parser = argparse.ArgumentParser(prog="tests/recipes/run.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", nargs="?", choices=names())
    parser.add_argument("--list", action="store_true", help="print the names of all recipes")
    parser.add_argument(
        "--environments", type=Path, metavar="FOLDER", help="keep environments for the next run"
    )
    options = parser.parse_args(arguments)
    if options.list or options.name is None:
        print("\n".join(names()))
        return 0 if options.list else 2
    with tempfile.TemporaryDirectory(prefix=f"recipe-{options.name}-") as scratch:
        environments = options.environments or Path(scratch, "environments")
        python = build(options.name, environments.resolve() / options.name)
        (folder := Path(scratch, "run")).mkdir()
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
        start = time.monotonic()
        code = subprocess.run(
            [python, RECIPES / options.name / "scenario.py"],
            cwd=folder,
            env=environment,
            check=False,
        ).returncode
        result = "passed" if code == 0 else f"FAILED with exit code {code}"
        seconds, date = time.monotonic() - start, datetime.now(UTC).date()
        print(f"{options.name}: {result} in {seconds:.0f} s, {date}, ", end="")
        print(f"{versions(options.name, python)}, Python {sys.version.split()[0]}")
    return code


if __name__ == "__main__":
    sys.exit(main())

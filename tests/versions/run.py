"""Runs a selection of the tests with other versions: `python tests/versions/run.py newest`.

It builds an environment by uv, runs the selection there, and writes its row of docs/versions.md.
Without an interpreter of that version, it only checks that the sources compile and that all
dependencies have wheels for it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "versions.md"
EXTRAS = "transformers,accelerate,lightning,s3,completion,prometheus,report"
TOOLS = ("griffe", "hypothesis", "peft", "pytest", "pytest-xdist", "torchdata")
COLUMNS = ("torch", "transformers", "accelerate", "lightning")
OTHERS = ("numpy", "safetensors", "pydantic", "fsspec", "awscrt", "rich")
SELECTION = (  # saves and loads, FSDP2, TP, other formats and trainers; a minute on idle cores
    "tests/test_api.py",
    "tests/dcp/test_dcp_cases.py",
    "tests/dcp/test_state_dicts.py",
    "tests/engine/load/test_training_state.py",
    "tests/engine/save/test_async.py",
    "tests/foreign/dcp",
    "tests/foreign/pytorch",
    "tests/format/test_codec.py",
    "tests/format/test_golden.py",
    "tests/format/test_header.py",
    "tests/integrations/accelerate/test_calls.py",
    "tests/integrations/lightning/test_callback.py",
    "tests/integrations/transformers/test_callback.py",
    "tests/manager/test_restore.py",
    "tests/processes/test_fsdp1_ranks.py",
    "tests/processes/test_matrix.py",
    "tests/processes/test_placements_ranks.py",
    "tests/processes/test_round_trip_ranks.py",
    "tests/processes/test_training_continues.py",
    "tests/runtime/torch_state",
)


@dataclass(frozen=True)
class Environment:
    """`pins`: versions instead of those of constraints.txt. `resolution`: uv's, without them."""

    python: str = "3.11"
    pins: tuple[str, ...] = ()
    resolution: str | None = None

    def requirements(self, scratch: Path) -> list[str]:
        """Return the arguments of `uv pip`: what is installed, and within which bounds."""
        arguments = [*self.pins, *TOOLS, "-r", str(CHECKOUT / "pyproject.toml")]
        arguments += [item for extra in EXTRAS.split(",") for item in ("--extra", extra)]
        pinned = {re.split("[=<>~]", pin)[0] for pin in self.pins}
        lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
        others = [line for line in lines if line.partition("==")[0] not in pinned]
        if self.resolution:  # the lowest pytest cannot run these tests
            others = [line for line in others if line.startswith(TOOLS)]
            arguments += ["--resolution", self.resolution]
        constraints = scratch / "constraints.txt"
        constraints.write_text("\n".join(others))
        return [*arguments, "-c", str(constraints)]


ENVIRONMENTS = {
    "lowest": Environment(resolution="lowest-direct"),
    "newest": Environment(pins=("torch==2.14.*",), resolution="highest"),
    "python-3.12": Environment(python="3.12"),
    "python-3.13": Environment(python="3.13"),
    "python-3.14": Environment(python="3.14"),
}


def lower_bounds() -> dict[str, str]:
    """Return the lowest version of each package that pyproject.toml allows."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for e in EXTRAS.split(",") for line in extras[e])]
    pairs = [
        pair for line in lines for pair in re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", line)
    ]
    return {name: max(v for n, v in pairs if n == name) for name, _ in pairs}


def static_check(environment: Environment, scratch: Path) -> tuple[dict[str, str], str]:
    """Compile the sources, and find wheels of all dependencies. Returns versions and a result."""
    for path in (CHECKOUT / "unified_ckpt").rglob("*.py"):
        with warnings.catch_warnings(action="error"):
            compile(path.read_bytes(), str(path), "exec")
    command = ["uv", "pip", "compile", "-q", "--no-annotate", "--only-binary", ":all:"]
    command += ["--python-version", environment.python]
    requirements = [r for r in environment.requirements(scratch) if r != "-r" and r not in TOOLS]
    done = subprocess.run([*command, *requirements], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        return {}, "static: failed"
    return dict(re.findall(r"^([\w-]+)==(\S+)", done.stdout, re.MULTILINE)), "static: not run"


def run_tests(environment: Environment, folder: Path) -> tuple[dict[str, str], str]:
    """Build an environment and run the selection. Returns the installed versions and a result."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "-q", "--python", environment.python, folder], check=True)
    install = ["uv", "pip", "install", "-q", "--python", python]
    subprocess.run([*install, *environment.requirements(folder)], check=True)
    subprocess.run([*install, "--no-deps", "-e", CHECKOUT], check=True)
    freeze = ["uv", "pip", "freeze", "--python", python]
    installed = subprocess.check_output(freeze, text=True)
    versions = dict(re.findall(r"^([\w-]+)==(\S+)", installed, re.MULTILINE))
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    log = folder / "tests.log"
    with log.open("w") as output:
        subprocess.run(
            [python, "-m", "pytest", "-q", "-n", "2", "-o", "filterwarnings=default", *SELECTION],
            cwd=CHECKOUT,
            env=variables,
            check=False,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    lines = log.read_text().splitlines()
    print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))))
    return versions, outcome(lines)


def outcome(lines: Sequence[str]) -> str:
    """Return the result that pytest's output ends with."""
    counts = re.findall(r"\d+ (?:passed|failed|errors?)\b", lines[-1] if lines else "")
    return f"run: {', '.join(counts) or 'failed'}"


def row(name: str, python: str, versions: Mapping[str, str], result: str) -> str:
    """Return a row of the table."""
    others = ", ".join(f"{package} {versions.get(package, '?')}" for package in OTHERS)
    cells = [f"`{name}`", python, *(versions.get(c, "?").partition("+")[0] for c in COLUMNS)]
    return f"| {' | '.join([*cells, others, result])}, {datetime.now(UTC).date()} |"


def write_row(name: str, text: str) -> None:
    """Replace the row of an environment in the page."""
    page = PAGE.read_text()
    pattern = rf"^\| `{re.escape(name)}` \|.*$"
    replaced, count = re.subn(pattern, lambda _: text, page, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{PAGE}: got {count} rows of {name}, expected one; add it")
    PAGE.write_text(replaced)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run environments. Returns 1 if a test failed in one."""
    parser = argparse.ArgumentParser(prog="tests/versions/run.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of all environments")
    parser.add_argument("--folder", type=Path, help="keep the environments and logs in this folder")
    parser.add_argument("--keep-page", action="store_true", help="do not write docs/versions.md")
    options = parser.parse_args(arguments)
    if options.list or not options.names:
        print("\n".join(ENVIRONMENTS))
        return 0 if options.list else 2
    failed = False
    for name in options.names:
        environment = ENVIRONMENTS[name]
        python = environment.python
        with tempfile.TemporaryDirectory(prefix="unified-ckpt-versions-") as scratch:
            find = ["uv", "python", "find", "-q", python]
            if subprocess.run(find, check=False, capture_output=True).returncode:
                versions, result = static_check(environment, Path(scratch))
            else:
                folder = (options.folder or Path(scratch)).resolve() / name
                versions, result = run_tests(environment, folder)
                code = "import platform; print(platform.python_version())"
                command = [folder / "bin" / "python", "-c", code]
                python = subprocess.check_output(command, text=True).strip()
        failed |= re.search("failed|error", result) is not None
        print(text := row(name, python, versions, result))
        if not options.keep_page:
            write_row(name, text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

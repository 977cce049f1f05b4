"""Starts torchrun with a time limit, and shows the full output of a failure."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import warm

PROGRAMS = Path(__file__).resolve().parent


def environment() -> dict[str, str]:
    """The environment of the workers: this checkout first on the path."""
    path = os.pathsep.join(filter(None, [str(PROGRAMS.parents[2]), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _command(world: int, script: Path) -> list[str]:
    """The command of `world` processes that run a script under torchrun."""
    return [
        *warm.module("torch.distributed.run", environment()),
        "--standalone",
        "--nproc-per-node",
        str(world),
        "--no-python",
        *warm.python(script, environment()),
    ]


def _launch(
    world: int, script: str, *arguments: object, timeout_seconds: float
) -> subprocess.Popen[str]:
    # each worker dumps its stacks and ends itself a little before we lose patience: see
    # `worker.start`
    limit = {"WORKER_TIMEOUT_SECONDS": str(timeout_seconds - 10)}
    return subprocess.Popen(
        [*_command(world, PROGRAMS / script), *map(str, arguments)],
        env=environment() | limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a test can signal its process group, as a terminal does
    )


@contextlib.contextmanager
def start_torchrun(world: int, script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a script of this folder in `world` processes; the launcher is killed at the end."""
    child = _launch(world, script, *arguments, timeout_seconds=120)
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=30)


def torchrun(world: int, script: str, *arguments: object, timeout_seconds: float) -> str:
    """Run a script of this folder in `world` processes and return its output. Raise with the full
    output if it fails or takes too long.
    """
    child = _launch(world, script, *arguments, timeout_seconds=timeout_seconds)
    try:
        output, _ = child.communicate(timeout=timeout_seconds)
    except BaseException as error:
        child.terminate()  # on SIGTERM torchrun ends its workers
        try:
            output, _ = child.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            output = "(torchrun did not stop)"
        if isinstance(error, subprocess.TimeoutExpired):
            raise RuntimeError(
                f"{script} on {world} ranks ran past {timeout_seconds} s\n{output}"
            ) from None
        raise
    if child.returncode:
        raise RuntimeError(f"{script} on {world} ranks ended with {child.returncode}\n{output}")
    return output


def run_example(script: str | Path, world: int, *arguments: object, cwd: Path | None = None) -> str:
    """Run an example, of docs/examples or by its path; one process runs without torchrun."""
    path = PROGRAMS.parents[2] / "docs" / "examples" / script
    command = _command(world, path) if world > 1 else warm.python(path, environment())
    ended = subprocess.run(
        [*command, *map(str, arguments)],
        check=False,
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout

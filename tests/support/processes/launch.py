"""Starting torchrun with a time limit, and showing everything that it said when it fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.processes import warm

HERE = Path(__file__).resolve().parent


def environment() -> dict[str, str]:
    """The workers' environment: this checkout first on the path, one thread each."""
    path = os.pathsep.join(filter(None, [str(HERE.parents[2]), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def torchrun(world: int, script: str, *arguments: object, timeout_seconds: float) -> str:
    """Run a script of this folder in `world` processes; what it said. Raise with the full output if
    it fails or lasts too long.
    """
    rank = warm.python(HERE / script, environment())
    command = [
        *warm.module("torch.distributed.run", environment()),
        "--standalone",
        "--nproc-per-node",
        str(world),
        "--no-python",
    ]
    # each worker dumps its stacks and ends itself a little before we lose patience: see
    # `worker.start`
    limit = {"WORKER_TIMEOUT_SECONDS": str(timeout_seconds - 10)}
    child = subprocess.Popen(
        [*command, *rank, *map(str, arguments)],
        env=environment() | limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = child.communicate(timeout=timeout_seconds)
    except BaseException as error:
        child.terminate()  # torchrun ends its workers when it is told to stop
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

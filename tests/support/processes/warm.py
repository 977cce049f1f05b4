"""Starts processes whose imports are already done: a server for each set of packages forks them.

Importing costs up to 8 s of a core for each rank of each launch.
"""

from __future__ import annotations

import atexit
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
IMPORTS = {  # what is imported for a script that imports something of a package
    "torch": [
        "torch",
        "torch.distributed.run",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint",
        "torch._dynamo",  # which DTensor imports at its first operation
        "unified_ckpt.api",
        "unified_ckpt.checkpointer",
        "unified_ckpt.manager.manager",
    ],
    "accelerate": ["accelerate"],
    "peft": ["peft"],
    "transformers": ["transformers.trainer", "transformers.models.auto.modeling_auto"],
    "lightning": ["lightning"],
}
START_SECONDS = 120


_clients: dict[tuple[str, ...], list[str]] = {}


def python(script: Path, env: Mapping[str, str]) -> list[str]:
    """Command in place of `[sys.executable, script]`. `env`: for the imports, if this is the first
    of its kind.
    """
    source = script.read_text()
    return [
        *_client(
            [
                name
                for name in IMPORTS
                if re.search(rf"^\s*(from|import) {name}\b", source, re.MULTILINE)
            ],
            env,
        ),
        str(script),
    ]


def program(source: str, env: Mapping[str, str]) -> list[str]:
    """Command in place of `[sys.executable, "-c", source]`, for a program that imports torch."""
    return [*_client(["torch"], env), "-c", source]


def module(name: str, env: Mapping[str, str]) -> list[str]:
    """Command in place of `[sys.executable, "-m", module]`, for a module of torch."""
    return [*_client(["torch"], env), "-m", name]


def _client(packages: Sequence[str], env: Mapping[str, str]) -> list[str]:
    key = (env["PYTHONPATH"], *packages)
    if key not in _clients:
        _clients[key] = [
            sys.executable,
            "-I",
            "-S",
            str(FOLDER / "warm_client.py"),
            _server([m for name in packages for m in IMPORTS[name]], env),
        ]
    return _clients[key]


def _server(modules: Sequence[str], env: Mapping[str, str]) -> str:
    """The server's address. The server ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    path = Path(folder.name) / "socket"
    command = [sys.executable, str(FOLDER / "warm_server.py"), str(path), *modules]
    server = subprocess.Popen(command, env=dict(env), stdin=subprocess.PIPE, start_new_session=True)

    def end() -> None:
        server.communicate(timeout=START_SECONDS)
        folder.cleanup()

    atexit.register(end)
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        assert server.poll() is None, (
            f"a warm server of {modules} has ended with {server.returncode}"
        )
        assert time.monotonic() < deadline, (
            f"a warm server of {modules} has not started in {START_SECONDS} s"
        )
        time.sleep(0.01)
    return str(path)

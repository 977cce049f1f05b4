"""Starts processes whose imports are already done. Servers fork them: one has imported torch, one
also the frameworks, one JAX and Orbax.

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
TORCH = [
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # which DTensor and optimizers import at their first use
    "unified_ckpt.api",
    "unified_ckpt.checkpointer",
    "unified_ckpt.manager.manager",
]
FRAMEWORKS = {  # by the package that a script imports
    "accelerate": ["accelerate"],
    "peft": ["peft"],
    "transformers": ["transformers.trainer", "transformers.models.auto.modeling_auto"],
    "lightning": ["lightning"],
}
ORBAX = ["jax", "orbax.checkpoint"]
START_SECONDS = 120


_clients: dict[tuple[str, ...], list[str]] = {}


def python(script: Path, env: Mapping[str, str]) -> list[str]:
    """Command in place of `[sys.executable, script]`."""
    return [*interpreter(script.read_text(), env), str(script)]


def program(source: str, env: Mapping[str, str]) -> list[str]:
    """Command in place of `[sys.executable, "-c", source]`."""
    return [*interpreter(source, env), "-c", source]


def interpreter(source: str, env: Mapping[str, str]) -> list[str]:
    """Command in place of `[sys.executable]` for a program that imports torch. `env`: for the
    imports, if this is the first of its kind.
    """
    frameworks = [module for modules in FRAMEWORKS.values() for module in modules]
    return _client([*TORCH, *(frameworks if _imports_framework(source, set()) else ())], env)


def _imports_framework(source: str, seen: set[Path]) -> bool:
    """Whether a program imports a framework, itself or through modules of these tests."""
    names = re.findall(r"^\s*(?:from|import) ([\w.]+)", source, re.MULTILINE)
    if not FRAMEWORKS.keys().isdisjoint(name.partition(".")[0] for name in names):
        return True
    paths = {
        FOLDER.parents[2] / f"{name.replace('.', '/')}.py"
        for name in names
        if name.startswith("tests.")
    } - seen
    seen |= paths
    return any(_imports_framework(path.read_text(), seen) for path in paths if path.exists())


def orbax(script: Path, env: Mapping[str, str]) -> list[str]:
    """Command in place of `[sys.executable, script]`, for a script of JAX and Orbax."""
    return [*_client(ORBAX, {**env, "JAX_PLATFORMS": "cpu"}), str(script)]


def module(name: str, env: Mapping[str, str]) -> list[str]:
    """Command in place of `[sys.executable, "-m", module]`, for torch's modules or ours."""
    return [*_client(TORCH, env), "-m", name]


def _client(modules: Sequence[str], env: Mapping[str, str]) -> list[str]:
    key = (env["PYTHONPATH"], *modules)
    if key not in _clients:
        _clients[key] = [
            sys.executable,
            "-I",
            "-S",
            str(FOLDER / "warm_client.py"),
            _server(modules, env),
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

"""Accelerate with FSDP on 1, 2 and 4 processes, switched to `unified_ckpt.dcp` by one line.

A run that begins with a step saved by stock Accelerate, is killed in a save and resumed, ends with
the parameters and optimizer state of the stock run that nothing happened to, bit for bit.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

import unified_ckpt as uc

ON_CPU = Path(__file__).with_name("on_cpu.py")
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
# A process is killed when it begins to write this; each save has a staging folder of its own.
KILLED_AT = {
    "model": rf"-{MODEL}/model\.safetensors$",
    "optimizer": rf"-{OPTIMIZER}/optimizer\.safetensors$",
    "manifest": rf"-{OPTIMIZER}/unified_checkpoint\.json$",
}
# Starts on_cpu.py in a world with these arguments and variables. Returns whether it succeeded, and
# its output.
Launch = Callable[[int, list[str], dict[str, str]], tuple[bool, str]]


def launch(world: int, arguments: list[str], environment: dict[str, str]) -> tuple[bool, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, f"--nproc-per-node={world}", ON_CPU, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode == 0, ended.stdout


def states(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in run.glob("state-*")}


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def check_run(root: Path, launch: Launch, world: int, *, version: int, killed_at: str) -> None:
    """Begin with a step of the stock run, be killed in the save of step 6, and resume."""
    stock, run = root / f"stock-{world}-{version}", root / f"run-{world}-{version}"

    def train(folder: Path, **environment: str) -> tuple[bool, str]:
        arguments = [str(folder), "--steps=8", f"--fsdp-version={version}"]
        return launch(world, arguments, environment)

    ended, output = train(stock, STOCK="1")
    assert ended, output
    shutil.copytree(stock / "step-2", run / "step-2")
    ended, output = train(run, KILL=KILLED_AT[killed_at])
    assert not ended, output
    assert "SIGKILL" in output, output
    assert steps(run) == ["step-2", "step-4", "unfinished"], output
    ended, output = train(run)
    assert ended, output
    assert len(states(stock)) == world
    assert states(run) == states(stock), output
    for name in (MODEL, OPTIMIZER):
        assert uc.verify(run / "step-8" / name, deep=True).ok
    weights = load_file(run / "step-8" / MODEL / "model.safetensors")
    with uc.open(stock / "step-8" / MODEL) as source:
        assert weights.keys() == set(source["model"])
        for name, tensor in weights.items():
            assert tensor.equal(source["model"][name][...]), name


if __name__ == "__main__":
    for version in (2, 1):
        for world, killed_at in ((1, "model"), (2, "optimizer"), (4, "manifest")):
            check_run(Path.cwd(), launch, world, version=version, killed_at=killed_at)
            print(f"FSDP{version}, {world} processes: all state is that of the stock run")

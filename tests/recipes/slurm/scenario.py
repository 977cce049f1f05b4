"""Trains unified_ckpt/examples/plain_pytorch.sbatch in a real Slurm on this machine: stopped by its
time limit, a rank killed during a save, requeued with a lost node, and compared with a run that
nothing interrupted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cluster import NODES, cluster, output
from safetensors.torch import load_file

import unified_ckpt as uc

HERE = Path(__file__).parent
EXAMPLES = Path(uc.__file__).parent / "examples"
FOREVER = "1000000"
LINE = re.compile(r"step (\d+) rank (\d+) loss (\S+) samples (\[[^\]]*\])")


def main() -> None:
    for name in ("plain_pytorch.py", "plain_pytorch.sbatch"):
        shutil.copy(EXAMPLES / name, name)
    folder = Path("cluster").absolute()
    os.environ.setdefault("USER", "user")
    with cluster(folder) as disk:
        os.environ["LOCAL_DISK"] = str(disk)
        log, last = interrupted(folder)
        uninterrupted(folder, log, last)
        other_layouts(last)


def interrupted(folder: Path) -> tuple[Path, int]:
    """Train, with four interruptions. Returns the log and the last step."""
    job = submit("plain_pytorch.sbatch", "run", FOREVER, "--time=2", "--signal=B:USR1@60")
    log = Path(f"plain_pytorch-{job}.out")

    wait(log, lambda: restarts(job) == 1 and state(job) == "PENDING")
    stopped = newest("run")
    assert "stopped by the time limit, requeues" in log.read_text()
    assert steps(log)[-4:] == [stopped] * 4
    print(f"time limit: all ranks stopped after step {stopped}, saved, and the job requeued itself")

    resume(job)
    before = len(steps(log))
    wait(log, lambda: len(steps(log)) >= before + 20)
    assert steps(log)[before] == stopped + 1
    print(f"requeued: continued with step {stopped + 1}")

    launcher = (folder / "disk-node1" / f"{os.environ['USER']}-{job}.launcher.1").read_text()
    rank = int(output("pgrep", "-P", launcher.strip()).split()[0])
    wait(log, lambda: any(Path("run").glob(".unified-*")), poll_seconds=0.001)
    os.kill(rank, signal.SIGKILL)
    before = len(steps(log))
    wait(log, lambda: len(steps(log)) >= before + 20 and "exitcode: -9" in log.read_text())
    print("a rank killed during a save: torchrun started all ranks again")

    subprocess.run(["scontrol", "requeue", job], check=True)
    wait(log, lambda: restarts(job) == 2 and state(job) == "PENDING")
    for path in (folder / "disk-node1").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    expected, before = newest("run"), len(steps(log))
    resume(job)
    wait(log, lambda: len(steps(log)) >= before + 20)
    assert steps(log)[before] == expected + 1, (steps(log)[before], expected)
    print(f"requeued on other nodes: continued with step {expected + 1}")

    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    wait(log, lambda: restarts(job) == 3 and state(job) == "PENDING")
    subprocess.run(["scancel", job], check=True)
    events = map(json.loads, Path("run/unified_events.jsonl").read_text().splitlines())
    loaded = [event["path"] for event in events if event["event"] == "load"]
    assert [path.startswith(str(folder / "disk")) for path in loaded] == [True, True, False]
    return log, newest("run")


def uninterrupted(folder: Path, log: Path, last: int) -> None:
    """Train to the same step at once, and compare losses, samples and checkpoints."""
    job = submit("plain_pytorch.sbatch", "straight", str(last), "--time=30")
    other = Path(f"plain_pytorch-{job}.out")
    wait(other, lambda: state(job) == "COMPLETED")
    lines, expected = ({*LINE.findall(path.read_text())} for path in (log, other))
    printed = {(int(step), int(rank)) for step, rank, *_ in expected}
    every = {(step, rank) for step in range(1, last + 1) for rank in range(4)}
    assert printed == every, printed ^ every
    assert lines == expected, lines ^ expected
    run, straight = (tensors(Path(root, f"checkpoint-{last}")) for root in ("run", "straight"))
    assert run.keys() == straight.keys()
    assert [name for name in run if not torch.equal(run[name], straight[name])] == []
    assert uc.verify(f"run/checkpoint-{last}", deep=True).ok
    left = [path for node in NODES for path in (folder / f"disk-{node}").glob(f"*-{job}*")]
    assert left == [], "a finished job leaves nothing on its nodes"
    print(f"equals an uninterrupted run: {last} steps, {len(run)} tensors")


def other_layouts(last: int) -> None:
    """Continue on one node; and train without torchrun, where each process gets the signal."""
    job = submit("plain_pytorch.sbatch", "run", str(last + 5), "--nodes=1")
    log = Path(f"plain_pytorch-{job}.out")
    wait(log, lambda: state(job) == "COMPLETED")
    assert sorted({*steps(log)}) == [*range(last + 1, last + 6)]
    print("one node instead of two: continued")

    job = submit(str(HERE / "direct.sbatch"))
    log = Path(f"slurm-{job}.out")
    wait(log, lambda: len(steps(log)) >= 20)
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait(log, lambda: state(job) == "COMPLETED")
    assert steps(log)[-4:] == [newest("direct")] * 4
    print("without torchrun: a signal to every process stopped all ranks, with a checkpoint")


def submit(script: str, *arguments: str) -> str:
    """Submit a job. Returns its id."""
    options = [argument for argument in arguments if argument.startswith("--")]
    others = [argument for argument in arguments if not argument.startswith("--")]
    command = ["sbatch", "--parsable", *options, script, *others]
    return subprocess.check_output(command, text=True).strip()


def state(job: str) -> str:
    return shown(job, "JobState")


def restarts(job: str) -> int:
    return int(shown(job, "Restarts"))


def shown(job: str, field: str) -> str:
    text = output("scontrol", "show", "job", job)
    return re.findall(rf"\b{field}=(\S+)", text)[0]


def resume(job: str) -> None:
    """Start a requeued job soon instead of in two minutes, and let it run. At once is too early:
    the nodes still refuse the job that they have just killed.
    """
    options = f"JobId={job}", "StartTime=now+5", "TimeLimit=60"
    subprocess.run(["scontrol", "update", *options], check=True)


def steps(log: Path) -> list[int]:
    """The steps of all ranks in a job's log, in its order."""
    return [int(step) for step, *_ in LINE.findall(log.read_text())] if log.exists() else []


def newest(root: str) -> int:
    return max(
        int(path.name.removeprefix("checkpoint-")) for path in Path(root).glob("checkpoint-*")
    )


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Tensors of model, average and optimizer, by file and name. The states of Python's and
    NumPy's random generators, which each process draws anew, are in the other files.
    """
    return {
        f"{path.name}: {name}": tensor
        for part in ("model", "ema", "optimizer")
        for path in checkpoint.glob(f"{part}*.safetensors")
        for name, tensor in load_file(path).items()
    }


def wait(log: Path, holds: Callable[[], bool], poll_seconds: float = 0.5) -> None:
    """Wait until it holds; after five minutes, show the log and fail."""
    deadline = time.monotonic() + 300
    while not holds():
        if time.monotonic() > deadline:
            print(log.read_text()[-5000:] if log.exists() else f"no {log}")
            print(output("squeue"), Path("cluster/daemons.log").read_text()[-2000:])
            raise SystemExit("slurm: got no result after 5 minutes; see the log above")
        time.sleep(poll_seconds)


if __name__ == "__main__":
    main()

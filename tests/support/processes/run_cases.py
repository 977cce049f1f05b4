"""Runs of a trainer to which something happens, compared with the run that nothing happened to.

A worker defines how its trainer trains, and calls `run_cases`. A test calls `check_runs`. A row of
the table is a worker; a column is a case here, or one of the worker's own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import unified_ckpt as uc
from tests.support.processes.launch import start_torchrun, torchrun
from unified_ckpt.runtime.comm import topology
from unified_ckpt.runtime.exchange import probe_topology

STEPS, SIGNAL_STEP, OUTSIDE_STEP, TIERS_SIGNAL_STEP = 24, 6, 10, 14
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1}
# what happens from outside: a signal to the launcher, or None to kill the last rank
FROM_OUTSIDE = {"launcher-term": signal.SIGTERM, "launcher-int": signal.SIGINT, "killed": None}

# an exception on the last rank: when torch calls what raises it, and the step of the last save
RAISED = {"raised": (register_module_forward_pre_hook, OUTSIDE_STEP)}
RAISED |= {"raised-in-step": (register_optimizer_step_post_hook, 8)}
ENDING = (*FROM_OUTSIDE, *RAISED)  # each ends the launch

AfterStep = Callable[[int], object]
# Called as train(root, after_step, resume=…). Returns the manager, and the weights and losses of a
# run that has ended.
Train = Callable[..., tuple[uc.CheckpointManager, tuple[dict[str, Any], list[float]] | None]]


# in the workers


def run_cases(train: Train, others: Mapping[str, Callable[[Path], object]]) -> None:
    """Run the cases of the command line, `WORKER ROOT CASE…`, each in a folder of its name.

    `folder/case` runs a case in the folder of another. `others`: the worker's own cases.
    """
    faulthandler.dump_traceback_later(float(os.environ["WORKER_TIMEOUT_SECONDS"]), exit=True)
    root = Path(sys.argv[1])
    for case in sys.argv[2:]:
        folder, _, name = case.rpartition("/")
        place = root / (folder or name)
        place.mkdir(exist_ok=True)
        if name in others:
            others[name](place)
        elif name in RAISED:
            raise_on_last_rank(train, place, name)
        elif name in SIGNALS:
            stop_and_resume(train, place, SIGNALS[name], rank=int(os.environ["WORLD_SIZE"]) - 1)
        else:
            run(train, place, await_outside(place) if name == "slow" else nothing, name == "resume")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else gloo may abort the exit


def nothing(step: int) -> None:
    """Happens after each step of a run that is left alone."""


def run(
    train: Train, root: Path, after_step: AfterStep, resume: bool = False, **settings: Any
) -> None:
    """Train, and write what the test compares: the end of the run, or the step it stopped at."""
    last = 0

    def count(step: int) -> None:
        nonlocal last
        last = step
        after_step(step)

    manager, end = train(root, count, resume=resume, **settings)
    assert manager.should_stop == (end is None)
    if end is None:
        assert last_step(root) == last
        (root / f"stop-{os.environ['RANK']}").write_text(str(last))
    elif os.environ["RANK"] == "0":
        torch.save(end, root / "ended.pt")


def complete(root: Path) -> list[Path]:
    return [path.parent for path in (root / "run").glob("[!.]*/unified_checkpoint.json")]


def stop_and_resume(train: Train, root: Path, number: int, *, rank: int, **settings: Any) -> None:
    """Train until a signal to one rank stops all, and resume."""

    def send(step: int) -> None:
        if step == SIGNAL_STEP and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)
        if step >= SIGNAL_STEP:
            time.sleep(0.03)  # the notice is polled by the clock

    run(train, root, send, **settings)
    assert not (root / "ended.pt").exists()
    run(train, root, nothing, resume=True, **settings)


class CrashError(Exception):
    """Ends a run on all ranks."""


def crash_and_resume_tiers(train: Train, root: Path, options: uc.ManagerOptions) -> None:
    """Crash on two nodes, whose local steps are newer than those in the root. Resume, stop by a
    signal, and resume. The root has every eighth step.
    """
    node = 2 * int(os.environ["RANK"]) // int(os.environ["WORLD_SIZE"])
    local = {"local_directory": str(root / f"local-{node}"), "local_interval_steps": 2}
    options = options.model_copy(update=local)
    resumed: list[int] = []

    def crash(step: int) -> None:
        if step == 11:
            raise CrashError

    def send(step: int) -> None:
        resumed.append(step)
        if step == TIERS_SIGNAL_STEP and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        if step >= TIERS_SIGNAL_STEP:
            time.sleep(0.03)  # the notice is polled by the clock

    with (
        mock.patch.object(topology, "node_id", return_value=f"node {node}"),
        mock.patch.object(probe_topology, "node_id", return_value=f"node {node}"),
    ):
        with contextlib.suppress(CrashError):
            train(root, crash, options=options)
        run(train, root, send, resume=True, options=options)
        assert resumed[0] > 9, "the local tier is newer"
        assert not (root / "ended.pt").exists()
        run(train, root, nothing, resume=True, options=options)


def raise_on_last_rank(train: Train, root: Path, name: str) -> None:
    """Train until the last rank raises. The others wait for it in a collective."""
    is_armed = False

    def arm(step: int) -> None:
        nonlocal is_armed
        is_armed = step == OUTSIDE_STEP and os.environ["RANK"] == str(
            int(os.environ["WORLD_SIZE"]) - 1
        )

    def fail(*_: object) -> None:
        if is_armed:
            raise ValueError("raised by the test")

    register, _ = RAISED[name]
    register(fail)
    run(train, root, arm, save_on_exception=True)


def await_outside(root: Path) -> AfterStep:
    """Wait at a step until a checkpoint is complete and the test has acted."""
    rank = os.environ["RANK"]

    def wait(step: int) -> None:
        if step == OUTSIDE_STEP:
            (root / f"pid-{rank}").write_text(str(os.getpid()))
            while not complete(root):
                time.sleep(0.02)
            (root / f"begun-{rank}").touch()
            while not (root / "acted").exists():
                time.sleep(0.02)
        if step >= OUTSIDE_STEP:
            time.sleep(0.25)  # until the launcher has passed on its signal

    return wait


# in the tests


def check_runs(
    root: Path, world: int, worker: str, *more: str, ending: Sequence[str] = ENDING
) -> None:
    """Run a worker's cases. Check that each run ends like the undisturbed run, and that all ranks
    stop after the same step.

    Only two ranks get every signal, the worker's own cases (`more`) and those that end the launch.
    """
    cases = ["straight", "full", "term", "tiers", *(("int", "usr1", *more) if world == 2 else ())]
    ending = ending if world == 2 else ()
    torchrun(world, worker, root, *cases, timeout_seconds=240)
    for case in ending:
        if case in FROM_OUTSIDE:
            act_from_outside(root, world, worker, case, FROM_OUTSIDE[case])
        else:
            launch_raising(root, world, worker, case)
            assert last_step(root / case) == RAISED[case][1], case
    if ending:
        torchrun(world, worker, root, *(f"{case}/resume" for case in ending), timeout_seconds=240)
    for case in (*cases, *ending):
        check_same(root, case)
        first = OUTSIDE_STEP if case in FROM_OUTSIDE else SIGNAL_STEP
        first = TIERS_SIGNAL_STEP if case == "tiers" else first
        stops = [int(path.read_text()) for path in (root / case).glob("stop-*")]
        if stops or case in SIGNALS or FROM_OUTSIDE.get(case):
            assert len(stops) == world, case
            assert len({*stops}) == 1, case
            assert first <= stops[0] <= first + 10, "within the notice's delay and the margin"


def check_same(root: Path, case: str) -> None:
    """Check that a case ended with the weights and the last losses of the case `straight`."""
    weights, losses = torch.load(root / "straight" / "ended.pt")
    again, last = torch.load(root / case / "ended.pt")
    assert last == losses[len(losses) - len(last) :], case
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items()), case


def last_step(root: Path) -> int:
    """Return the last step that is saved."""
    return max(uc.open(folder).step or 0 for folder in complete(root))


def launch_raising(root: Path, world: int, worker: str, case: str) -> str:
    """Run a case in which the last rank raises, which ends all ranks. Returns the output."""
    with start_torchrun(world, worker, root, case) as launcher:
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode != 0, case
    assert "raised by the test" in output, output
    return output


def act_from_outside(root: Path, world: int, worker: str, case: str, number: int | None) -> None:
    """Start a run, and signal the launcher after some steps, or kill the last rank.

    Ctrl-C reaches the terminal's process group: the launcher, whose ranks have groups of their own.
    """
    with start_torchrun(world, worker, root, f"{case}/slow") as launcher:
        while not all((root / case / f"begun-{rank}").exists() for rank in range(world)):
            assert launcher.poll() is None, "ended before the signal"
            time.sleep(0.02)  # each worker's own limit ends this
        if number is None:
            os.kill(int((root / case / f"pid-{world - 1}").read_text()), signal.SIGKILL)
        elif number == signal.SIGINT:
            os.killpg(launcher.pid, number)
        else:
            launcher.send_signal(number)
        (root / case / "acted").touch()
        launcher.communicate(timeout=120)
    assert not (root / case / "ended.pt").exists()

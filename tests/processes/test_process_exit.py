"""A process that ends completes its saves and their copies, whatever ends it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.manager.managers import folders
from tests.support.processes import warm
from tests.support.processes.launch import environment

SAVE = """
import sys, time
import torch
import unified_ckpt as uc
from unified_ckpt.runtime.storage import roots
from unified_ckpt.runtime.storage.storage import LocalStorage

class Slow(LocalStorage):
    def write_at(self, *args):
        time.sleep(0.05)
        super().write_at(*args)

roots.LocalStorage = Slow
net = torch.nn.Linear(600, 600)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with torch.no_grad():
    net.weight.fill_(3)
uc.save_async(sys.argv[1], model=net, optimizer=optimizer, lazy={lazy})
{last}
"""
MANAGER = """
import sys
import torch
import unified_ckpt as uc

tier = {{"local_directory": sys.argv[1] + "/local", "local_interval_steps": 1}}
options = uc.ManagerOptions(interval_steps=1, asynchronous={asynchronous}, **tier)
manager = uc.CheckpointManager(sys.argv[1] + "/root", options=options)
manager.save(1, model={{"w": torch.ones(2_000_000)}})
"""
CLOSE = """
import os, signal, sys, threading
from tests.support.manager.managers import manager_of, state

def attach(folder):
    waiting.wait(60)
    os.kill(os.getpid(), signal.SIGTERM)

waiting = threading.Event()
manager = manager_of(None, sys.argv[1], interval_steps=1, asynchronous=True, on_preemption=True)
manager.save(1, attach=attach, **state(1))
close = manager.run.scheduler.collect
manager.run.scheduler.collect = lambda **options: (waiting.set(), close(**options))
manager.close()
print("continues")
"""


FAILS = """
import sys, threading
import torch
import unified_ckpt as uc

def fail(report):
    threading.main_thread().join()
    raise OSError("no copy")

uc.save_async(sys.argv[1], model={"w": torch.ones(3)}, after_commit=fail)
"""


def run(program: str, path: Path, code: int = 0) -> tuple[str, str]:
    """Return what a program writes to its standard output, and to its standard error."""
    command = [*warm.program(program, environment()), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.mark.incident("DLRover#1378")
@pytest.mark.parametrize(
    ("last", "code", "lazy"),
    [
        ("", 0, False),
        ("raise ValueError('oh')", 1, False),
        ("sys.exit(3)", 3, False),
        ("", 0, True),
        pytest.param("raise ValueError('oh')", 1, True, marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", 3, True, marks=pytest.mark.slow),
    ],
)
def test_process_exit_completes_the_save(tmp_path: Path, last: str, code: int, lazy: bool) -> None:
    run(SAVE.format(last=last, lazy=lazy), tmp_path / "c", code)
    assert uc.verify(tmp_path / "c", deep=True).ok
    with uc.open(tmp_path / "c") as opened:
        assert torch.equal(opened["model"]["weight"][...], torch.full((600, 600), 3.0))


def test_failure_after_the_end_of_the_program_is_logged(tmp_path: Path) -> None:
    """Nobody is left to ask for the result."""
    _, errors = run(FAILS, tmp_path / "c")
    assert "a background save failed while the process exited: " in errors
    assert "no copy" in errors


@pytest.mark.parametrize("asynchronous", [False, True])
def test_process_exit_without_close_finishes_copies(tmp_path: Path, asynchronous: bool) -> None:
    run(MANAGER.format(asynchronous=asynchronous), tmp_path)
    assert [path.name for path in (tmp_path / "root").glob("checkpoint-*")] == ["checkpoint-1"]
    assert uc.verify(tmp_path / "root" / "checkpoint-1", deep=True).ok


def test_signal_during_close_does_not_interrupt_the_save(tmp_path: Path) -> None:
    output, _ = run(CLOSE, tmp_path, -signal.SIGTERM)
    assert (output, folders(tmp_path)) == ("", ["checkpoint-1"])
    assert uc.verify(tmp_path / "checkpoint-1", deep=True).ok

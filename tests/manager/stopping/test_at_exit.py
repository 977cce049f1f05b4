"""Callbacks before a process ends."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import threading
from unified_ckpt.manager.stopping.at_exit import ExitHook

def finish():
    thread = threading.Thread(target=print, args=("a thread of its own",))
    thread.start()
    thread.join()

waits = ExitHook(finish)
{more}
print("main ends", flush=True)
"""


def _run(more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(more=more)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_callback_runs_before_the_process_ends_and_may_start_threads() -> None:
    done = _run("")
    assert (done.returncode, done.stdout) == (0, "main ends\na thread of its own\n"), done.stderr


def test_callback_runs_after_other_threads() -> None:
    done = _run("threading.Timer(1, print, ('a save ends',)).start(); ExitHook(lambda: None)")
    assert (done.returncode, done.stdout) == (0, "main ends\na save ends\na thread of its own\n"), (
        done.stderr
    )


def test_cancel() -> None:
    done = _run("waits.cancel()")
    assert (done.returncode, done.stdout) == (0, "main ends\n"), done.stderr


def test_callback_runs_after_a_failing_main() -> None:
    done = _run("raise SystemExit(3)")
    assert (done.returncode, done.stdout) == (3, "a thread of its own\n"), done.stderr

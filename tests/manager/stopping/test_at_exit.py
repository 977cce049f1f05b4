"""Callbacks before a process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import threading
from unified_ckpt.manager.stopping.at_exit import ExitHook

def finish():
    thread = threading.Thread(target=print, args=("callback thread",))
    thread.start()
    thread.join()

waits = ExitHook(finish)
{more}
print("main ends", flush=True)
"""


@pytest.mark.parametrize(
    ("more", "code", "printed"),
    [
        ("", 0, "main ends\ncallback thread\n"),
        (
            "threading.Timer(0.3, print, ('a save ends',)).start(); ExitHook(lambda: None)",
            0,
            "main ends\na save ends\ncallback thread\n",
        ),
        ("waits.cancel()", 0, "main ends\n"),
        ("raise SystemExit(3)", 3, "callback thread\n"),
    ],
    ids=["may start threads", "after other threads", "cancelled", "after a failing main"],
)
def test_callback_at_exit(more: str, code: int, printed: str) -> None:
    command = [sys.executable, "-c", _SCRIPT.format(more=more)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, printed), done.stderr

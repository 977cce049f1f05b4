"""Untrusted bytes: every reader returns what is right or raises a CheckpointError, and does nothing
else. The corpus has inputs that reach new code, and all that ever failed.
"""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fuzzing import targets
from tests.support.fuzzing.guards import Escape, guarded
from tests.support.limits import alarm

SECONDS = 120  # of each target, in a run by hand


@pytest.mark.parametrize("target", sorted(targets.TARGETS))
def test_inputs_of_the_corpus_are_right_or_refused(target: str) -> None:
    inputs = list(targets.inputs(target))
    assert inputs
    for name, data in inputs:
        with alarm(20, Escape(f"did not end: {target}/{name}")):
            targets.run(target, data)


@pytest.mark.long
@pytest.mark.parametrize("target", sorted(targets.TARGETS))
def test_new_inputs_are_right_or_refused(target: str, tmp_path: Path) -> None:
    """Minutes of inputs that the fuzzer invents, guided by the code that they reach."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed; CONTRIBUTING.md says how to run it")
    for _, data in targets.inputs(target):
        targets.add_input(target, data, tmp_path)
    arguments = [target, "--corpus", str(tmp_path), "--seconds", str(SECONDS)]
    command = [sys.executable, "-m", "tests.support.fuzzing.fuzz", *arguments]
    subprocess.run(command, check=True, capture_output=True)
    assert list(targets.inputs(target, tmp_path / "failures")) == []


@pytest.mark.parametrize(
    "act",
    [
        lambda: pickle.loads(b"cos\nsystem\n(S'true'\ntR."),
        lambda: exec("1"),
        lambda: open("/dev/null", "w").close(),
        lambda: open("/etc/hostname").close(),
        lambda: subprocess.run(["true"], check=True),
        lambda: bytearray(300 << 20),
    ],
    ids=["pickle", "exec", "write", "read", "process", "memory"],
)
def test_guard_notices_what_no_reader_may_do(act: object) -> None:
    with pytest.raises(Escape), guarded():
        act()  # type: ignore[operator]

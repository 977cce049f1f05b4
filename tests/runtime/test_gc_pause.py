"""The garbage collector pauses inside a block, and runs again after any error."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.errors import CheckpointError
from unified_ckpt.runtime.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_collector_runs_after_the_last_pause() -> None:
    with gc_paused:
        with pytest.raises(ValueError, match="x"), gc_paused:
            raise ValueError("x")
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with gc_paused:
        pass
    assert not gc.isenabled(), "it was disabled before"


def test_pauses_of_threads_may_overlap() -> None:
    inside, release = threading.Event(), threading.Event()

    def act() -> None:
        with gc_paused:
            inside.set()
            assert release.wait(60)

    thread = threading.Thread(target=act)
    with gc_paused:
        thread.start()
        assert inside.wait(60)
    assert not gc.isenabled()
    release.set()
    thread.join()
    assert gc.isenabled()


def test_collector_runs_in_a_child_forked_during_a_pause(tmp_path: Path) -> None:
    with gc_paused:
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()


def test_collector_runs_after_saves_and_opens(tmp_path: Path) -> None:
    model = {"w": torch.ones(3)}
    with uc.Checkpointer() as checkpointer:
        pending = checkpointer.save_async(tmp_path / "a", model=model)
        assert gc.isenabled()
        pending.result()
        with pytest.raises(CheckpointError):
            checkpointer.save_async(tmp_path / "a", model=model).result()
    assert gc.isenabled()
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    uc.open(tmp_path / "x.pt").close()
    (tmp_path / "x.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError):
        uc.open(tmp_path / "x.pt")
    assert gc.isenabled()

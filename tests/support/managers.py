"""A manager for a rank that is a thread, and a state whose every element tells its step."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import make_checkpointer

QUICK: dict[str, Any] = {"asynchronous": False, "retry_seconds": 0.0, "on_preemption": False}


def manager_of(
    comm: Comm | None,
    root: Path,
    *,
    save_options: uc.SaveOptions | None = None,
    node: str | None = None,
    **options: Any,
) -> uc.CheckpointManager:
    """`options`: of `ManagerOptions`; saves in the foreground and no pauses, unless they say
    otherwise.
    """
    save_options = save_options or uc.SaveOptions(timeout_seconds=30)
    made = uc.CheckpointManager(
        root,
        options=uc.ManagerOptions(**{**QUICK, **options}),
        save_options=save_options,
        node=node,
    )
    if comm is not None:
        made._checkpointer._comm = make_checkpointer(comm)._comm
    return made


def state(step: int, *, full: bool = True) -> dict[str, Any]:
    model = {"w": torch.full((3, 40), float(step)), "b": torch.full((5,), float(step))}
    return (
        {"model": model, "optimizer": {"w/exp_avg": torch.full((3, 40), -float(step))}}
        if full
        else {"model": model}
    )


def check_state(found: dict[str, Any], step: int) -> None:
    for kind, wanted in state(step, full="optimizer" in found).items():
        for name, tensor in wanted.items():
            assert torch.equal(found[kind][name], tensor), (
                f"{kind}:{name} is not that of step {step}"
            )


def put(root: Path, *steps: int, full: bool = True, **more: Any) -> None:
    """Checkpoints as a run leaves them."""
    for step in steps:
        uc.save(root / f"checkpoint-{step}", step=step, **state(step, full=full), **more)


def folders(root: Path) -> list[str]:
    return sorted(os.listdir(root), key=lambda name: (len(name), name))


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in root.glob("checkpoint-*"))


def cut_off(folder: Path) -> None:
    """As after a crash of another library's save: the newest folder is there, and is not whole."""
    (folder / "unified_checkpoint.json").unlink()


def lose(folder: Path, file: str = "optimizer.safetensors") -> None:
    (folder / file).unlink()


def flip(folder: Path, file: str = "model.safetensors") -> None:
    body = bytearray((folder / file).read_bytes())
    body[-1] ^= 1
    (folder / file).write_bytes(body)


def blank(file: Path) -> None:
    """Zeros, as after a power cut: only the size is right."""
    file.write_bytes(bytes(file.stat().st_size))


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Gate:
    """The root's storage as a module's copies or merges see it: writes wait while it is shut, fail
    while it is broken.
    """

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()
        self.failures = 0
        gate = self

        class Slow(LocalStorage):
            def write_at(self, name: str, start: int, buffers: Any) -> None:
                gate.reached.set()
                gate.open.wait(60)
                if gate.failures:
                    gate.failures -= 1
                    self._call("write", name, fail)
                super().write_at(name, start, buffers)

        def fail() -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(module, "LocalStorage", Slow)

"""Managers for ranks that are threads, and a state whose every element encodes its step."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.harness import set_comm
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage

QUICK: dict[str, Any] = {"asynchronous": False, "retry_seconds": 0.0, "on_preemption": False}


def manager_of(
    comm: Comm | None,
    root: Path,
    *,
    save_options: uc.SaveOptions | None = None,
    node: str | None = None,
    **options: Any,
) -> uc.CheckpointManager:
    """A manager with foreground saves and without pauses; `options` override `ManagerOptions`."""
    save_options = save_options or uc.SaveOptions(timeout_seconds=30)
    manager = uc.CheckpointManager(
        root,
        options=uc.ManagerOptions(**{**QUICK, **options}),
        save_options=save_options,
        node=node,
    )
    if comm is not None:
        set_comm(manager.run.session, comm)
    return manager


def state(step: int, *, full: bool = True) -> dict[str, Any]:
    model = {"w": torch.full((3, 40), float(step)), "b": torch.full((5,), float(step))}
    return (
        {"model": model, "optimizer": {"w/exp_avg": torch.full((3, 40), -float(step))}}
        if full
        else {"model": model}
    )


def check_state(targets: dict[str, Any], step: int) -> None:
    for kind, expected in state(step, full="optimizer" in targets).items():
        for name, tensor in expected.items():
            assert torch.equal(targets[kind][name], tensor), (
                f"{kind}:{name} is not that of step {step}"
            )


def save_steps(root: Path, *steps: int, full: bool = True, **arguments: Any) -> None:
    """Save these steps in turn."""
    for step in steps:
        uc.save(root / f"checkpoint-{step}", step=step, **state(step, full=full), **arguments)


def train(manager: uc.CheckpointManager, steps: Iterable[int], **more: Any) -> list[int]:
    """Save after each step until a stop. Return the steps at which a save was begun or done."""
    saved = []
    for step in steps:
        if manager.save(step, **state(step), **more) is not None:
            saved.append(step)
        if manager.should_stop:
            break
    return saved


def restored(root: Path, **options: Any) -> int | None:
    """Return the step that a new run restores, and check its values."""
    targets = state(0)
    with manager_of(None, root, **options) as manager:
        step = manager.restore(**targets).step
    check_state(targets, step)
    return step


def folders(root: Path) -> list[str]:
    """Return the names in a root, without its events file."""
    names = set(os.listdir(root)) - {"unified_events.jsonl"}
    return sorted(names, key=lambda name: (len(name), name))


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in root.glob("checkpoint-*"))


def delete_manifest(folder: Path) -> None:
    """Make a checkpoint incomplete, as after the crash of another library's save."""
    (folder / "unified_checkpoint.json").unlink()


def delete_file(folder: Path, file: str = "optimizer.safetensors") -> None:
    (folder / file).unlink()


def zero_file(file: Path) -> None:
    """Overwrite a file with zeros of the same size, as after a power cut."""
    file.write_bytes(bytes(file.stat().st_size))


def copy_folder(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class RootLatch:
    """The storage of the root: writes wait while it is closed, and fail while `failures` remain."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()
        self.failures = 0
        latch = self

        class Slow(LocalStorage):
            def write_at(self, name: str, start: int, buffers: Any) -> None:
                latch.reached.set()
                latch.open.wait(60)
                if latch.failures:
                    latch.failures -= 1
                    self._call("write", name, fail)
                super().write_at(name, start, buffers)

        def fail() -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(module, "open_root", Slow)

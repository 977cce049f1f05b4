"""The oracle of the run machine: the state of each step, and what retention keeps; a clock and
storages that it controls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.machines.cluster_model import Files
from tests.support.manager.managers import zero_file
from unified_ckpt.manager import save_scheduler
from unified_ckpt.runtime.storage.storage import LocalStorage

SHAPES = {"w": (6, 4), "b": (5,), "scale": ()}


def damage_file(path: Path, kind: str, *, position: float = 0.5) -> None:
    """Damage a file. `position`: of the flipped byte or the end; `data`: the last byte."""
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        os.truncate(path, int(path.stat().st_size * position))
    elif kind == "zero":
        zero_file(path)
    else:
        flip(path, -1 if kind == "data" else position)


@dataclass(frozen=True)
class Step:
    """A committed step: the token that its values encode, and its files at the commit."""

    token: int
    life: int
    created: float
    loss: float
    files: Files
    world: int = 0


@dataclass(frozen=True)
class Keep:
    """What retention must keep. None: no rule."""

    latest: int | None
    every: int | None
    seconds: float | None
    best: int | None


def values(name: str, token: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    generator = np.random.default_rng([token, len(name), ord(name[0])])
    return generator.standard_normal(SHAPES[name.partition("/")[0]]).astype(np.float32)


def state(token: int, rank: int, world: int) -> dict[str, Any]:
    """What a rank holds: `w` by rows, the rest whole."""

    def local(name: str) -> torch.Tensor:
        whole = values(name, token)
        if name.startswith("w"):
            size = -(-6 // world)
            whole = whole[rank * size : (rank + 1) * size]
        return torch.from_numpy(np.array(whole))

    return {
        "model": {name: local(name) for name in SHAPES},
        "optimizer": {f"{name}/exp_avg": local(f"{name}/exp_avg") for name in SHAPES},
        "layout": uc.Layout({"dp": world}, {"w": {"dp": 0}}, {"w": SHAPES["w"]}),
    }


def check_state(targets: dict[str, Any], token: int, rank: int, world: int) -> None:
    """Check that a rank has loaded the state of this token."""
    for part, right in state(token, rank, world).items():
        for name, tensor in right.items() if part != "layout" else ():
            assert torch.equal(targets[part][name], tensor), (
                f"rank {rank}: {part}:{name} is not that of {token}"
            )


def check_whole(folder: Path, token: int) -> None:
    """Check a folder of whole tensors: its digests, and each value by the safetensors package."""
    assert uc.verify(folder, deep=True).problems == ()
    for part, suffix in (("model", ""), ("optimizer", "/exp_avg")):
        stored: dict[str, Any] = {}
        for file in folder.glob(f"{part}*.safetensors"):
            stored |= load_file(file)
        right = {name + suffix: values(name + suffix, token) for name in SHAPES}
        assert stored.keys() == right.keys(), (part, stored.keys())
        for name, array in right.items():
            assert np.array_equal(stored[name], array), f"{part}:{name} is not that of {token}"


def extra_of(token: int) -> dict[str, object]:
    """What a step stores besides tensors; the bytes get a file of their own."""
    return {"token": token, "seen": bytes([token % 250]) * 2000}


def rank_extra_of(token: int, rank: int) -> list[object]:
    """What a step stores for one rank; the bytes get a file of their own."""
    return [rank, bytes([token % 250]) * 1500]


def kept_steps(steps: dict[int, Step], rules: Keep, saved: int) -> set[int]:
    """The steps that stay after a save, by the words of `ManagerOptions`.

    Later steps stay and do not count.
    """
    if rules == Keep(None, None, None, None):
        return set(steps)
    ordered = sorted(step for step in steps if step <= saved)
    if not ordered:
        return set(steps)
    retained = {step for step in steps if step >= saved} | {ordered[-1]}
    by_loss = sorted(ordered, key=lambda step: (steps[step].loss, -step))
    if rules.latest is not None:
        retained |= set(ordered[-rules.latest :])
    if rules.every is not None:
        retained |= {step for step in ordered if step % rules.every == 0}
    if rules.best is not None:
        retained |= set(by_loss[: rules.best])
    retained.add(by_loss[0])
    if rules.seconds is not None:
        last = None
        for step in ordered:
            created = steps[step].created
            if last is None or created < last or created - last >= rules.seconds:
                retained.add(step)
                last = created
    return retained


def set_clock(patch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    """Let the package read another clock where it stamps saves and decides when they are due."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromtimestamp(now(), tz)

    for name, module in list(sys.modules.items()):
        if name.startswith("unified_ckpt.") and getattr(module, "datetime", None) is datetime:
            patch.setattr(module, "datetime", Clock)
    patch.setattr(save_scheduler, "time", SimpleNamespace(monotonic=now, sleep=lambda _: None))


@contextmanager
def replaced_storage(make: Callable[[str], LocalStorage]) -> Iterator[None]:
    """Let every module of the package open this storage in place of a LocalStorage."""

    class ReplacementType(type(LocalStorage)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, LocalStorage)

    class Replacement(LocalStorage, metaclass=ReplacementType):
        def __new__(cls, root: str, **_: object) -> Any:
            return make(root)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            of_package = name.startswith("unified_ckpt.") and name != "tests.support.harness"
            if of_package and getattr(module, "LocalStorage", None) is LocalStorage:
                patch.setattr(module, "LocalStorage", Replacement)
        yield


@contextmanager
def failing_folder(
    folder: Path, error: int, *, calls: tuple[str, ...] = ("stat",)
) -> Iterator[None]:
    """The status of a folder, and of what is in it, cannot be read."""

    def fail(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any = ".", *arguments: Any, **named: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(folder):
                raise OSError(error, os.strerror(error), str(path))
            return call(path, *arguments, **named)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, fail(getattr(os, name)))
        yield


def prefixed(files: Files, prefix: str) -> Files:
    return {
        name.removeprefix(prefix): body for name, body in files.items() if name.startswith(prefix)
    }

"""A call that waits for a save in the background, or begins one, is interrupted or fails half-way:
no wrong byte, no hang.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import unified_ckpt as uc
from tests.support.async_saves import QUICK, SECONDS, Gate, gate, late, storages
from tests.support.refusals import same_error
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import make_checkpointer, try_ranks

__all__ = ["gate", "late", "storages"]  # fixtures


class StoppedError(Exception):
    """Of a signal's handler, as KeyboardInterrupt is."""


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """What runs in it is interrupted after so long."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise StoppedError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(StoppedError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def filled(value: float) -> nn.Linear:
    net = nn.Linear(64, 64, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def values_of(folder: Path) -> list[float]:
    assert uc.verify(folder, deep=True).ok
    with uc.open(folder) as opened:
        return opened["model"]["weight"][...].unique().tolist()


@pytest.mark.parametrize("call", ["save_async", "save", "wait", "load"])
def test_interrupted_wait_keeps_buffers(tmp_path: Path, gate: Gate, call: str) -> None:
    """The usual emergency save after Ctrl-C copied over what was being written: no digest finds
    that.
    """
    net = filled(1)
    with uc.Checkpointer(tmp_path, options=QUICK) as checkpointer:
        checkpointer.save_async("a", model=net)
        nn.init.constant_(net.weight, 2)
        waiting: dict[str, Callable[[], object]] = {
            "save_async": lambda: checkpointer.save_async("b", model=net),
            "save": lambda: checkpointer.save("b", model=net),
            "wait": checkpointer.wait,
            "load": lambda: checkpointer.load("a", model=net),
        }
        with interrupted(0.2):
            waiting[call]()
        assert not checkpointer.idle(), "it is still in flight"
        threading.Timer(0.3, gate.open).start()
        checkpointer.save_async("emergency", model=net)
    assert values_of(tmp_path / "a") == [1]
    assert values_of(tmp_path / "emergency") == [2]


def test_interrupted_wait_still_raises_the_error(tmp_path: Path, gate: Gate) -> None:
    def fail(_: uc.SaveReport) -> None:
        raise uc.StorageError("the disk is gone")

    with uc.Checkpointer(tmp_path, options=QUICK) as checkpointer:
        checkpointer.save_async("a", model=filled(1), after_commit=fail)
        with interrupted(0.2):
            checkpointer.wait()
        gate.open()
        with pytest.raises(uc.StorageError, match=r"the disk is gone"):
            checkpointer.wait()


def test_interrupted_close_keeps_buffers(tmp_path: Path, gate: Gate) -> None:
    checkpointer = uc.Checkpointer(tmp_path, options=QUICK)
    checkpointer.save_async("a", model=filled(1))
    with interrupted(0.2):
        checkpointer.close()
    assert checkpointer.staging_nbytes > 0
    gate.open()
    checkpointer.close()
    assert checkpointer.staging_nbytes == 0
    assert values_of(tmp_path / "a") == [1]


def test_wait_in_the_own_thread_is_refused(
    tmp_path: Path,
) -> None:
    checkpointer = uc.Checkpointer(tmp_path, options=QUICK)
    pending = checkpointer.save_async(
        "a", model=filled(1), after_commit=lambda _: checkpointer.wait()
    )
    with pytest.raises(
        uc.CheckpointError, match=r"`after_commit` or `attach` waits for its own save"
    ):
        pending.result(SECONDS)
    checkpointer.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_thread_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lazy: bool
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "unified_ckpt-save" and threading.current_thread().name.endswith("1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    stepped: list[int] = []

    def act(comm: Comm) -> None:
        net = filled(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        threading.current_thread().name = f"rank {comm.rank}"
        with make_checkpointer(comm) as checkpointer:
            try:
                checkpointer.save_async(
                    tmp_path / "c", model=net, optimizer=optimizer, lazy=lazy, options=QUICK
                ).result(SECONDS)
            finally:
                optimizer.step()  # a hook that nobody ends would hold it up
                stepped.append(comm.rank)
        raise AssertionError("saved")

    began = time.monotonic()
    errors = try_ranks(2, act)
    assert all("can't start new thread" in str(error) for error in errors), errors
    assert sorted(stepped) == [0, 1]
    assert time.monotonic() - began < SECONDS / 2
    assert not (tmp_path / "c").exists()


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: hands everything on, and was never made by torch's own __init__."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_lazy_optimizer_without_hooks_is_refused(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        net, other = filled(1), nn.Linear(2, 2)
        nn.init.zeros_(other.weight)
        nn.init.zeros_(other.bias)
        both = nn.ModuleList([net, other])
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(one.parameters(), lr=0.1) for one in both
        ]
        if comm.rank == 1:
            optimizers[1] = Wrapper(optimizers[1])
        with make_checkpointer(comm) as checkpointer:
            try:
                checkpointer.save_async(
                    tmp_path / "c", model=both, optimizer=optimizers, lazy=True, options=QUICK
                )
            finally:
                optimizers[0].step()

    same_error(
        try_ranks(2, act),
        uc.LayoutError,
        r"^rank 1: lazy: got Wrapper, which takes no hooks; pass the optimizer that it wraps, "
        r"or lazy=False",
    )


def test_lazy_parameter_hooks_wait_for_the_copy(tmp_path: Path, late: Any) -> None:
    """Weight decay as a hook of the step, there before the save was."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @torch.no_grad()
    def decay(*_: object) -> None:
        net.weight.mul_(0.5)

    optimizer.register_step_pre_hook(decay)
    saved = net.weight.detach().clone()
    pending = uc.save_async(
        tmp_path / "c", model=net, optimizer=optimizer, lazy=True, options=QUICK
    )
    assert late.began.wait(SECONDS)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    late.go.set()
    stepping.join(SECONDS)
    pending.result(SECONDS)
    assert torch.equal(net.weight, saved / 2)
    with uc.open(tmp_path / "c") as opened:
        assert torch.equal(opened["model"]["weight"][...], saved)


def test_lazy_hooks_do_not_accumulate(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for turn in range(5):
        pending = uc.save_async(
            tmp_path / f"c{turn}", model=net, optimizer=optimizer, lazy=True, options=QUICK
        )
        while not pending.done():
            time.sleep(0.01)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize("lazy", [None, False, True])
def test_default_device_is_ignored(tmp_path: Path, lazy: bool | None) -> None:
    """Of torch.set_default_device("cuda"), with another device that is no memory of the host."""
    net, fresh = filled(1), filled(2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(fresh.parameters())
    options = QUICK.model_copy(update={"model_dtype": "bfloat16"})
    torch.set_default_device("meta")
    try:
        with uc.Checkpointer(tmp_path, options=options) as checkpointer:
            what = {
                "model": net,
                "optimizer": optimizer,
                "extra": {"t": torch.ones(2, device="cpu")},
            }
            if lazy is None:
                checkpointer.save("c", **what)
            else:
                checkpointer.save_async("c", lazy=lazy, **what).result(SECONDS)
            checkpointer.load("c", model=fresh, optimizer=other)
        with uc.open(tmp_path / "c") as opened:
            stored = opened["model"]["weight"][:3]
            empty = opened["model"]["weight"][:0]
    finally:
        torch.set_default_device(None)
    assert torch.equal(fresh.weight, net.weight)
    assert torch.equal(other.state[fresh.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    assert stored.device.type == empty.device.type == "cpu"

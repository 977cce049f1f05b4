"""Lazy background saves: the copy runs beside the next forward and backward pass, and the step of
every optimizer whose state is saved waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unified_ckpt as uc
from tests.support.engine.save.async_saves import QUICK, SECONDS, Late, late
from tests.support.harness import make_checkpointer, try_ranks
from tests.support.runtime.torch_state.optimizers import Lookahead
from tests.support.torch_training import state_of, whole_state
from unified_ckpt.engine.save.background import background_save
from unified_ckpt.engine.save.write.snapshot import Snapshot
from unified_ckpt.runtime.comm.comm import Comm

__all__ = ["late"]  # a fixture


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(150, 120), nn.BatchNorm1d(120)
        self.last = nn.Linear(120, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def backward(net: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    net.zero_grad()
    net(torch.randn(9, 150)).square().mean().backward()


def clone_state(
    net: nn.Module, optimizers: list[torch.optim.Optimizer], holder: torch.optim.Optimizer
) -> dict[tuple[str, str], Tensor]:
    """What a save stores, by part and name."""
    masters = state_of(net, holder).items()
    return {
        ("optimizer" if "/" in name else "model", name): tensor
        for name, tensor in whole_state(net, *optimizers).items()
    } | {("master_weights", name.removesuffix("/master_param")): tensor for name, tensor in masters}


@pytest.mark.incident("NVRx#376")
@pytest.mark.parametrize("hooked", ["before", "after"])
@pytest.mark.parametrize("stepping", [0, 1, 2])
def test_lazy_step_waits_and_buffers_are_copied_in_the_call(
    tmp_path: Path, late: Late, stepping: int, hooked: str
) -> None:
    """So does a hook of the user, such as weight decay; the engine's hooks do not accumulate."""
    net = Normed()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([*net.first.parameters(), *net.norm.parameters()], lr=0.1),
        torch.optim.SGD(net.last.parameters(), lr=0.1, momentum=0.9),
    ]
    holder = torch.optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        holder.state[parameter] = {"master_param": parameter.detach().double() + 1}
    backward(net, 0)
    for optimizer in optimizers:
        optimizer.step()
    stepped = [*optimizers, holder][stepping]
    decayed: list[int] = []

    @torch.no_grad()
    def decay(*_: object) -> None:
        decayed.append(1)
        net.first.weight.mul_(0.5)

    if hooked == "before":
        stepped.register_step_pre_hook(decay)
    for number in range(3):
        (late.go.clear if number == 2 else late.go.set)()  # only the last save is copied late
        late.began.clear()
        expected = clone_state(net, optimizers, holder)
        pending = uc.save_async(
            tmp_path / f"c{number}",
            model=net,
            optimizer=optimizers,
            master_weights=holder,
            lazy=True,
            options=QUICK,
        )
        assert late.began.wait(SECONDS)
        while number < 2 and not pending.done():
            time.sleep(0.01)
    if hooked == "after":
        stepped.register_step_pre_hook(decay)
    assert not pending.staged()
    assert len(stepped._optimizer_step_pre_hooks) == 2, "of the save and of the user"
    # changes the running mean, the running variance and the count of batches
    backward(net, 1)
    assert not torch.equal(net.norm.running_mean, expected["model", "norm.running_mean"])
    thread = threading.Thread(target=stepped.step, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "the step did not wait"
    late.go.set()
    thread.join(SECONDS)
    assert pending.staged()
    pending.result(SECONDS)
    for optimizer in (*optimizers, holder):
        optimizer.step()
        assert len(optimizer._optimizer_step_pre_hooks) == (optimizer is stepped)
    assert decayed == [1, 1]
    assert uc.verify(tmp_path / "c2", deep=True).ok
    with uc.open(tmp_path / "c2") as opened:
        for (part, name), tensor in expected.items():
            assert torch.equal(opened[part][name][...], tensor), f"{part}:{name}"


# failures: whoever fails, no step is held up


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: hands everything on, and was never made by torch's own __init__."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def fail_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = background_save.copy_tensors

    def failing(snapshot: Snapshot, keys: Any, **options: Any) -> None:
        if threading.current_thread().name == "unified_ckpt-save" and snapshot.rank == 1:
            raise ValueError("the device is gone")
        real(snapshot, keys, **options)

    monkeypatch.setattr(background_save, "copy_tensors", failing)


def refuse_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "unified_ckpt-save" and threading.current_thread().name == "rank-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


@pytest.mark.parametrize(
    ("prepare", "wrapper", "lazy", "kind", "match"),
    [
        (fail_copy, None, True, uc.RankError, "^rank 1: ValueError: the device is gone$"),
        (refuse_thread, None, True, Exception, "can't start new thread"),
        (refuse_thread, None, False, Exception, "can't start new thread"),
        (
            lambda monkeypatch: None,
            Wrapper,
            True,
            uc.LayoutError,
            r"^rank 1: lazy: got Wrapper, which takes no hooks; pass the optimizer that it wraps, "
            r"or lazy=False",
        ),
        (
            lambda monkeypatch: None,
            Lookahead,
            True,
            uc.LayoutError,
            r"^rank 1: lazy: got Lookahead, which takes no hooks; pass the optimizer that it wraps",
        ),
    ],
)
def test_step_after_a_failed_lazy_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[pytest.MonkeyPatch], None],
    wrapper: Callable[[Any], Any] | None,
    lazy: bool,
    kind: type[Exception],
    match: str,
) -> None:
    """A hook that a wrapper's step never runs would let the step change what is not copied."""
    prepare(monkeypatch)
    stepped: list[int] = []

    def act(comm: Comm) -> None:
        net = nn.Linear(9, 4)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()
        ]
        if wrapper is not None and comm.rank == 1:
            optimizers[1] = wrapper(optimizers[1])
        with make_checkpointer(comm) as checkpointer:
            try:
                checkpointer.save_async(
                    tmp_path / "c", model=net, optimizer=optimizers, lazy=lazy, options=QUICK
                ).result(SECONDS)
            finally:
                optimizers[0].step()  # a hook that nobody ends would hold it up
                stepped.append(comm.rank)

    for outcome in try_ranks(2, act, timeout_seconds=SECONDS / 2):
        with pytest.raises(kind, match=match):
            raise outcome  # type: ignore[misc]
    assert sorted(stepped) == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_interrupt_after_the_thread_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread finishes the save that the caller can no longer ask for."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "unified_ckpt-save":
            thread.join()
            raise KeyboardInterrupt

    with uc.Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save_async("a", model={"w": torch.ones(3)})
        checkpointer.save("b", model={"w": torch.ones(3)})
    for name in "ab":
        assert uc.verify(tmp_path / name, deep=True).ok

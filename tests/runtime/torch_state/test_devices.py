"""Memory of the host, and copies to it."""

from __future__ import annotations

import mmap
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.runtime.torch_state.late_device import LateStream, LateTensor, late_streams
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.runtime.torch_state import devices
from unified_ckpt.runtime.torch_state.devices import (
    HostCopies,
    copy_threads,
    copy_to_tensor,
    host_memory,
)
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


def test_copies_of_a_device_are_awaited_once() -> None:
    """Each copy that waits for the device before the next begins leaves the bus idle meanwhile."""
    sources = [torch.arange(40.0).view(5, 8).t(), torch.arange(7), torch.rand(3).double()]
    targets = [torch.zeros(8, 5), torch.zeros(7, dtype=torch.int64), torch.zeros(3)]
    with late_streams() as current_stream:
        stream = current_stream()
        with HostCopies(threads=2) as copies:
            for target, source in zip(targets, sources, strict=True):
                copies.add(target, LateTensor(source, stream))
            assert not any(target.any() for target in targets)
            assert (stream.synchronized, stream.blocking) == (0, 0)
        assert (stream.synchronized, stream.blocking) == (1, 0)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))


def test_copies_of_a_device_end_before_an_error_is_raised() -> None:
    """They write to memory that is freed, or reused, once the error has left the block."""
    target, untouched = torch.zeros(4), torch.zeros(4)

    def copy(stream: LateStream) -> None:
        with HostCopies(threads=1) as copies:
            copies.add(target, LateTensor(torch.ones(4), stream))
            copies.add(untouched, torch.ones(4))
            raise ValueError("stop")

    with late_streams() as current_stream:
        with pytest.raises(ValueError, match="stop"):
            copy(current_stream())
        assert current_stream().queued == []
    assert target.tolist() == [1] * 4
    assert untouched.tolist() == [0] * 4


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_of_the_host_run_in_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """In the caller's thread if there is one: another has no threads of torch yet."""
    monkeypatch.setattr(devices, "PIECE_NBYTES", 64)
    names, real = set[str](), torch._foreach_copy_
    barrier = threading.Barrier(threads)

    def copy(targets: Any, sources: Any) -> None:
        barrier.wait(10)  # that many run at a time
        names.add(threading.current_thread().name)
        real(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    sources = [torch.full((20,), float(number)) for number in range(9)]
    targets = [torch.zeros(20, dtype=torch.float64 if i % 2 else torch.float32) for i in range(9)]
    with HostCopies(threads=threads) as copies:
        for target, source in zip(targets, sources, strict=True):
            copies.add(target, source)
    assert all((target == number).all() for number, target in enumerate(targets))
    assert names == {"unified_ckpt-call" if threads > 1 else threading.current_thread().name}


@pytest.mark.parametrize("threads", [1, 2])
def test_copies_in_inference_mode(threads: int) -> None:
    """Other threads are not in it; and what is made in it can be filled in no other mode."""
    with torch.inference_mode():
        memory = host_memory(80, pinned=False)
        with HostCopies(threads=threads) as copies:
            copies.add(memory.view(torch.float32), torch.ones(20))
    assert memory.view(torch.float32).tolist() == [1] * 20
    with HostCopies(threads=threads) as copies:
        copies.add(memory.view(torch.float32), torch.zeros(20))
    assert memory.view(torch.float32).tolist() == [0] * 20


def test_copies_to_other_devices_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only streams of CUDA have the events that a buffer waits for before it is filled again."""
    waits = list[bool]()
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda *_, non_blocking=False: waits.append(not non_blocking)
    )
    decl = TensorDecl("model", "w", TensorSpec("F32", (6,)), Sharding())
    target = LocalTensor(decl, torch.empty(6, device="meta"))
    copy_to_tensor(torch.zeros(16, dtype=torch.uint8), target, 2)
    assert waits == [True]


@pytest.mark.parametrize(
    ("lanes", "of_torch", "threads"), [(8, 1, 8), (8, 16, 1), (8, 2, 4), (1, 1, 1)]
)
def test_threads_share_the_cores_with_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, lanes: int, of_torch: int, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    assert copy_threads(lanes) == threads


def test_memory_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that has none refuses the advice."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    assert np.count_nonzero(host_memory(5000, pinned=False).numpy()) == 0


@pytest.mark.incident("InstantTensor#19")
def test_memory_that_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the error until a kernel is launched, which raises it."""
    devices_used = list[str]()

    def launch(*size: int, device: str) -> torch.Tensor:
        devices_used.append(device)
        raise RuntimeError("CUDA error: invalid argument")

    refusing = SimpleNamespace(cudaHostRegister=lambda *arguments: 1)  # and nothing to unpin
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(torch, "zeros", launch)
    assert np.count_nonzero(host_memory(5000, pinned=True).numpy()) == 0
    assert devices_used == ["cuda"]
    assert "cannot pin 5000 bytes of host memory (CUDA error 1)" in caplog.text

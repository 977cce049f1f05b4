"""The memory that a load needs in addition to its targets, and the cores it counts on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.engine.load import extents
from unified_ckpt.engine.load.read import Destinations
from unified_ckpt.engine.plan.chunks import chunks
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state import devices
from unified_ckpt.runtime.torch_state.devices import transfer_buffer
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

COUNT = 24
FULL = {f"w{i:02}": torch.arange(i, i + 300.0 * 400).reshape(300, 400) for i in range(COUNT)}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of staged copies after each access to a destination."""
    counts: list[int] = []
    get = Destinations.__getitem__

    def counted(self: Destinations, row: int) -> LocalTensor:
        part = get(self, row)
        counts.append(len(self._copies))
        return part

    monkeypatch.setattr(Destinations, "__getitem__", counted)
    return counts


def column_major_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """A column-major tensor of zeros with the same shape."""
    return torch.zeros(tensor.shape[::-1]).t()


@pytest.mark.parametrize("verify", ["read", "off"])
def test_non_contiguous_targets_bound_staging_copies(
    tmp_path: Path, copies: list[int], verify: str
) -> None:
    uc.save(tmp_path / "c", model=FULL)
    target = {name: column_major_zeros(tensor) for name, tensor in FULL.items()}
    uc.load(tmp_path / "c", model=target, options=uc.LoadOptions(verify=verify))
    assert all(torch.equal(target[name], tensor) for name, tensor in FULL.items())
    assert len(copies) >= COUNT
    assert max(copies) <= 4, "the tensor being read, and those in flight"


@pytest.mark.parametrize("verify", ["read", "off"])
def test_buffers_of_other_dtypes_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    """A buffer must be free before the next read fills it."""
    buffers: list[torch.Tensor] = []

    def make_buffer(nbytes: int) -> torch.Tensor:
        buffers.append(transfer_buffer(nbytes))
        return buffers[-1]

    monkeypatch.setattr(devices, "transfer_buffer", make_buffer)
    monkeypatch.setattr(extents, "chunks", partial(chunks, nbytes=16_000))
    uc.save(tmp_path / "c", model=FULL)
    target = {name: torch.zeros_like(tensor).double() for name, tensor in FULL.items()}
    uc.load(tmp_path / "c", model=target, options=uc.LoadOptions(verify=verify))
    assert all(torch.equal(target[name], tensor.double()) for name, tensor in FULL.items())
    assert len(buffers) in (2, 4), "two per lane"


@pytest.mark.parametrize("dim", [0, 1])
def test_non_contiguous_targets_of_two_ranks(tmp_path: Path, copies: list[int], dim: int) -> None:
    """Columns are exchanged in tiles.

    The first and last tensor of a reader's share may belong to another reader, too.
    """
    uc.save(tmp_path / "c", model=FULL)
    layout = uc.Layout(mesh={"tp": 2}, rules={"*": {"tp": dim}})

    def act(comm: Comm) -> None:
        shards = {name: tensor.chunk(2, dim)[comm.rank] for name, tensor in FULL.items()}
        target = {name: column_major_zeros(tensor) for name, tensor in shards.items()}
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / "c", model=target, layout=layout)
        assert all(torch.equal(target[name], tensor) for name, tensor in shards.items())

    run_ranks(2, act)
    assert len(copies) >= COUNT
    assert max(copies) <= 6

"""The memory that a load needs besides its targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.engine.load.read import Destinations
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import LocalTensor
from unified_ckpt.testing import make_checkpointer, run_ranks

COUNT = 24
FULL = {f"w{i:02}": torch.arange(i, i + 300.0 * 400).reshape(300, 400) for i in range(COUNT)}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies of parts there were, after each look at a part."""
    found: list[int] = []
    get = Destinations.__getitem__

    def counted(self: Destinations, row: int) -> LocalTensor:
        part = get(self, row)
        found.append(len(self._staging))
        return part

    monkeypatch.setattr(Destinations, "__getitem__", counted)
    return found


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """As large, of zeros, and column-major."""
    return torch.zeros(tensor.shape[::-1]).t()


@pytest.mark.parametrize("verify", ["read", "off"])
def test_targets_that_are_not_contiguous_are_not_all_copied_at_once(
    tmp_path: Path, copies: list[int], verify: str
) -> None:
    uc.save(tmp_path / "c", model=FULL)
    target = {name: turned(tensor) for name, tensor in FULL.items()}
    uc.load(tmp_path / "c", model=target, options=uc.LoadOptions(verify=verify))
    assert all(torch.equal(target[name], tensor) for name, tensor in FULL.items())
    assert len(copies) >= COUNT
    assert max(copies) <= 4, "the one that is read, and those whose bytes are on their way"


@pytest.mark.parametrize("dim", [0, 1])
def test_nor_when_ranks_read_for_each_other(tmp_path: Path, copies: list[int], dim: int) -> None:
    """Columns come in tiles. Of each reader's share the first and the last tensor may be another's,
    too.
    """
    uc.save(tmp_path / "c", model=FULL)
    layout = uc.Layout(mesh={"tp": 2}, rules={"*": {"tp": dim}})

    def act(comm: Comm) -> None:
        held = {name: tensor.chunk(2, dim)[comm.rank] for name, tensor in FULL.items()}
        target = {name: turned(tensor) for name, tensor in held.items()}
        with make_checkpointer(comm) as made:
            made.load(tmp_path / "c", model=target, layout=layout)
        assert all(torch.equal(target[name], tensor) for name, tensor in held.items())

    run_ranks(2, act)
    assert len(copies) >= COUNT
    assert max(copies) <= 6

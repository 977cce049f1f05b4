"""Random states: restored exactly, or derived for another number of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.runtime.torch_state.generators import drawn


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_draws_after_load_equal_draws_after_save(tmp_path: Path) -> None:
    drawn()  # the generator now caches half of a pair of normal numbers
    uc.save(
        tmp_path / "c",
        model={"w": torch.ones(2)},
        rank_extra={"random": uc.RandomStates().state_dict()},
    )
    expected = [drawn() for _ in range(3)]
    report = uc.load(tmp_path / "c", model={"w": torch.zeros(2)})
    uc.RandomStates().load_state_dict(report.rank_extra["random"])
    assert [drawn() for _ in range(3)] == expected


def test_derived_states_differ_by_rank_and_saved_state() -> None:
    states = uc.RandomStates()
    saved = [states.state_dict()]
    torch.rand(3)
    later = [states.state_dict()]
    first_draws = set()
    for draw, rank, world in [(saved, 0, 2), (saved, 1, 2), (saved, 1, 3), (later, 0, 2)]:
        states.load_from_ranks(draw, rank=rank, world=world)
        first = drawn()
        drawn()
        states.load_from_ranks(draw, rank=rank, world=world)
        assert drawn() == first, "always the same from the same"
        first_draws.add(first)
    assert len(first_draws) == 4


@pytest.mark.parametrize("devices", [0, 2])
def test_unused_cuda_states_are_logged(
    devices: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a node without a GPU; states are restored if the number of devices matches."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    restored: list[list[torch.Tensor]] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.append)
    states = uc.RandomStates()
    for saved in (1, devices):
        states.load_state_dict(
            {**states.state_dict(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * saved}
        )
    expected = (
        f"random states: saved for 1 CUDA devices, found {devices}; CUDA states stay unchanged"
    )
    assert [record.getMessage() for record in caplog.records] == [expected]
    assert [len(device_states) for device_states in restored] == ([2] if devices else [])

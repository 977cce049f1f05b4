"""Loads into boxes that ranks declare, from checkpoints of whole tensors and of rules.

The oracle is numpy slices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.tilings import Tiling, tilings
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.core.planning import box_reads, lanes
from unified_ckpt.engine.load import extents, tensor_reader
from unified_ckpt.engine.plan.chunks import chunks
from unified_ckpt.runtime.comm.comm import Comm

WORLD = 3
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple) | st.just((4, 3000))
PART = {"model": "w", "optimizer": "w/exp_avg", "master_weights": "w"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads of some KiB have several chunks, lanes, and gaps that are too long."""
    monkeypatch.setattr(extents, "CHUNK_NBYTES", 1 << 12)
    monkeypatch.setattr(extents, "chunks", partial(chunks, nbytes=1 << 12))
    monkeypatch.setattr(lanes, "MIN_LANE_NBYTES", 1 << 12)
    monkeypatch.setattr(tensor_reader, "lane_count", lambda *, ranks: 2)
    monkeypatch.setattr(box_reads, "SMALL_NBYTES", 64)
    monkeypatch.setattr(box_reads, "MAX_GAP_NBYTES", 1 << 10)


def array_of(shape: tuple[int, ...], number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    numel = int(np.prod(shape, dtype=int))
    return np.arange(100_000 * number, 100_000 * number + numel, dtype=np.float32).reshape(shape)


@settings(max_examples=30)
@given(
    drawn=st.tuples(*(tilings(WORLD, SHAPES) for _ in range(3))),
    verify=st.sampled_from(["read", "full", "off"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_loads_fill_boxes(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Tiling, ...],
    verify: str,
    dtype: torch.dtype,
) -> None:
    """Beside a tensor of a rule, and one that every rank holds whole."""
    folder = tmp_path_factory.mktemp("c") / "c"
    arrays = [array_of(each.shape, number) for number, each in enumerate(drawn)]
    rows = torch.arange(66.0).view(2 * WORLD, 11)
    others = {"rows": rows, "whole": torch.arange(5.0)}
    stored = {f"w{i}": torch.from_numpy(array) for i, array in enumerate(arrays)}
    uc.save(folder, model=stored | others, options=uc.SaveOptions(fsync=False))

    def act(comm: Comm) -> None:
        rank = comm.rank
        targets = [each.target(rank, dtype, -1.0) for each in drawn]
        model: dict[str, Any] = {f"w{i}": target for i, target in enumerate(targets)}
        model |= {"rows": torch.zeros(2, 11), "whole": torch.zeros(5)}
        layout = uc.Layout({"dp": WORLD}, {"rows": {"dp": 0}})
        with make_checkpointer(comm) as checkpointer:
            options = uc.LoadOptions(verify=verify)  # type: ignore[arg-type]
            checkpointer.load(folder, model=model, layout=layout, options=options)
        assert torch.equal(model["rows"], rows[2 * rank : 2 * rank + 2])
        assert torch.equal(model["whole"], others["whole"])
        for tiling, target, array in zip(drawn, targets, arrays, strict=True):
            filled, expected = tiling.filled(rank, target), tiling.expected(rank, array)
            for one, other in zip(filled, expected, strict=True):
                assert np.array_equal(one, other)
            assert (tiling.padding(target) == -1).all()

    run_ranks(WORLD, act)

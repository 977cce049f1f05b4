"""Boxes that ranks declare, in the folders of node groups: saved, loaded, copied and merged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import LOAD, SECONDS, on_node
from tests.support.engine.tilings import Tiling, tilings
from tests.support.harness import run_ranks
from unified_ckpt.runtime.comm.comm import Comm

WORLD = 4
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
NODES = (0, 0, 1, 1)


@settings(max_examples=10)
@given(
    saved=tilings(WORLD, SHAPES),
    copies=st.sampled_from([1, 2]),
    target=st.data(),
    compression=st.sampled_from(["none", "O1"]),
)
def test_boxes_are_stored_by_node_groups(
    tmp_path_factory: pytest.TempPathFactory,
    saved: Tiling,
    copies: int,
    target: st.DataObject,
    compression: str,
) -> None:
    """Loaded into other boxes, with both folders; whole after a merge; and from copies alone."""
    root = tmp_path_factory.mktemp("c")
    loaded = target.draw(tilings(WORLD, st.just(saved.shape)))
    numel = int(np.prod(saved.shape, dtype=int))
    array = np.arange(1, numel + 1, dtype=np.float32).reshape(saved.shape)
    bias = torch.arange(3.0)

    def folder(comm: Comm) -> Path:
        return root / f"node {NODES[comm.rank]}" / "c"

    def save(comm: Comm) -> None:
        shards = saved.source(comm.rank, array)
        options = uc.SaveOptions(
            fsync=False,
            timeout_seconds=SECONDS,
            node_copies=copies,
            compression=compression,  # type: ignore[arg-type]
        )
        with on_node(comm, NODES) as checkpointer:
            state = {"w/exp_avg": shards}
            model = {"w": shards, "b": bias}
            checkpointer.save(folder(comm), model=model, optimizer=state, options=options)

    def load(comm: Comm) -> None:
        shards, state = (loaded.target(comm.rank, torch.float32, -1.0) for _ in range(2))
        model = {"w": shards, "b": torch.zeros(3)}
        with on_node(comm, NODES) as checkpointer:
            checkpointer.load(
                folder(comm), model=model, optimizer={"w/exp_avg": state}, options=LOAD
            )
        for each in (shards, state):
            filled, expected = loaded.filled(comm.rank, each), loaded.expected(comm.rank, array)
            for one, other in zip(filled, expected, strict=True):
                assert np.array_equal(one, other)
            assert (loaded.padding(each) == -1).all()

    run_ranks(WORLD, save)
    run_ranks(WORLD, load)
    if copies == 2:
        shutil.rmtree(root / "node 1")
        run_ranks(WORLD, load)

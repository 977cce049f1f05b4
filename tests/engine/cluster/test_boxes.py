"""Boxes that ranks declare, in the folders of node groups: saved, loaded, copied and merged."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import LOAD, SECONDS, on_node
from tests.support.engine.tilings import Tiling, tilings
from tests.support.harness import run_ranks, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.engine.rewrite.merge import MergeOptions, merge_paths
from unified_ckpt.runtime.comm.comm import Comm, single_process
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.storage import LocalStorage

WORLD = 4
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
NODES = (0, 0, 1, 1)
OPTIONS = MergeOptions(max_file_bytes=1 << 30, if_exists="error", timeout_seconds=SECONDS)


@settings(max_examples=5)
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
    folders = [str(root / f"node {number}" / "c") for number in (0, 1)]
    merged, topology = LocalStorage(str(root)), Topology.shared_folder(0, [0])
    merge_paths(single_process(), folders, merged, "merged", OPTIONS, topology=topology)
    assert uc.verify(root / "merged", deep=True).ok
    for part, name in (("model", "w"), ("optimizer", "w/exp_avg")):
        stored = load_file(root / "merged" / f"{part}.safetensors")
        assert np.array_equal(stored[name], array)
    if copies == 2:
        shutil.rmtree(root / "node 1")
        run_ranks(WORLD, load)


WHOLE = torch.arange(96.0).view(8, 12)


def rows(low: int, high: int, whole: torch.Tensor = WHOLE) -> uc.Shards:
    shape = tuple(whole.shape)
    return uc.Shards(whole[low:high].clone(), shape, [((low, 0), (0, 0), (high - low, 12))])


def save_each(root: Path, held: Sequence[Any], **options: Any) -> list[object]:
    """Save on as many nodes as there are tensors, one rank on each."""

    def act(comm: Comm) -> uc.SaveReport:
        path = root / f"node {comm.rank}" / "c"
        given = uc.SaveOptions(fsync=False, timeout_seconds=SECONDS, **options)
        with on_node(comm, range(len(held))) as checkpointer:
            return checkpointer.save(path, model={"w": held[comm.rank]}, options=given)

    return try_ranks(len(held), act, timeout_seconds=60)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ((rows(0, 3), rows(4, 8)), r"model:w.* no rank declares \[3:4, 0:12\]"),
        ((rows(0, 5), rows(4, 8)), r"\[4:8, 0:12\] of rank\(s\) 1 overlap"),
        ((rows(0, 4), WHOLE), r"rank\(s\) 0 declare boxes, and rank\(s\) 1 a sharding"),
        (
            (rows(0, 4), rows(4, 8), rows(4, 8, WHOLE + 1)),
            r"model:w@4:8/8,0:12/12: rank\(s\) 1 differ from rank\(s\) 2",
        ),
    ],
    ids=["gap", "overlap", "rule", "replicas"],
)
def test_boxes_of_all_nodes_are_proved(tmp_path: Path, held: Sequence[Any], text: str) -> None:
    same_error(save_each(tmp_path, held), uc.LayoutError, text)
    assert not [*tmp_path.glob("node */c")]


def test_damaged_boxes_are_repaired_from_a_copy(tmp_path: Path) -> None:
    assert all(
        isinstance(result, uc.SaveReport)
        for result in save_each(tmp_path, (rows(0, 3), rows(3, 8)), node_copies=2)
    )
    folders = [tmp_path / f"node {number}" / "c" for number in (0, 1)]
    (file,) = folders[0].glob("model_shards*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert not uc.verify(folders[0], deep=True).ok
    uc.repair(folders[0], [folders[1] / "replicas" / "0"])
    assert uc.verify(folders[0], deep=True).ok

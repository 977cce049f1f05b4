"""Several nodes' folders, read by one process as one Source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.simulated_nodes import SAVE, folder_of, on_node
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.engine.nodes.discover import open_cluster_source, open_folders
from unified_ckpt.engine.nodes.source import ClusterSource
from unified_ckpt.engine.nodes.storage import ShardedStorage, virtual_file
from unified_ckpt.runtime.comm.comm import Comm, single_process
from unified_ckpt.testing import run_ranks

WORLD = 4
FULL = {
    "rows": torch.arange(1200 * 500, dtype=torch.float32).reshape(
        1200, 500
    ),  # two blocks, each over two ranks' rows
    "columns": torch.arange(500 * 1200, dtype=torch.float32).reshape(500, 1200),
    "inner": torch.arange(12 * 8 * 5, dtype=torch.float32).reshape(12, 8, 5),
}
DIMS = {"rows": 0, "columns": 1, "inner": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each rank is a node, and has a quarter of each tensor."""
    root = tmp_path_factory.mktemp("saved")
    layout = uc.Layout(
        mesh={"dp": WORLD},
        rules={n: {"dp": dim} for n, dim in DIMS.items()},
        shapes={n: tuple(t.shape) for n, t in FULL.items()},
    )

    def act(comm: Comm) -> None:
        state = {
            name: full.chunk(WORLD, DIMS[name])[comm.rank].clone() for name, full in FULL.items()
        }
        with on_node(comm, range(WORLD)) as made:
            made.save(folder_of(root, comm.rank), model=state, layout=layout, options=SAVE)

    run_ranks(WORLD, act)
    return root


@contextmanager
def joint_of(root: Path) -> Iterator[ClusterSource]:
    with ExitStack() as owned:
        paths = [str(folder_of(root, node)) for node in range(WORLD)]
        opened = open_folders(paths, owned, lock=False)
        found = open_cluster_source(
            single_process(), "read", opened, [0], owned, timeout_seconds=30
        )
        assert isinstance(found, ClusterSource)
        yield found


def test_reading_elements_one_by_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has what is looked up once for each block that is read, not for each element."""
    looked = []
    real = ShardedStorage._read_tensor

    def counted(*what: object) -> int:
        looked.append(what)
        return real(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardedStorage, "_read_tensor", counted)
    with joint_of(saved) as joint:
        for name, first, step, most in (
            ("rows", 7, 500, 5),
            ("columns", 299, 1200, 2),
            ("columns", 5, 401, 8),
            ("inner", 1, 3, 4),
        ):
            line, looked[:] = FULL[name].reshape(-1).numpy(), []
            body = np.zeros(1, np.float32)
            for at in range(first, len(line), step):
                joint.storage.read_at(
                    virtual_file(("model", name)), at * 4, memoryview(body).cast("B")
                )
                assert body[0] == line[at], (name, at)
            assert len(looked) <= most, name


def test_reading_boxes(saved: Path) -> None:
    with joint_of(saved) as joint:
        for name, box in (
            ("columns", Box((3, 290), (400, 21))),
            ("inner", Box((2, 1, 1), (9, 6, 3))),
            ("rows", Box((290, 499), (30, 1))),
        ):
            spans = tuple(
                slice(low, low + size) for low, size in zip(box.offsets, box.shape, strict=True)
            )
            assert (
                joint.read("model", name, box) == FULL[name][spans].contiguous().numpy().tobytes()
            ), name

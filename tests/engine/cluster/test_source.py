"""Several nodes' folders, read by one process as one Source."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.engine.cluster.simulated_nodes import NodeState, folder_of
from unified_ckpt.engine.cluster import storage
from unified_ckpt.engine.cluster.discover import open_cluster_source, open_folders
from unified_ckpt.engine.cluster.source import ClusterSource
from unified_ckpt.engine.cluster.storage import ShardReader
from unified_ckpt.runtime.comm.comm import single_process
from unified_ckpt.runtime.comm.topology import Topology

WORLD = 4
FULL = {
    # two blocks, each over two ranks' rows
    "rows": torch.arange(1200 * 500, dtype=torch.float32).reshape(1200, 500),
    "columns": torch.arange(500 * 1200, dtype=torch.float32).reshape(500, 1200),
    "inner": torch.arange(12 * 8 * 5, dtype=torch.float32).reshape(12, 8, 5),
}
DIMS = {"rows": 0, "columns": 1, "inner": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a quarter of each tensor per node, with one rank per node."""
    root = tmp_path_factory.mktemp("saved")
    NodeState(FULL, DIMS).save(root, range(WORLD))
    return root


@contextmanager
def joint_of(root: Path) -> Iterator[ClusterSource]:
    with ExitStack() as owned:
        paths = [str(folder_of(root, node)) for node in range(WORLD)]
        opened = open_folders(paths, owned, lock=False)
        topology = Topology.shared_folder(0, ["only"])
        source = open_cluster_source(
            single_process(), "read", opened, topology, owned, timeout_seconds=30
        )
        assert isinstance(source, ClusterSource)
        yield source


def test_reading_elements_one_by_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders are resolved once per block, not once per element."""
    reads = []
    real = ShardReader._read_tensor

    def counted(*args: object) -> int:
        reads.append(args)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardReader, "_read_tensor", counted)
    with joint_of(saved) as joint:
        for name, first, step, most in (
            ("rows", 7, 500, 5),
            ("columns", 299, 1200, 2),
            ("columns", 5, 401, 8),
            ("inner", 1, 3, 4),
        ):
            line, reads[:] = FULL[name].reshape(-1).numpy(), []
            body = np.zeros(1, np.float32)
            for index in range(first, len(line), step):
                joint.read_into(("model", name), index * 4, memoryview(body).cast("B"))
                assert body[0] == line[index], (name, index)
            assert len(reads) <= most, name


@pytest.mark.parametrize("limit", [1, 1 << 16])
def test_any_range_of_a_sharded_tensor(
    saved: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Also with more regions than are kept."""
    monkeypatch.setattr(storage, "_MAX_REGIONS", limit)
    draw = random.Random(3)
    with joint_of(saved) as joint:
        for name in 4 * ["inner", "columns", "rows"]:
            content = FULL[name].numpy().tobytes()
            start = draw.randrange(len(content))
            stop = draw.choice([start, start + 1, draw.randint(start, len(content))])
            body = bytearray(stop - start)
            joint.read_into(("model", name), start, memoryview(body))
            assert body == content[start:stop], (name, start, stop)

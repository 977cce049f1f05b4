"""All ranks save to a bucket: its objects equal the files of a save on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.cluster.node_cases import FUNCTION_FIXTURE
from tests.support.engine.cluster.simulated_nodes import SAVE, on_node, states
from tests.support.engine.compressed_cases import compressed_cases
from tests.support.engine.reshard_cases import Case, cases
from tests.support.engine.reshard_cases import save_case as save_alone
from tests.support.harness import run_ranks
from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.core.planning import part_plan
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.objects import registry
from unified_ckpt.runtime.objects.storage import ObjectStorage

__all__ = ["states"]  # a fixture
URL, NAME = "s3://bucket/run", "checkpoint-1"
MANIFEST = "unified_checkpoint.json"
SMALL_TILE = 16 << 10


@pytest.fixture
def bucket() -> Iterator[MemoryBucket]:
    bucket = MemoryBucket()
    registry.register("s3://bucket", MemoryStore(bucket))
    yield bucket
    registry.register("s3://bucket", None)


def files_of(bucket: MemoryBucket) -> dict[str, bytes]:
    prefix = f"run/{NAME}/"
    return {
        key.removeprefix(prefix): body
        for key, body in bucket.bodies().items()
        if key.startswith(prefix)
    }


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def assert_same_files(actual: Mapping[str, bytes], expected: Mapping[str, bytes]) -> None:
    differing = {
        name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)
    }
    assert differing <= {MANIFEST}


def save(case: Case, nodes: Sequence[int], *, kind: str, **options: object) -> None:
    """Save on all ranks; `kind`: "save", or "async", or a number of bytes to copy."""

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as checkpointer:
            arguments: dict[str, Any] = {
                "model": case.state(comm.rank),
                "options": SAVE.model_copy(update=options),
            }
            if kind == "save":
                checkpointer.save(f"{URL}/{NAME}", **arguments)
            else:
                checkpointer.save_async(f"{URL}/{NAME}", **arguments).result(60)

    run_ranks(case.saved.world, act)


@given(
    case=cases(max_world=6, max_tensors=4, loads=1, max_nbytes=200_000)
    | compressed_cases(max_world=6, whole_models=True),
    part_nbytes=st.sampled_from([4096, 16 << 10, 256 << 10]),
    compression=st.sampled_from(["none", "lossless", "O1", "O2"]),
    one_node=st.booleans(),
    kind=st.sampled_from(["save", "async", "partly copied"]),
    max_file_bytes=st.sampled_from([50_000, 1 << 30]),
)
@settings(max_examples=25, suppress_health_check=FUNCTION_FIXTURE, deadline=None)
def test_objects_equal_the_files_of_a_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    part_nbytes: int,
    compression: str,
    one_node: bool,
    kind: str,
    max_file_bytes: int,
) -> None:
    monkeypatch.setattr(ObjectStorage, "smallest_part_nbytes", part_nbytes)
    monkeypatch.setattr(part_plan, "TILE_NBYTES", SMALL_TILE)
    bucket = MemoryBucket()
    registry.register("s3://bucket", MemoryStore(bucket))
    options: dict[str, Any] = {"compression": compression, "max_file_bytes": max_file_bytes}
    nodes = [0] * case.saved.world if one_node else list(range(case.saved.world))
    host_bytes = {"host_bytes": 30_000} if kind == "partly copied" else {}
    try:
        save(case, nodes, kind=kind, **options, **host_bytes)
    finally:
        registry.register("s3://bucket", None)
    with TemporaryDirectory(dir=tmp_path) as alone:
        save_alone(case, Path(alone), **options)
        assert_same_files(files_of(bucket), files_in(Path(alone) / NAME))
    assert not bucket.open_uploads()

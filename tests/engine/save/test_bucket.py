"""All ranks save to a bucket: its objects equal the files of a save on a disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.cluster.node_cases import FUNCTION_FIXTURE
from tests.support.engine.cluster.simulated_nodes import SAVE, on_node, states
from tests.support.engine.compressed_cases import (
    arrays_of,
    compressed_cases,
    expected_tensors,
    keys_of,
    stored_tensors,
)
from tests.support.engine.reshard_cases import Case, cases
from tests.support.engine.reshard_cases import save_case as save_alone
from tests.support.harness import DrawnLayout, DrawnTensor, run_ranks, try_ranks
from tests.support.objects.buckets import connect, folder_bodies, registered_bucket
from tests.support.objects.memory import MemoryBucket
from unified_ckpt.core.planning import part_plan
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, spec_of
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.objects.part_writer import PartWriter
from unified_ckpt.runtime.objects.storage import ObjectStorage

__all__ = ["states"]  # a fixture
URL, NAME = "s3://bucket/run", "checkpoint-1"
MANIFEST = "unified_checkpoint.json"
SMALL_TILE = 16 << 10
ACQUIRE = PartWriter._acquire_memory


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    """An empty bucket; parts have 4 KiB, and tiles 16 KiB."""
    monkeypatch.setattr(ObjectStorage, "smallest_part_nbytes", 4096)
    monkeypatch.setattr(part_plan, "TILE_NBYTES", SMALL_TILE)
    with registered_bucket() as bucket:
        bucket.min_part_nbytes = 1
        yield bucket


def files_of(bucket: MemoryBucket) -> dict[str, bytes]:
    return folder_bodies(bucket, f"run/{NAME}")


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def assert_same_files(actual: Mapping[str, bytes], expected: Mapping[str, bytes]) -> None:
    differing = {
        name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)
    }
    assert differing <= {MANIFEST}


def acquire_once(writer: PartWriter) -> bytearray:
    """Acquire the memory of a part while no other part of a rank's tensors has any.

    A rank completes its parts one after another: its memory does not grow with their number.
    """
    with_memory = [
        file
        for (file, _), part in writer._open.items()
        if part.memory is not None and file.endswith(".safetensors")
    ]
    assert with_memory == []
    return ACQUIRE(writer)


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


@pytest.mark.incident("pytorch#144752")
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
    monkeypatch.setattr(PartWriter, "_acquire_memory", acquire_once)
    options: dict[str, Any] = {"compression": compression, "max_file_bytes": max_file_bytes}
    nodes = [0] * case.saved.world if one_node else list(range(case.saved.world))
    host_bytes = {"host_bytes": 30_000} if kind == "partly copied" else {}
    with registered_bucket() as bucket:
        bucket.min_part_nbytes = 1
        save(case, nodes, kind=kind, **options, **host_bytes)
    with TemporaryDirectory(dir=tmp_path) as alone:
        save_alone(case, Path(alone), **options)
        assert_same_files(files_of(bucket), files_in(Path(alone) / NAME))
    assert not bucket.open_uploads()


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)], ids=str)
def test_encoded_rows_of_drifted_replicas_are_of_one_of_them(
    bucket: MemoryBucket, tmp_path: Path, dims: tuple[int, int]
) -> None:
    """Codes of one replica do not fit the scales, or the model, of another."""
    shape, fqns = (260, 192), ("a.w", "b.w", "c.w", "d.w")
    sharded = [Sharding((ShardDim(dim, 2, 1),)) for dim in dims]
    replicas = [
        {
            key: array
            for number, fqn in enumerate(fqns)
            for key, array in arrays_of(fqn, shape, seed + number).items()
        }
        for seed in (0, 100)
    ]
    tensors = tuple(
        DrawnTensor(TensorDecl(*key, spec_of(dtype, shape), sharded[number % 2]), (0, 1, 2, 3))
        for number, fqn in enumerate(fqns)
        for key in keys_of(fqn)
        for dtype in ("BF16" if key[0] == "model" else "F32",)
    )
    cases = [Case(arrays, DrawnLayout(4, tensors)) for arrays in replicas]

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 0, 1, 1]) as checkpointer:
            options = {"compression": "O2", "check_replicas": "never"}
            state: Any = cases[comm.rank // 2].state(comm.rank)
            checkpointer.save(f"{URL}/{NAME}", model=state, options=SAVE.model_copy(update=options))

    run_ranks(4, act)
    for name, body in files_of(bucket).items():
        (tmp_path / name).write_bytes(body)
    stored, outliers = stored_tensors(tmp_path)
    expected = [expected_tensors(arrays, "O2") for arrays in replicas]
    chosen = set[int]()
    for part, name in expected[0][0]:
        if part == "model" or name.endswith(".scale"):
            continue
        beside = [("model", name)] if part == "master_weights" else [(part, f"{name}.scale")]
        matching = [
            number
            for number, (tensors_of, outliers_of) in enumerate(expected)
            if all(stored[key] == tensors_of[key] for key in [(part, name), *beside])
            and all(
                outliers[part].get(f"{name}.{kind}") == outliers_of[part].get(f"{name}.{kind}")
                for kind in ("index", "value")
            )
        ]
        assert len(matching) == 1, (part, name)
        chosen.update(matching)
    assert chosen == {0, 1}, "the replicas share the work"


# plain tensors of four ranks: two replicas of two shards each

FULL = {"rows": (500, 90), "columns": (300, 700), "bias": (96,)}
LAYOUT = uc.Layout(
    mesh={"rep": 2, "dp": 2},
    rules={"rows": {"dp": 0}, "columns": {"dp": 1}},
    shapes={"rows": FULL["rows"], "columns": FULL["columns"]},
)


def whole(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in FULL.items()}


def local(rank: int, step: int) -> dict[str, torch.Tensor]:
    dims = {"rows": 0, "columns": 1}
    return {
        name: tensor.chunk(2, dims[name])[rank % 2].clone() if name in dims else tensor
        for name, tensor in whole(step).items()
    }


def save_step(checkpointer: uc.Checkpointer, path: str, rank: int, step: int) -> None:
    checkpointer.save(
        path,
        model=local(rank, step),
        layout=LAYOUT,
        step=step,
        extra={"epoch": step},
        rank_extra={"rank": rank, "rng": bytes(3000 * rank)},
        options=SAVE.model_copy(update={"if_exists": "replace"}),
    )


def test_saves_replace_each_other_and_are_loaded(bucket: MemoryBucket, tmp_path: Path) -> None:
    """The second save reuses the plan. Files beside tensors are those of a disk, too."""

    def act(comm: Comm) -> list[int | None]:
        steps = []
        with on_node(comm, [0, 0, 1, 1]) as checkpointer:
            for step in (1, 2, 3):
                save_step(checkpointer, f"{URL}/{NAME}", comm.rank, step)
                target = {name: torch.zeros(shape) for name, shape in FULL.items()}
                report = checkpointer.load(f"{URL}/{NAME}", model=target)
                assert all(torch.equal(target[name], full) for name, full in whole(step).items())
                steps.append(report.step)
        with on_node(comm, [0, 0, 0, 0]) as checkpointer:
            save_step(checkpointer, str(tmp_path / NAME), comm.rank, 3)
        return steps

    assert run_ranks(4, act) == [[1, 2, 3]] * 4
    assert_same_files(files_of(bucket), files_in(tmp_path / NAME))
    assert not bucket.open_uploads()
    assert uc.verify(f"{URL}/{NAME}", deep=True).ok


def test_requests_equal_the_plan(bucket: MemoryBucket) -> None:
    """One request for each part, and two for each file."""
    verbs = Counter[str]()
    connect(bucket, before=lambda verb, _: verbs.update([verb]))

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 0, 0, 0]) as checkpointer:
            save_step(checkpointer, f"{URL}/{NAME}", comm.rank, 1)

    run_ranks(4, act)
    files = {name: body for name, body in files_of(bucket).items() if name != MANIFEST}
    tensors = [body for name, body in files.items() if name.endswith(".safetensors")]
    others = len(files) - len(tensors)
    assert verbs["begin"] == verbs["complete"] == len(files)
    assert verbs["put_part"] == sum(-(-len(body) // 4096) for body in tensors) + others


@pytest.mark.incident("marin#9213")
@pytest.mark.parametrize("background", [False, True])
def test_failed_upload_ends_the_save_on_all_ranks(bucket: MemoryBucket, background: bool) -> None:
    parts = Counter[str]()

    def fail(verb: str, key: str) -> None:
        if verb == "put_part" and key.endswith(".safetensors"):
            parts[key] += 1
            if sum(parts.values()) == 20:
                raise uc.StorageError(f"{key}: put_part: HTTP 503 SlowDown (6 attempts)")

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 0, 1, 1]) as checkpointer:
            arguments: dict[str, Any] = {"layout": LAYOUT, "options": SAVE}
            if background:
                pending = checkpointer.save_async(
                    f"{URL}/{NAME}", model=local(comm.rank, 1), **arguments
                )
                pending.result(60)
            else:
                checkpointer.save(f"{URL}/{NAME}", model=local(comm.rank, 1), **arguments)

    connect(bucket, before=fail)
    started = time.monotonic()
    outcomes = try_ranks(4, act)
    assert time.monotonic() - started < 20
    assert all(isinstance(outcome, uc.StorageError) for outcome in outcomes), outcomes
    assert all("503 SlowDown" in str(outcome) for outcome in outcomes)
    assert not bucket.open_uploads()
    assert not files_of(bucket)

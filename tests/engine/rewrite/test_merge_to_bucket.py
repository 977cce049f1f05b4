"""Folders of several nodes merged into a bucket: the files of a merge on a disk, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import (
    NAME,
    SECONDS,
    NodeState,
    fine,
    folder_of,
    states,
)
from tests.support.harness import try_ranks
from tests.support.objects.buckets import URL, connect, folder_bodies, registered_bucket
from tests.support.objects.memory import MemoryBucket
from tests.support.refusals import same_error
from unified_ckpt.engine.folder.copy import CopyReport
from unified_ckpt.engine.rewrite.merge import MergeOptions, merge_paths
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.roots import open_root

__all__ = ["states"]  # a fixture

NODES = [0, 0, 1, 1]
ROOT = f"{URL}/run"
FULL = {
    "w": torch.arange(1700 * 400, dtype=torch.float32).reshape(1700, 400),  # rows of all ranks
    "o": torch.arange(90 * 30.0).reshape(90, 30),  # columns
    "b": torch.arange(5.0),
    "none": torch.zeros(0, 4),
}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    staged = "unified_ckpt.runtime.objects.staged.DEFAULT_PART_NBYTES"
    monkeypatch.setattr(staged, 256 << 10)
    with registered_bucket() as bucket:
        bucket.min_part_nbytes = 256 << 10
        yield bucket


def attach(folder: str) -> None:
    (Path(folder) / "tokenizer").mkdir()
    for name, text in (("config.json", "{}"), ("tokenizer/merges.txt", "a b")):
        (Path(folder) / name).write_text(text)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """One copy over two nodes."""
    NodeState(FULL, {"w": 0, "o": 1}).save(
        tmp_path / "saved",
        NODES,
        copies=1,
        step=3,
        extra={"bytes": bytes(9000)},
        rank_extra=lambda rank: f"rank {rank}",
        attach=attach,
    )
    return tmp_path / "saved"


def merge(saved: Path, root: str, **options: Any) -> list[CopyReport | BaseException]:
    """Merge with the folder of each rank's node."""
    settings = {"max_file_bytes": 1 << 20, "if_exists": "keep", "timeout_seconds": SECONDS}
    merge_options = MergeOptions(**{**settings, **options})

    def act(comm: Comm) -> CopyReport:
        paths = [str(folder_of(saved, NODES[comm.rank]))]
        topology = Topology.shared_folder(comm.rank, NODES)
        return merge_paths(comm, paths, open_root(root), NAME, merge_options, topology=topology)

    return try_ranks(len(NODES), act)


def comparable(bodies: Mapping[str, bytes]) -> dict[str, Any]:
    """The files, with a manifest without what differs between a bucket and a disk."""
    manifest = json.loads(bodies[names.MANIFEST])
    for field in ("etags", "url", "crc"):
        manifest.pop(field, None)
    return {**bodies, names.MANIFEST: manifest}


def bodies_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("max_file_bytes", [1 << 20, 1 << 30])
def test_bucket_has_the_files_of_a_disk(
    bucket: MemoryBucket, saved: Path, tmp_path: Path, max_file_bytes: int
) -> None:
    (tmp_path / "root").mkdir()
    on_disk = fine(merge(saved, str(tmp_path / "root"), max_file_bytes=max_file_bytes))
    in_bucket = fine(merge(saved, ROOT, max_file_bytes=max_file_bytes))
    uploaded = folder_bodies(bucket, f"run/{NAME}")
    assert comparable(uploaded) == comparable(bodies_of(tmp_path / "root" / NAME))
    assert {report.save_id for report in in_bucket} == {report.save_id for report in on_disk}
    assert sum(report.nbytes for report in in_bucket) == sum(report.nbytes for report in on_disk)
    assert bucket.open_uploads() == []
    assert uc.verify(f"{ROOT}/{NAME}", deep=True).ok
    before = bucket.bodies()
    again = fine(merge(saved, ROOT, if_exists="error"))
    assert {report.nbytes for report in again} == {0}, "the save is there"
    assert bucket.bodies() == before


def test_failure_on_one_rank_leaves_nothing(bucket: MemoryBucket, saved: Path) -> None:
    failed: list[str] = []

    def fail(verb: str, key: str) -> None:
        if verb == "put_part" and "model-" in key:
            failed.append(key)
            raise uc.StorageError(f"{key}: put_part 1: got 503 four times")

    connect(bucket, before=fail)
    same_error(merge(saved, ROOT), uc.StorageError, "got 503 four times")
    assert failed != []
    assert bucket.bodies() == {}
    assert bucket.open_uploads() == []
    connect(bucket)
    fine(merge(saved, ROOT))
    assert uc.verify(f"{ROOT}/{NAME}", deep=True).ok


def test_cancelled_merge_leaves_nothing(bucket: MemoryBucket, saved: Path) -> None:
    def cancel(_: int) -> None:
        raise uc.StorageError("cancelled")

    same_error(merge(saved, ROOT, on_progress=cancel), uc.StorageError, "cancelled")
    assert bucket.bodies() == {}
    assert bucket.open_uploads() == []

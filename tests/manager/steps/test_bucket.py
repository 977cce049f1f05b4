"""Scans of a root in a bucket: fixed keys decide, listings are hints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.manager.buckets import (
    ROOT,
    deny,
    leave_unfinished,
    root_storage,
    save_to_bucket,
    store,
)
from tests.support.objects.memory import MemoryStore
from unified_ckpt.format import names
from unified_ckpt.manager.steps.diagnose import diagnose
from unified_ckpt.manager.steps.scan import check_run_root, other_checkpoints, scan
from unified_ckpt.runtime.objects.storage import ObjectStorage

__all__ = ["store"]  # a fixture


def test_scan_of_a_bucket_equals_that_of_a_disk(store: MemoryStore, tmp_path: Path) -> None:
    save_to_bucket(2, 10, 1)
    save_to_bucket(3, root=str(tmp_path))
    scanned = scan(root_storage(store), "checkpoint-")
    assert [(record.step, record.status) for record in scanned.steps] == [
        (1, "complete"),
        (2, "complete"),
        (10, "complete"),
    ]
    record = scanned.steps[0]
    assert record.path == f"{ROOT}/checkpoint-1"
    assert record.parts == ("model", "optimizer")
    assert record.full
    prefix = "run/checkpoint-1/"
    bodies = store.bucket.bodies()
    sizes = [len(body) for key, body in bodies.items() if key.startswith(prefix)]
    assert (record.nbytes, record.files) == (sum(sizes), len(sizes))
    assert scanned.commits == scanned.stale_folders == ()
    assert diagnose(record) == ""


def test_newest_step_is_read_before_listings_show_it(store: MemoryStore) -> None:
    now = [0.0]
    store.bucket.clock = lambda: now[0]
    store.bucket.list_delay_seconds = 5.0
    save_to_bucket(1)
    now[0] = 10.0
    save_to_bucket(2)
    steps = scan(root_storage(store), "checkpoint-").complete
    assert [record.step for record in steps] == [1, 2]
    assert [diagnose(record) for record in steps] == ["", ""]


def test_removed_step_is_gone_before_listings_show_it(store: MemoryStore) -> None:
    now = [0.0]
    store.bucket.clock = lambda: now[0]
    save_to_bucket(1, 2)
    now[0] = 10.0
    store.bucket.list_delay_seconds = 5.0
    for key in store.bucket.bodies():
        if key.startswith("run/checkpoint-2/"):
            store.delete(key)
    assert [record.name for record in scan(root_storage(store), "checkpoint-").steps] == [
        "checkpoint-1"
    ]


def test_scan_lists_the_root_once(store: MemoryStore) -> None:
    save_to_bucket(1, 2)
    requests: list[tuple[str, str]] = []
    store.before = lambda verb, key: requests.append((verb, key))
    scan(root_storage(store), "checkpoint-")
    assert requests[:1] == [("list", "run/")]
    assert sorted(verb for verb, _ in requests) == sorted(
        ["list", "get", "get"] + ["get", "list"] * 2  # the newest step and its record; each step
    )


@pytest.mark.parametrize("body", [None, b"x"])
def test_a_missing_or_replaced_file_is_told(store: MemoryStore, body: bytes | None) -> None:
    save_to_bucket(1)
    key = "run/checkpoint-1/model.safetensors"
    size = len(store.bucket.bodies()[key])
    if body is None:
        store.delete(key)
    else:
        store.put(key, body * size)
    (record,) = scan(root_storage(store), "checkpoint-").steps
    problem = record.problem or diagnose(record)
    assert problem == (
        "model.safetensors is missing" if body is None else "model.safetensors was replaced"
    )


def test_unfinished_commit_is_listed(store: MemoryStore) -> None:
    save_to_bucket(1)
    leave_unfinished(store, 2)
    scanned = scan(root_storage(store), "checkpoint-")
    assert [record.step for record in scanned.complete] == [1]
    (commit,) = scanned.commits
    assert (commit.name, commit.step) == ("checkpoint-2", 2)
    assert str(commit) == (
        f"{ROOT}/checkpoint-2: the commit of save {commit.save_id} (step 2) is unfinished; "
        "a restore of its run or `unified-ckpt prune s3://bucket/run --stale` finishes it"
    )
    named = {record.name: record for record in scanned.steps}
    assert "is unfinished" in named["checkpoint-2"].problem
    assert named["checkpoint-2"].unreadable  # it is never removed as a broken folder


def test_invalid_commit_record_is_listed(store: MemoryStore) -> None:
    store.put(f"run/{names.commit_name('checkpoint-2')}", b"{")
    (commit,) = scan(root_storage(store), "checkpoint-").commits
    assert "its record is invalid" in str(commit)


def test_claim_of_a_save_is_no_commit(store: MemoryStore) -> None:
    store.put(f"run/{names.commit_name('checkpoint-2')}", b'{"claimed_by": "ab"}')
    assert scan(root_storage(store), "checkpoint-").commits == ()


def test_uploads_of_a_save_are_stale(store: MemoryStore) -> None:
    store.put(f"run/{names.uploads_name('checkpoint-2', 'ab')}", b"{}")
    (stale,) = scan(root_storage(store), "checkpoint-").stale_folders
    assert (stale.kind, stale.checkpoint_name) == ("uploads", "checkpoint-2")
    assert 0 <= stale.age_seconds < 60


def test_scan_raises_what_the_bucket_denies(store: MemoryStore) -> None:
    save_to_bucket(1)
    store.before = deny("get", keys=names.MANIFEST)
    with pytest.raises(uc.StorageError, match="AccessDenied"):
        scan(root_storage(store), "checkpoint-")


def test_checkpoints_of_other_names_are_listed(store: MemoryStore) -> None:
    save_to_bucket(1)
    uc.save(f"{ROOT}/final", model={"a": torch.zeros(2)})
    (other,) = other_checkpoints(ROOT, "checkpoint-", known=())
    assert (other.name, other.status) == ("final", "misnamed")


def test_root_that_is_a_checkpoint_is_refused(store: MemoryStore) -> None:
    save_to_bucket(1)
    with pytest.raises(uc.OptionError, match=f"pass {ROOT}"):
        check_run_root(f"{ROOT}/checkpoint-1")


def test_whole_bucket_is_a_root(store: MemoryStore) -> None:
    save_to_bucket(1, root="s3://bucket")
    (record,) = scan(ObjectStorage(store, ""), "checkpoint-").steps
    assert (record.path, record.status) == ("s3://bucket/checkpoint-1", "complete")

"""Removal from a bucket: never another save, never half of one, and ended after a crash."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.manager.buckets import (
    ROOT,
    Killed,
    leave_unfinished,
    root_storage,
    save_to_bucket,
    store,
)
from tests.support.manager.managers import state
from tests.support.objects.memory import MemoryStore
from unified_ckpt.format import names
from unified_ckpt.format.commit import UploadsRecord, encode_record
from unified_ckpt.manager.steps.remove import remove, remove_all, remove_broken
from unified_ckpt.manager.steps.scan import read_step_record, scan

__all__ = ["store"]  # a fixture


def save_id(store: MemoryStore, step: int) -> str:
    record = read_step_record(root_storage(store), f"checkpoint-{step}", "checkpoint-")
    return record.save_id or ""


def files_of(store: MemoryStore, step: int) -> list[str]:
    prefix = f"run/checkpoint-{step}/"
    keys = store.bucket.bodies()
    return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]


def values_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    targets = {
        kind: {n: torch.zeros_like(t) for n, t in named.items()}
        for kind, named in state(step).items()
    }
    uc.load(f"{ROOT}/checkpoint-{step}", **targets)
    return targets


def test_removal_leaves_the_files_of_users(store: MemoryStore) -> None:
    save_to_bucket(1, 2)
    store.put("run/checkpoint-1/notes.txt", b"mine")
    assert remove(root_storage(store), "checkpoint-1", save_id=save_id(store, 1))
    assert files_of(store, 1) == ["notes.txt"]
    assert values_of(2)["model"]["b"][0] == 2
    assert not [key for key in store.bucket.bodies() if "removal" in key]


def test_removal_of_the_newest_step_forgets_it(store: MemoryStore) -> None:
    save_to_bucket(1, 2)
    assert remove(root_storage(store), "checkpoint-2", save_id=save_id(store, 2))
    assert f"run/{names.NEWEST}" not in store.bucket.bodies()
    save_to_bucket(3)
    assert remove(root_storage(store), "checkpoint-1", save_id=save_id(store, 1))
    assert f"run/{names.NEWEST}" in store.bucket.bodies()


def test_another_save_is_not_removed(store: MemoryStore) -> None:
    save_to_bucket(1)
    before = store.bucket.bodies()
    assert not remove(root_storage(store), "checkpoint-1", save_id="another")
    assert not remove(root_storage(store), "checkpoint-9", save_id="another")
    assert store.bucket.bodies() == before


def test_name_with_a_commit_or_young_uploads_is_skipped(store: MemoryStore) -> None:
    save_to_bucket(1, 2)
    marker = f"run/{names.uploads_name('checkpoint-1', 'ab')}"
    store.put(marker, encode_record(UploadsRecord(run_id="", save_id="0" * 16, uploads={})))
    id_2 = save_id(store, 2)
    leave_unfinished(store, 2, options=uc.SaveOptions(if_exists="replace"), verb="stat")
    before = store.bucket.bodies()
    removed, remaining = remove_all(
        root_storage(store), {"checkpoint-1": save_id(store, 1), "checkpoint-2": id_2}
    )
    assert removed == []
    assert set(remaining) == {"checkpoint-1", "checkpoint-2"}
    assert "a save of this name is not finished" in remaining["checkpoint-1"]
    assert store.bucket.bodies() == before
    store.bucket.versions[marker][-1].stat = type(store.stat(marker) or object)(2, "", 0.0)  # old
    assert remove(root_storage(store), "checkpoint-1", save_id=save_id(store, 1))


def test_crash_at_any_request_leaves_all_or_nothing(store: MemoryStore) -> None:
    """And the next removal ends it, unless nothing was removed yet."""
    for stop in range(1, 100):
        save_to_bucket(1)
        ours, count = save_id(store, 1), [0]

        def kill(verb: str, key: str, stop: int = stop, count: list[int] = count) -> None:
            count[0] += 1
            if count[0] == stop:
                raise Killed

        store.before = kill
        try:
            finished = remove(root_storage(store), "checkpoint-1", save_id=ours)
        except Killed:
            finished = False
        store.before = None
        if names.MANIFEST in files_of(store, 1):
            assert values_of(1)["model"]["b"][0] == 1
            assert remove(root_storage(store), "checkpoint-1", save_id=ours)
        remove_all(root_storage(store), {})
        assert files_of(store, 1) == []
        assert [key for key in store.bucket.bodies() if "removal" in key] == []
        if finished:
            assert stop > 10
            return
    raise AssertionError("it never finished")


OTHER = {"model": {"a": torch.ones(7)}, "optimizer": {"a/exp_avg": torch.ones(7)}}


@pytest.mark.parametrize("values", [state(1), OTHER], ids=["same", "other"])
def test_removal_that_sleeps_leaves_the_next_save(
    store: MemoryStore, values: dict[str, dict[str, torch.Tensor]]
) -> None:
    """With the same values, the next save has files of the same ETags. Then a sleep between the
    check of a file and its deletion, which no store makes one, is left out.
    """
    for stop in range(1, 100):
        save_to_bucket(1)
        ours, requests, saved = save_id(store, 1), list[str](), list[int]()

        def save_again(
            verb: str, key: str, stop: int, requests: list[str], saved: list[int]
        ) -> None:
            requests.append(verb)
            is_file = key.endswith((".safetensors", ".index.json"))
            is_deletion = verb == "delete" or (verb == "stat" and is_file)
            if len(requests) == stop and not (is_deletion and values is not OTHER):
                save_to_bucket(1, options=uc.SaveOptions(if_exists="replace"), **values)
                saved.append(stop)

        hook = partial(save_again, stop=stop, requests=requests, saved=saved)
        sleeper = root_storage(MemoryStore(store.bucket, before=hook))
        remove(sleeper, "checkpoint-1", save_id=ours)
        if len(requests) < stop:
            assert stop > 10
            return
        assert not saved or uc.verify(f"{ROOT}/checkpoint-1", deep=True).ok
        for key in store.bucket.bodies():
            store.delete(key)
    raise AssertionError("it never finished")


def test_copy_from_a_disk_is_removed(store: MemoryStore, tmp_path: Path) -> None:
    """Its manifest names no ETags."""
    folder = tmp_path / "checkpoint-1"
    save_to_bucket(1, root=str(tmp_path))
    for file in folder.iterdir():
        store.put(f"run/checkpoint-1/{file.name}", file.read_bytes())
    assert remove(root_storage(store), "checkpoint-1", save_id=save_id(store, 1))
    assert files_of(store, 1) == []


def test_broken_folder_is_removed_as_it_was_seen(store: MemoryStore) -> None:
    save_to_bucket(1)
    store.delete(f"run/checkpoint-1/{names.MANIFEST}")
    (record,) = scan(root_storage(store), "checkpoint-").steps
    store.put("run/checkpoint-1/more", b"")
    assert not remove_broken(root_storage(store), record, "checkpoint-")
    store.delete("run/checkpoint-1/more")
    assert remove_broken(root_storage(store), record, "checkpoint-")
    assert files_of(store, 1) == []

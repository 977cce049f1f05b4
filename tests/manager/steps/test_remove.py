"""Removing a checkpoint: never while it is read, never another save, never half of a valid one."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.harness import FaultPoint, FaultyStorage, SimulatedCrash
from tests.support.manager.managers import (
    copy_folder,
    delete_file,
    delete_manifest,
    folders,
    manager_of,
    save_steps,
    state,
    warnings_of,
)
from unified_ckpt.engine.folder.backup import delete_checkpoint
from unified_ckpt.format import names
from unified_ckpt.manager.steps import remove as removal
from unified_ckpt.manager.steps.remove import remove, remove_broken
from unified_ckpt.manager.steps.scan import read_step_record, scan
from unified_ckpt.runtime.storage.locks import shared_lock
from unified_ckpt.runtime.storage.storage import LocalStorage


def id_of(root: Path, name: str) -> str:
    return {
        record.name: record.save_id or ""
        for record in scan(LocalStorage(str(root)), "checkpoint-").steps
    }[name]


def _hold_shared_lock(
    folder: str, ready: multiprocessing.synchronize.Event, end: multiprocessing.synchronize.Event
) -> None:
    with shared_lock(folder):
        ready.set()
        end.wait(60)


def test_remove_waits_for_a_reader_in_another_process(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    spawn = multiprocessing.get_context("fork")
    ready, end = spawn.Event(), spawn.Event()
    reader = spawn.Process(
        target=_hold_shared_lock, args=(str(tmp_path / "checkpoint-1"), ready, end)
    )
    reader.start()
    assert ready.wait(60)
    assert not remove(
        LocalStorage(str(tmp_path)), "checkpoint-1", save_id=id_of(tmp_path, "checkpoint-1")
    )
    end.set()
    reader.join()
    assert remove(
        LocalStorage(str(tmp_path)), "checkpoint-1", save_id=id_of(tmp_path, "checkpoint-1")
    )


def test_fork_during_a_read_keeps_no_lock(tmp_path: Path) -> None:
    """As a worker of a data loader that starts while another thread uploads the checkpoint."""
    save_steps(tmp_path, 1)
    context = multiprocessing.get_context("fork")
    end = context.Event()
    worker = context.Process(target=end.wait, args=(60,))
    with shared_lock(str(tmp_path / "checkpoint-1")):
        worker.start()
    assert remove(
        LocalStorage(str(tmp_path)), "checkpoint-1", save_id=id_of(tmp_path, "checkpoint-1")
    )
    end.set()
    worker.join()


def test_remove_keeps_another_save_of_the_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    old = id_of(tmp_path, "checkpoint-1")
    uc.save(
        tmp_path / "checkpoint-1", model={}, step=1, options=uc.SaveOptions(if_exists="replace")
    )
    assert not remove(LocalStorage(str(tmp_path)), "checkpoint-1", save_id=old)
    assert uc.verify(tmp_path / "checkpoint-1").ok


def test_remove_keeps_a_folder_without_manifest(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "optimizer.pt").write_bytes(b"x")
    assert not remove(LocalStorage(str(tmp_path)), "checkpoint-1", save_id="x")
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").exists()
    with shared_lock(str(tmp_path / "checkpoint-1")), shared_lock("memory://nowhere"):
        pass


def test_open_after_removal_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)
    manifest, moved = tmp_path / "checkpoint-1" / names.MANIFEST, tmp_path / "moved"
    real = os.open

    def slow(path: str, flags: int, *, dir_fd: int | None = None) -> int:
        fd = real(path, flags, dir_fd=dir_fd)
        if path == str(manifest):
            manifest.rename(moved)
        return fd

    monkeypatch.setattr(os, "open", slow)
    with (
        pytest.raises(uc.NotFoundError, match="was removed while it was opened"),
        shared_lock(str(tmp_path / "checkpoint-1")),
    ):
        pass


def test_remove_stopped_at_any_operation_leaves_all_or_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path / "source", 1, 2)
    fuse = FaultPoint()
    storage = FaultyStorage(str(copy_folder(tmp_path / "source", tmp_path / "counted")), fuse)
    assert remove(storage, "checkpoint-1", save_id=id_of(tmp_path / "source", "checkpoint-1"))
    order = [operation.split()[0] for operation in fuse.operations]
    assert order == ["rename", "fsync", "remove_file", "remove_folder"]
    for index in range(len(fuse.operations)):
        root = copy_folder(tmp_path / "source", tmp_path / f"root-{index}")
        with pytest.raises(SimulatedCrash, match="stopped at operation"):
            remove(
                FaultyStorage(str(root), FaultPoint(index)),
                "checkpoint-1",
                save_id=id_of(root, "checkpoint-1"),
            )
        result = scan(LocalStorage(str(root)), "checkpoint-")
        assert [record.step for record in result.complete] == ([1, 2] if index == 0 else [2])
        for record in result.complete:
            assert uc.verify(record.path, deep=True).ok
        if index:  # partly removed: renamed to a staging folder, which `prune --stale` removes
            assert [record.name for record in result.steps] == ["checkpoint-2"]
            assert len(result.stale_folders) == 1


def test_remove_folder_deletes_the_manifest_first(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    fuse = FaultPoint()
    delete_checkpoint(FaultyStorage(str(tmp_path), fuse), "checkpoint-1")
    assert [operation.split()[0] for operation in fuse.operations] == [
        "remove_file",
        "fsync",
        "remove_folder",
    ]
    assert os.listdir(tmp_path) == []


def test_remove_broken_renames_first(tmp_path: Path) -> None:
    save_steps(tmp_path / "source", 1, 2)
    delete_file(tmp_path / "source" / "checkpoint-1")
    fuse = FaultPoint()
    storage = FaultyStorage(str(copy_folder(tmp_path / "source", tmp_path / "counted")), fuse)
    assert remove_broken(
        storage, read_step_record(storage, "checkpoint-1", "checkpoint-"), "checkpoint-"
    )
    assert os.listdir(storage.root) == ["checkpoint-2"]
    assert [operation.split()[0] for operation in fuse.operations] == [
        "rename",
        "fsync",
        "remove_file",
        "remove_folder",
    ]


@pytest.mark.parametrize("manifest", [True, False])
def test_remove_broken_keeps_a_replaced_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: bool
) -> None:
    storage = LocalStorage(str(tmp_path))
    save_steps(tmp_path, 1)
    (delete_file if manifest else delete_manifest)(tmp_path / "checkpoint-1")
    record = read_step_record(storage, "checkpoint-1", "checkpoint-")
    replaces = uc.SaveOptions(if_exists="replace")
    save_steps(tmp_path, 1, options=replaces)
    assert not remove_broken(storage, record, "checkpoint-")
    assert uc.verify(tmp_path / "checkpoint-1", deep=True).ok

    def late(*arguments: Any) -> Any:  # a save commits after the check
        current = read_step_record(*arguments)
        save_steps(tmp_path, 1, options=replaces)
        return current

    (delete_file if manifest else delete_manifest)(tmp_path / "checkpoint-1")
    record = read_step_record(storage, "checkpoint-1", "checkpoint-")
    monkeypatch.setattr(removal, "read_step_record", late)
    assert not remove_broken(storage, record, "checkpoint-")
    assert uc.verify(tmp_path / "checkpoint-1", deep=True).ok


def test_remove_broken_keeps_a_folder_being_read(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    save_steps(tmp_path, 1)
    delete_file(tmp_path / "checkpoint-1")
    with shared_lock(str(tmp_path / "checkpoint-1")):
        assert not remove_broken(
            storage, read_step_record(storage, "checkpoint-1", "checkpoint-"), "checkpoint-"
        )
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()


def test_partly_removed_checkpoint_is_removed_by_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / ".unified-ab-checkpoint-9").mkdir()  # another save may be writing it

    def busy(self: LocalStorage, name: str) -> None:
        raise uc.StorageError(f"{self.path(name)}: remove failed: {os.strerror(errno.EBUSY)}")

    monkeypatch.setattr(LocalStorage, "remove_folder", busy)
    with manager_of(None, tmp_path, keep_latest=1, interval_steps=1) as manager:
        manager.save(2, **state(2))
        (trash,) = (name for name in os.listdir(tmp_path) if name.startswith(".unified-trash_"))
        assert trash.endswith("-checkpoint-1")
        (warned,) = warnings_of(caplog)
        assert warned.startswith(
            f"{tmp_path / trash} cannot be removed yet: it is a partly removed checkpoint: "
        )
        manager.save(3, **state(3))  # the removal fails and warns again
        assert len(warnings_of(caplog)) == 3
    monkeypatch.undo()
    with manager_of(None, tmp_path, keep_latest=1, interval_steps=1) as manager:  # the next run
        manager.save(4, **state(4))
    assert folders(tmp_path) == ["checkpoint-4", ".unified-ab-checkpoint-9"]

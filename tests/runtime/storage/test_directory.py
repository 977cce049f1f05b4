"""A handle reads one folder, even if another takes its name."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.storage.regular_files import file_size
from unified_ckpt.runtime.storage.storage import LocalStorage


@pytest.fixture
def pinned(tmp_path: Path) -> LocalStorage:
    """A storage with a handle of a folder whose name another folder has taken."""
    for name in ("first", "second"):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / name).touch()
        (tmp_path / name / "f").write_text(name)
    storage = LocalStorage(str(tmp_path / "first"))
    storage.open_handle()
    assert not storage.directory.was_replaced()
    (tmp_path / "first").rename(tmp_path / "former")
    (tmp_path / "second").rename(tmp_path / "first")
    return storage


def read(storage: LocalStorage) -> bytes:
    contents = bytearray(5)
    storage.read_at("f", 0, memoryview(contents))
    return bytes(contents)


def test_open_handle_reads_the_same_folder(pinned: LocalStorage) -> None:
    with pinned:
        pinned.close()
        assert pinned.directory.was_replaced()
        assert pinned.names() == ["below", "f", "first"]
        assert (pinned.read("f"), read(pinned)) == (b"first", b"first")
        assert (pinned.size("first"), pinned.size("second")) == (0, None)
        assert [pinned.kind(name) for name in ("", "below", "f", "second")] == [
            "folder",
            "folder",
            "file",
            None,
        ]
        assert pinned.entries("below") == []
        stamp = pinned.version_token("f")
        assert stamp[0] == os.stat(Path(pinned.root).with_name("former") / "f").st_ino
    pinned.directory.close()


def test_folder_below_a_file_was_replaced(pinned: LocalStorage) -> None:
    below = LocalStorage(f"{pinned.root}/below")
    below.open_handle()
    Path(pinned.root).rename(f"{pinned.root}-moved")
    Path(pinned.root).touch()
    assert below.directory.was_replaced()
    below.directory.close()


def test_closed_directory_reads_nothing(pinned: LocalStorage) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        pinned.directory.close()
        assert len(os.listdir("/proc/self/fd")) == before - 1
    with pytest.raises(StorageError, match="f: open failed: Bad file descriptor"):
        read(pinned)
    with pytest.raises(StorageError, match="f: read failed: Bad file descriptor"):
        pinned.read("f")
    with LocalStorage(pinned.root) as storage:  # without a handle: by name
        assert (read(storage), storage.directory.was_replaced()) == (b"secon", False)


def test_open_handle_of_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "gone"):
        with pytest.raises(NotFoundError, match=f"{name}: open: no such file or folder"):
            LocalStorage(str(tmp_path / name)).open_handle()


@pytest.mark.parametrize("depth", [1, 2])
def test_absence_counts_once_the_folder_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """NFS remembers absent names until their folder is opened, and so on for the folder's own."""
    path = tmp_path / "run" / "file"
    path.parent.mkdir()
    path.write_bytes(b"123")
    absent = {str(path), str(path.parent)} if depth == 2 else {str(path)}
    real_stat, real_open = os.stat, os.open

    def check(name: Any) -> None:
        if str(name) in absent:
            raise FileNotFoundError(errno.ENOENT, "remembered as absent", str(name))

    def cached_stat(name: Any, **options: Any) -> os.stat_result:
        check(name)
        return real_stat(name, **options)

    def cached_open(name: Any, *arguments: Any, **options: Any) -> int:
        check(name)
        absent.difference_update([each for each in absent if os.path.dirname(each) == str(name)])
        return real_open(name, *arguments, **options)

    monkeypatch.setattr(os, "stat", cached_stat)
    monkeypatch.setattr(os, "open", cached_open)
    assert file_size(str(path)) == 3
    assert not absent
    assert file_size(str(path) + ".other") is None

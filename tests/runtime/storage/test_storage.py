from __future__ import annotations

import errno
import os
import resource
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.storage import regular_files as rf
from unified_ckpt.runtime.storage.paths import is_url
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.storage.remote import RemoteStorage
from unified_ckpt.runtime.storage.roots import open_reader
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BULK, FOREGROUND, WritePolicy


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStorage]:
    with LocalStorage(str(tmp_path)) as storage:
        yield storage


def views(*pieces: bytes) -> list[memoryview]:
    return [memoryview(piece) for piece in pieces]


# both kinds


@pytest.fixture(params=["local", "file url", "memory url"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    """A folder with a file of 256 bytes, an empty one, and a folder in it."""
    if request.param == "memory url":
        url = f"memory://{uuid.uuid4().hex}/checkpoint"
        files: Any = fsspec.filesystem("memory")
        files.pipe({f"{url}/bytes": bytes(range(256)), f"{url}/empty": b"", f"{url}/sub/one": b"1"})
    else:
        (tmp_path / "bytes").write_bytes(bytes(range(256)))
        (tmp_path / "empty").write_bytes(b"")
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "one").write_bytes(b"1")
        url = str(tmp_path) if request.param == "local" else f"file://{tmp_path}"
    storage = open_reader(url)
    yield storage
    storage.close()


def test_files_are_read(filled: Reader) -> None:
    into = bytearray(300)
    filled.read_at("bytes", 10, memoryview(into)[20:50])
    assert into == bytes(20) + bytes(range(10, 40)) + bytes(250)
    filled.read_at("bytes", 0, memoryview(into)[:256])
    assert into[:256] == bytes(range(256))
    filled.read_at("sub/one", 0, memoryview(into)[:1])
    assert into[0] == ord("1")
    filled.read_at("bytes", 256, memoryview(bytearray(0)))  # nothing, at the end
    assert (filled.read("bytes"), filled.read("empty")) == (bytes(range(256)), b"")
    assert (filled.size("bytes"), filled.size("empty"), filled.size("none")) == (256, 0, None)
    assert filled.names() == ["bytes", "empty", "sub"]


def test_missing_bytes_and_files_are_errors(filled: Reader) -> None:
    for name, start, nbytes in (("bytes", 250, 7), ("empty", 0, 1)):
        with pytest.raises(StorageError, match=rf"{name}: .*expected"):
            filled.read_at(name, start, memoryview(bytearray(nbytes)))
    with pytest.raises(NotFoundError, match=r"none: read: no such file"):
        filled.read("none")
    with pytest.raises(NotFoundError, match=r"none: (open|read): no such file"):
        filled.read_at("none", 0, memoryview(bytearray(1)))


def test_paths_and_urls(tmp_path: Path) -> None:
    assert [is_url(p) for p in ("/a/b", "a", "file:///a", "s3://a/b", "memory://a")] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert isinstance(open_reader(f"file://{tmp_path}"), LocalStorage)
    assert isinstance(open_reader("memory://a"), RemoteStorage)


def test_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"gone: list: no such file or folder"):
        LocalStorage(str(tmp_path / "gone")).names()
    with pytest.raises(NotFoundError, match=r"gone/?: list: no such file"):
        RemoteStorage(f"memory://{uuid.uuid4().hex}/gone").names()


# writing


def test_buffers_follow_each_other(local: LocalStorage, tmp_path: Path) -> None:
    local.write_at("f", 5, views(b"ab", b"", b"cde"))
    local.write_at("f", 0, views(b"01234"))
    local.resize("f", 12)
    local.sync("f")
    assert (tmp_path / "f").read_bytes() == b"01234abcde\0\0"
    pieces = [bytes([i % 251]) * (i % 5) for i in range(5000)]  # more than a system call takes
    local.write_at("g", 3, views(*pieces))
    assert (tmp_path / "g").read_bytes() == bytes(3) + b"".join(pieces)
    local.resize("h", 4)
    assert (tmp_path / "h").read_bytes() == bytes(4)


@pytest.mark.parametrize("most", [1, 7, 100])
def test_short_writes_continue(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.pwritev

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [memoryview(b"".join(buffers)[:most])], offset)

    monkeypatch.setattr(os, "pwritev", short)
    local.write_at("f", 2, views(b"abcdefg", b"hi", b"jklmnopqrstuvw"))
    assert (tmp_path / "f").read_bytes() == b"\0\0abcdefghijklmnopqrstuvw"


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSPC])
def test_uncached_writes_fall_back_to_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Where the file system has none; a full disk is an error."""
    real, refused = os.pwritev, list[int]()

    def cached(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            refused.append(offset)
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", cached)
    monkeypatch.setattr("unified_ckpt.runtime.storage.storage.supports_uncached", lambda _: True)
    with LocalStorage(str(tmp_path), write_policy=WritePolicy(4, uncached=True)) as storage:
        if number == errno.ENOSPC:
            with pytest.raises(StorageError, match=r"f: write at byte 0 failed: .*space"):
                storage.write_at("f", 0, views(b"abc"))
            return
        storage.write_at("f", 0, views(b"abcdefg", b"hi"))
    assert (tmp_path / "f").read_bytes() == b"abcdefghi"
    assert refused == [0], "asked once"


def test_uncached_writes_keep_neighbours_in_a_page(tmp_path: Path) -> None:
    """Two storages stand for two processes: each opens the file itself."""
    whole, step = os.urandom(3 << 20), 1000
    with (
        LocalStorage(str(tmp_path), write_policy=BULK) as front,
        LocalStorage(str(tmp_path), write_policy=BULK) as back,
    ):

        def write(storage: LocalStorage, first: int) -> None:
            for start in range(first, len(whole), 2 * step):
                storage.write_at("f", start, views(whole[start : start + step]))
            storage.sync("f")

        threads = [
            threading.Thread(target=write, args=arguments)
            for arguments in ((front, 0), (back, step))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (tmp_path / "f").read_bytes() == whole


@pytest.mark.parametrize("most", [1, 7, 100])
def test_short_reads_continue(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    (tmp_path / "f").write_bytes(bytes(range(200)))
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:most]], offset)
    )
    into = bytearray(150)
    local.read_at("f", 20, memoryview(into))
    assert into == bytes(range(20, 170))


def test_sync_closes_and_writing_may_go_on(local: LocalStorage, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for i in range(20):
        local.write_at(f"f{i}", 0, views(b"x"))
        local.start_flush(f"f{i}", 0, 1)
        local.sync(f"f{i}")
    local.start_flush("never opened", 0, 1)
    local.sync("")
    assert len(os.listdir("/proc/self/fd")) <= before
    local.write_at("f3", 1, views(b"y"))
    assert (tmp_path / "f3").read_bytes() == b"xy"
    local.read_at("f4", 0, memoryview(bytearray(1)))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    for _ in range(2):
        local.close()
        assert len(os.listdir("/proc/self/fd")) <= before
    assert not (tmp_path / "never opened").exists()
    (tmp_path / "g").write_bytes(b"of another process")
    local.sync("g")
    with pytest.raises(NotFoundError, match="lost"):
        local.sync("lost")
    assert not (tmp_path / "lost").exists()


def test_a_full_disk_is_an_error() -> None:
    with (
        LocalStorage("/dev") as storage,
        pytest.raises(StorageError, match=r"^/dev/full: write at byte 0 failed: No space left"),
    ):
        storage.write_at("full", 0, views(b"x"))


def test_write_error_names_the_byte_reached(local: LocalStorage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match=r"f: write at byte 1000 failed: File too large"):
            local.write_at("f", 0, views(bytes(900), bytes(900)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        LocalStorage(str(tmp_path)) as storage,
        pytest.raises(StorageError, match=r"open failed: Permission denied"),
    ):
        storage.write_at("f", 0, views(b"x"))
    tmp_path.chmod(0o700)


MISSING = "no such file or folder"
ERRORS: dict[str, Callable[[LocalStorage], object]] = {
    f"gone/f: open: {MISSING}": lambda local: local.write_at("gone/f", 0, views(b"x")),
    f"file/f: open: {MISSING}": lambda local: local.write_at("file/f", 0, views(b"x")),
    f"file/d: make folder: {MISSING}": lambda local: local.make_folder("file/d"),
    "link: open failed: Too many levels": lambda local: local.write_at("link", 0, views(b"x")),
    "link: open failed: Too many levels of": lambda local: local.resize("link", 0),
    "loop: .*Too many levels of symbolic links": lambda local: local.size("loop"),
    "d: make folder failed: File exists": lambda local: local.make_folder("d"),
    f"d: exchange with .*b: {MISSING}": lambda local: local._exchange("d", "b"),
    f"none: remove: {MISSING}": lambda local: local.remove_folder("none"),
    f"nothing: remove: {MISSING}": lambda local: local.remove_file("nothing"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_failed_operation_is_named(local: LocalStorage, tmp_path: Path, text: str) -> None:
    """Links are never written through."""
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    local.make_folder("d")
    kind = NotFoundError if MISSING in text else (StorageError, NotFoundError)
    with pytest.raises(kind, match=text):
        ERRORS[text](local)
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert local.size("file/f") is None


# folders


def test_folders_are_renamed_exchanged_and_removed(local: LocalStorage, tmp_path: Path) -> None:
    for name in ("a", "b"):
        local.make_folder(name)
        local.write_at(f"{name}/was-{name}", 0, views(b"x"))
    local.rename("a", "c")
    assert local.entries("") == ["b", "c"]
    if local._exchange("b", "c"):
        assert [local.entries(name) for name in ("b", "c")] == [["was-a"], ["was-b"]]
    local.remove_folder("b")
    local.remove_file(f"c/{local.entries('c')[0]}")
    assert (local.names(), local.entries("c")) == (["c"], [])


@pytest.mark.parametrize("kind", ["file", "full folder", "empty folder", "dangling link"])
def test_rename_to_an_existing_name_is_an_error(
    local: LocalStorage, tmp_path: Path, kind: str
) -> None:
    local.make_folder("a")
    if kind == "dangling link":
        (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    elif kind == "file":
        (tmp_path / "b").write_bytes(b"")
    else:
        (tmp_path / "b").mkdir()
        if kind == "full folder":
            (tmp_path / "b" / "f").write_bytes(b"")
    with pytest.raises(StorageError, match=r"b: exists; rename needs an unused name"):
        local.rename("a", "b")
    assert (tmp_path / "a").is_dir()


def test_sync_tree_syncs_everything(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_bytes(b"x")
    (tmp_path / "g").write_bytes(b"y")
    (tmp_path / "d" / "link").symlink_to("/nowhere")
    synced = []

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}").removeprefix(str(tmp_path)))

    monkeypatch.setattr(os, "fsync", noted)
    local.sync_tree("d")
    local.sync_tree("g")
    assert synced == ["/d/e/f", "/d/e", "/d", "/g"], (
        "files before their folder; links are left alone"
    )


@pytest.mark.parametrize("fsync", [True, False])
def test_rename_syncs_what_was_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    """Before the rename what it moves, and the new folders above its new name; then both parents.
    Nothing elsewhere.
    """
    calls, rename = [], LocalStorage._rename
    record = lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: E731
    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(
        LocalStorage, "_rename", lambda *names: (calls.append("rename"), rename(*names))
    )
    policy = replace(FOREGROUND, fsync=fsync)
    with LocalStorage(str(tmp_path), write_policy=policy) as storage:
        for folder in ("d", "d/e", "x", "other"):
            storage.make_folder(folder)
        for file in ("d/f", "d/e/g", "other/f"):
            storage.put(file, b"f")
        storage.put("d/removed", b"r")
        storage.remove_file("d/removed")
        storage.rename("d", "x/d")
        storage.rename("x/d", "d2")
    syncs = ["d/f", "d/e/g", "d/e", "d", ".", "rename", "x", ".", "rename", ".", "x"]
    expected = [call if call == "rename" else str(tmp_path / call) for call in syncs]
    assert calls == (expected if fsync else ["rename", "rename"])
    assert (tmp_path / "d2" / "e" / "g").read_bytes() == b"f"


@pytest.mark.parametrize("backup", ["", "n-before-1", ".n"])
@pytest.mark.parametrize("exchanges", [True, False])
def test_rename_that_cannot_be_synced_changes_nothing(
    local: LocalStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backup: str,
    exchanges: bool,
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if not exchanges:
        monkeypatch.setattr(LocalStorage, "_exchange", lambda *_: False)
    for name in (".new", "n") if backup else (".new",):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"was {name}").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="fsync failed: Input/output error"):
            local.rename(".new", "n", backup=backup)
    assert sorted(tmp_path.rglob("*")) == before
    local.rename(".new", "n", backup=backup)
    assert (tmp_path / "n" / "was .new").exists()
    assert not backup or (tmp_path / backup / "was n").exists()


def test_version_token_changes_with_the_file(local: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    first = local.version_token("f")
    assert first is not None
    assert local.version_token("f") == first
    assert local.version_token("none") is None
    (tmp_path / "g").write_bytes(b"old")
    (tmp_path / "g").replace(tmp_path / "f")
    assert local.version_token("f") != first
    second = local.version_token("f")
    os.truncate(tmp_path / "f", 2)
    assert local.version_token("f") != second


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_unreadable_is_not_absent(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """A run whose checkpoint looks absent starts afresh."""

    def fail(path: Any, **_: object) -> Any:
        raise OSError(error, os.strerror(error), path)

    looks: dict[str, Callable[[str], object]] = {
        name: getattr(local, name) for name in ("kind", "size", "version_token", "read")
    }
    looks |= {
        function.__name__: lambda name, function=function: function(str(tmp_path / name))  # type: ignore[misc]
        for function in (rf.exists, rf.file_size, rf.is_file, rf.is_folder, rf.list_folder)
    }
    looks["walk"] = lambda name: list(rf.walk(str(tmp_path / name)))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for absent in ("none", "none/f", "loop", "n" * 300, "\0"):
        path = str(tmp_path / absent)
        assert not any((rf.exists(path), rf.is_file(path), rf.is_folder(path)))
        assert (rf.file_size(path), rf.list_folder(path), list(rf.walk(path))) == (None, [], [])
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        assert error != errno.EACCES or not rf.probe(rf.is_file, str(tmp_path / "f"))
        for name, look in looks.items():
            with pytest.raises(StorageError, match=os.strerror(error)) as raised:
                look("f")
            assert not isinstance(raised.value, NotFoundError), name


def test_kinds_and_entries(local: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "b").write_bytes(b"")
    (tmp_path / "d" / "a").write_bytes(b"")
    (tmp_path / "l").symlink_to(tmp_path / "d")
    assert [local.kind(name) for name in ("d", "d/a", "l", "none", "")] == [
        "folder",
        "file",
        "link",
        None,
        "folder",
    ]
    assert local.entries("d") == ["a", "b"]
    data = os.statvfs(tmp_path)
    assert 0 < local.free_nbytes() <= data.f_blocks * data.f_frsize


# elsewhere


def test_remote_errors_name_the_url() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").pipe(f"{url}/f", b"abc")
    with pytest.raises(StorageError, match=rf"^{url}/f: got 1 bytes from byte 2, expected 4$"):
        RemoteStorage(url + "/").read_at("f", 2, memoryview(bytearray(4)))

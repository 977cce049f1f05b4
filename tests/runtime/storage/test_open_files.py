"""Files kept open: a bounded number, never closed in use, never another file's."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.storage import open_files
from unified_ckpt.runtime.storage.storage import LocalStorage


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MAX_IDLE", 4)


def descriptors_below(root: Path) -> list[str]:
    """Returns the files below `root` that this process has open."""
    results = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            results.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sorted(file for file in results if file.startswith(f"{root}/"))


def close_badly(monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[], object]) -> None:
    """Runs `act` before this file is closed."""
    close = os.close

    def badly(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(path):
            act()
        close(fd)

    monkeypatch.setattr(os, "close", badly)


def put(root: Path, count: int) -> list[str]:
    root.mkdir(exist_ok=True)
    names = [f"{n}.bin" for n in range(count)]
    for n, name in enumerate(names):
        (root / name).write_bytes(bytes([n % 256]) * 64)
    return names


def read(storage: LocalStorage, name: str) -> bytes:
    results = bytearray(64)
    storage.read_at(name, 0, memoryview(results))
    return bytes(results)


def test_all_storages_share_one_bound(tmp_path: Path) -> None:
    with LocalStorage(str(tmp_path / "a")) as a, LocalStorage(str(tmp_path / "b")) as b:
        for storage in (a, b):
            for n, name in enumerate(put(Path(storage.root), 20)):
                assert read(storage, name) == bytes([n]) * 64
                storage.write_at(f"new{n}", 0, [memoryview(b"x")])
                assert len(descriptors_below(tmp_path)) <= 12
        assert len(descriptors_below(tmp_path)) == 12, (
            "4 that are read, of both, and 4 that each has written"
        )
        synced: list[None] = []
        for _ in range(2):
            a.sync_written(lambda: synced.append(None))
            assert len(synced) == 20
        for n in range(20):
            assert (tmp_path / "a" / f"new{n}").read_bytes() == b"x"
    assert descriptors_below(tmp_path) == []
    names = [f"{n}.bin" for n in range(6)]
    with LocalStorage(str(tmp_path / "a")) as storage:  # the least recently used one goes
        for name in [*names[:4], names[0], names[4], names[5]]:
            read(storage, name)
        assert descriptors_below(tmp_path) == [str(tmp_path / "a" / names[n]) for n in (0, 3, 4, 5)]


def test_file_in_use_is_not_evicted(tmp_path: Path) -> None:
    names = put(tmp_path, 16)
    storages = [LocalStorage(str(tmp_path)) for _ in range(2)]

    def act(seed: int) -> None:
        for n in range(600):
            index = (n * (2 * seed + 1) + seed) % 16
            assert read(storages[n % 2], names[index]) == bytes([index]) * 64
            if n % 97 == seed:
                storages[n % 2].close()

    with ThreadPoolExecutor(8) as pool:
        for file in [pool.submit(act, seed) for seed in range(8)]:
            file.result()
    assert len(descriptors_below(tmp_path)) <= 4
    for storage in storages:
        storage.close()
    assert descriptors_below(tmp_path) == []


def test_file_in_use_is_closed_on_release(tmp_path: Path) -> None:
    put(tmp_path, 1)
    files = open_files.OpenFiles(str(tmp_path), lambda name: os.open(tmp_path / name, os.O_RDONLY))
    with files.use("0.bin") as fd:
        files.close()
        assert os.pread(fd, 1, 0) == b"\0"
        with files.use("0.bin") as other:
            assert other != fd
    files.close()
    assert descriptors_below(tmp_path) == []


def test_hanging_open_blocks_no_other_storage(tmp_path: Path) -> None:
    names = put(tmp_path, 1)
    reached, release = threading.Event(), threading.Event()

    def hang(name: str) -> int:
        reached.set()
        assert release.wait(60)
        return os.open(tmp_path / name, os.O_RDONLY)

    def use() -> None:
        with open_files.OpenFiles(str(tmp_path), hang).use(names[0]):
            pass

    thread = threading.Thread(target=use)
    thread.start()
    assert reached.wait(60)
    with LocalStorage(str(tmp_path)) as storage:
        assert read(storage, names[0]) == bytes(64)
    release.set()
    thread.join()


def test_written_files_are_evicted_by_their_storage_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "local").mkdir()

    def hang() -> None:
        raise AssertionError("this closes the root's file, which may take for ever")

    with (
        LocalStorage(str(tmp_path / "root")) as root,
        LocalStorage(str(tmp_path / "local")) as local,
    ):
        root.write_at("x", 0, [memoryview(b"x")])
        with monkeypatch.context() as patch:
            close_badly(patch, tmp_path / "root" / "x", hang)
            for name in put(tmp_path / "local", 10):
                local.write_at(f"new-{name}", 0, [memoryview(b"x")])
                read(local, name)
                local.sync(f"new-{name}")


def test_close_error_is_raised_by_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage = LocalStorage(str(tmp_path))
    storage.write_at("x", 0, [memoryview(b"x")])
    with monkeypatch.context() as patch:
        close_badly(patch, tmp_path / "x", fail)
        for n in range(3):
            storage.write_at(f"new{n}", 0, [memoryview(b"x")])
        with pytest.raises(StorageError, match="x: close failed: No space left"):
            storage.write_at("new3", 0, [memoryview(b"x")])
    storage.close()
    assert descriptors_below(tmp_path) == [str(tmp_path / "x")], "the one that could not be closed"


def test_lost_written_file_is_not_created_again(tmp_path: Path) -> None:
    with LocalStorage(str(tmp_path)) as storage:
        for n in range(6):
            storage.write_at(f"{n}.bin", 0, [memoryview(b"x" * 64)])
        (tmp_path / "0.bin").unlink()
        for act in (
            lambda: storage.write_at("0.bin", 64, [memoryview(b"x")]),
            lambda: storage.sync("0.bin"),
        ):
            with pytest.raises(NotFoundError, match=r"0\.bin"):
                act()
        assert not (tmp_path / "0.bin").exists()


def test_forked_child_can_read(tmp_path: Path) -> None:
    (name,) = put(tmp_path, 1)
    with open_files.READ_CACHE.lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(0 if read(LocalStorage(str(tmp_path)), name) == bytes(64) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_replaced_folder_is_not_read_further(tmp_path: Path) -> None:
    names = [f"a/{name}" for name in put(tmp_path / "a", 6)]
    with LocalStorage(str(tmp_path)) as storage:
        for name in names:
            read(storage, name)
        os.rename(tmp_path / "a", tmp_path / "old")
        put(tmp_path / "a", 6)
        assert read(storage, names[5]) == bytes([5]) * 64, "it is open still"
        with pytest.raises(StorageError, match=r"a/0\.bin: another process replaced its folder"):
            read(storage, names[0])
        storage.close()
        assert read(storage, names[0]) == bytes(64)
        with pytest.raises(NotFoundError):
            read(storage, "absent")
        for name in names[1:]:
            read(storage, name)  # the first is evicted
        (tmp_path / "beside").write_bytes(b"y" * 64)
        os.replace(tmp_path / "beside", tmp_path / names[0])
        assert read(storage, names[0]) == b"y" * 64, "a repaired file in the same folder"


SCRIPT = """
import resource, sys, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
import torch.distributed.checkpoint as dcp
import unified_ckpt as uc
from unified_ckpt.options import SaveOptions

def state():
    return {f"layers.{n}.weight": torch.full((64,), float(n)) for n in range(600)}

def zeros():
    return {name: torch.zeros(64) for name in state()}

def check(loaded):
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state().items())

top = sys.argv[1]
uc.save(f"{top}/ours", model=state(), options=SaveOptions(max_file_bytes=300))
loaded = zeros()
uc.load(f"{top}/ours", model=loaded)
check(loaded)
assert uc.verify(f"{top}/ours", deep=True).ok
uc.convert(f"{top}/ours", f"{top}/again")
loaded = zeros()
uc.load(f"{top}/again", model=loaded)
check(loaded)
writer = dcp.FileSystemWriter(f"{top}/dcp", single_file_per_rank=False)
dcp.save({"model": state()}, storage_writer=writer)
loaded = zeros()
uc.load(f"{top}/dcp", model=loaded)
check(loaded)
"""


@pytest.mark.integration
def test_checkpoint_with_more_files_than_descriptors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("ours", "dcp"):
        assert (
            sum(file.suffix in (".safetensors", ".distcp") for file in (tmp_path / name).iterdir())
            >= 600
        )

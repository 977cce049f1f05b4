"""What every `Storage` does: a local folder, and a prefix of a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.runtime.objects.registry import register
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.roots import open_parent, open_reader, open_root

BUCKET = "s3://conformance"


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path)
        return
    register(BUCKET, MemoryStore(MemoryBucket(url=BUCKET)))
    yield f"{BUCKET}/run"
    register(BUCKET, None)


@pytest.fixture
def storage(root: str) -> Iterator[Storage]:
    with open_root(root) as opened:
        yield opened


def put(storage: Storage, name: str, body: bytes = b"body") -> None:
    folder = name.rpartition("/")[0]
    if folder and storage.kind(folder) is None:
        storage.make_folder(folder)
    storage.put(name, body)
    storage.close()


def test_paths_are_below_the_root(storage: Storage, root: str) -> None:
    assert storage.root == root
    assert storage.path("") == root
    assert storage.path("a/b") == f"{root}/a/b"


def test_object_is_read_whole_and_in_ranges(storage: Storage, root: str) -> None:
    put(storage, "a", b"0123456789")
    assert storage.read("a") == b"0123456789"
    assert storage.size("a") == 10
    body = bytearray(4)
    storage.read_at("a", 3, memoryview(body))
    assert body == b"3456"
    with pytest.raises(uc.StorageError, match=f"{root}/a"):
        storage.read_at("a", 8, memoryview(body))


def test_absent_name(storage: Storage) -> None:
    assert storage.size("a") is None
    assert storage.kind("a") is None
    assert storage.version_token("a") is None
    for read in (
        lambda: storage.read("a"),
        lambda: storage.read_at("a", 0, memoryview(bytearray(1))),
        lambda: storage.remove_file("a"),
    ):
        with pytest.raises(uc.NotFoundError):
            read()


def test_folders_and_their_entries(storage: Storage) -> None:
    put(storage, "c/x", b"1")
    put(storage, "c/sub/y", b"22")
    put(storage, "d", b"333")
    assert storage.names() == storage.entries("") == ["c", "d"]
    assert storage.entries("c") == ["sub", "x"]
    assert storage.sizes("c") == {"x": 1}
    assert storage.sizes("") == {"d": 3}
    assert [storage.kind(name) for name in ("", "c", "c/sub", "c/x", "d")] == [
        *("folder", "folder", "folder", "file", "file"),
    ]


def test_name_that_another_one_starts_with(storage: Storage) -> None:
    put(storage, "checkpoint-1/x")
    put(storage, "checkpoint-10/x")
    assert storage.entries("checkpoint-1") == ["x"]
    storage.remove_folder("checkpoint-1")
    assert storage.names() == ["checkpoint-10"]


def test_removed_names(storage: Storage) -> None:
    put(storage, "c/x")
    put(storage, "c/sub/y")
    put(storage, "d")
    storage.remove_file("d")
    storage.remove_folder("c")
    assert storage.names() == []


def test_version_token_follows_the_content(storage: Storage) -> None:
    put(storage, "a", b"one")
    token = storage.version_token("a")
    assert token == storage.version_token("a")
    storage.remove_file("a")
    put(storage, "a", b"two")
    assert storage.version_token("a") != token


def test_syncs_of_what_is_there(storage: Storage) -> None:
    put(storage, "c/x")
    storage.sync("c/x")
    storage.sync_tree("c")
    storage.sync_written(below="c")
    storage.start_flush("c/x", 0, 1)
    assert storage.read("c/x") == b"body"


def test_parent_of_a_checkpoint(root: str) -> None:
    storage, name = open_parent(f"{root}/new/checkpoint-1")
    assert (storage.path(name), name) == (f"{root}/new/checkpoint-1", "checkpoint-1")


def test_reader_of_a_root(storage: Storage, root: str) -> None:
    put(storage, "c/x")
    reader = open_reader(f"{root}/c")
    assert reader.names() == ["x"]
    assert reader.read("x") == b"body"
    reader.close()

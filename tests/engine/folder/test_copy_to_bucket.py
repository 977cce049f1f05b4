"""Copies of a checkpoint to and from a bucket: whole, or nothing but what the next one aborts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.manager.managers import state
from tests.support.objects.buckets import URL, connect, folder_bodies, registered_bucket
from tests.support.objects.memory import MemoryBucket
from unified_ckpt.engine.folder.copy import CopyReport, copy_checkpoint
from unified_ckpt.format import names
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import MAX_PARTS
from unified_ckpt.runtime.storage.roots import open_root

NAME, ROOT = "checkpoint-3", f"{URL}/run"
SMALL_PART_NBYTES = 64 << 10


class KilledError(BaseException):
    """The process is gone: nothing may handle it."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    with registered_bucket() as bucket:
        bucket.min_part_nbytes = SMALL_PART_NBYTES
        yield bucket


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of several files of several parts, with files of a user."""
    staged = "unified_ckpt.runtime.objects.staged.DEFAULT_PART_NBYTES"
    monkeypatch.setattr(staged, SMALL_PART_NBYTES)

    def attach(folder: str) -> None:
        path = Path(folder)
        (path / "config.json").write_text("{}")
        (path / "empty.txt").write_bytes(b"")
        (path / "tokenizer" / "deep").mkdir(parents=True)
        (path / "tokenizer" / "deep" / "merges.txt").write_text("a b")
        (path / "linked.json").symlink_to("config.json")
        (path / "nowhere").symlink_to("absent")

    model = {**state(3)["model"], "wide": torch.randn(300, 400), "none": torch.zeros(0, 4)}
    uc.save(
        tmp_path / "local" / NAME,
        **{**state(3), "model": model},
        step=3,
        extra={"seen": bytes(5000)},
        rank_extra={"rng": b"x" * 100},
        attach=attach,
        options=uc.SaveOptions(max_file_bytes=200 << 10),
    )
    return tmp_path / "local" / NAME


def copy(source: Path | str, root: Path | str, *, if_exists: str = "keep") -> CopyReport:
    return copy_checkpoint(
        str(source),
        open_root(str(root)),
        NAME,
        if_exists=if_exists,
        on_progress=lambda _: None,
    )


def bodies_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def without_etags(bodies: dict[str, bytes]) -> dict[str, bytes]:
    """The bodies, with a manifest that is equal on disks and in buckets."""
    manifest = json.loads(bodies[names.MANIFEST])
    etags, _ = manifest.pop("etags", {}), manifest.pop("url", "")
    assert set(etags) in (set(), bodies.keys() - {names.MANIFEST})
    del manifest["crc"]
    return {**bodies, names.MANIFEST: json.dumps(manifest).encode()}


def test_copy_to_bucket_and_back(bucket: MemoryBucket, source: Path, tmp_path: Path) -> None:
    report = copy(source, ROOT)
    uploaded = folder_bodies(bucket, f"run/{NAME}")
    assert without_etags(uploaded) == without_etags(bodies_of(source))
    assert max(map(len, uploaded.values())) > 2 * SMALL_PART_NBYTES
    assert report.nbytes == sum(map(len, uploaded.values())) - len(uploaded[names.MANIFEST])
    assert bucket.open_uploads() == []
    assert uc.verify(f"{ROOT}/{NAME}", deep=True).ok
    (tmp_path / "root").mkdir()
    copy(f"{ROOT}/{NAME}", tmp_path / "root")
    assert bodies_of(tmp_path / "root" / NAME) == bodies_of(source)
    copy(f"{ROOT}/{NAME}", f"{URL}/other")
    copied = folder_bodies(bucket, f"other/{NAME}")
    assert without_etags(copied) == without_etags(uploaded)


def test_same_save_in_the_bucket_is_kept(bucket: MemoryBucket, source: Path) -> None:
    """Also while a listing does not show it yet."""
    copy(source, ROOT)
    before = bucket.bodies()
    bucket.list_delay_seconds = 3600
    assert copy(source, ROOT, if_exists="error").nbytes == 0
    assert bucket.bodies() == before
    uc.save(source, **state(4), step=3, options=uc.SaveOptions(if_exists="replace"))
    kept = copy(source, ROOT)
    assert kept.is_other_save
    assert bucket.bodies() == before
    assert copy(source, ROOT, if_exists="replace").nbytes > 0
    assert uc.verify(f"{ROOT}/{NAME}", deep=True).ok


def test_failed_copy_leaves_nothing_in_the_bucket(bucket: MemoryBucket, source: Path) -> None:
    file = source / "optimizer.safetensors"
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)
    with pytest.raises(uc.IntegrityError, match="it is not copied"):
        copy(source, ROOT)
    assert bucket.bodies() == {}
    assert bucket.open_uploads() == []


def test_copy_killed_at_every_request(bucket: MemoryBucket, source: Path) -> None:
    """The next copy aborts its uploads, or finishes its commit."""
    requests: list[tuple[str, str]] = []
    connect(bucket, before=lambda verb, key: requests.append((verb, key)))
    copy(source, ROOT)
    expected, count = folder_bodies(bucket, f"run/{NAME}"), len(requests)
    begins = [key for verb, key in requests if verb == "begin"]
    assert len(begins) == len(set(begins)) == len(expected) - 1
    assert count > 50
    lists_of_uploads = [
        key
        for verb, key in requests
        if verb == "put" and names.uploading_name(key.removeprefix("run/"))
    ]
    assert len(lists_of_uploads) == 2, "not one per file"
    for index in range(0, count, 3):
        bucket.versions.clear()
        bucket.uploads.clear()
        requests.clear()

        def kill(verb: str, key: str, index: int = index) -> None:
            requests.append((verb, key))
            if len(requests) > index:
                raise KilledError

        connect(bucket, before=kill)
        with pytest.raises(KilledError):
            copy(source, ROOT)
        connect(bucket)
        copy(source, ROOT)
        assert folder_bodies(bucket, f"run/{NAME}") == expected, requests[-1]
        assert bucket.open_uploads() == []
        assert set(bucket.bodies()) == {f"run/{NAME}/{file}" for file in expected} | {
            f"run/{names.NEWEST}"
        }


def test_parts_of_a_large_file(bucket: MemoryBucket) -> None:
    """A file is never more parts than a store takes."""
    storage = open_root(ROOT)
    assert isinstance(storage, ObjectStorage)
    staged = storage.stage(".staging", NAME)
    staged.expect({"small": 1})
    default = staged.part_nbytes
    staged.expect({"large": default * MAX_PARTS})
    assert staged.part_nbytes == default
    staged.expect({"larger": default * MAX_PARTS + 1})
    assert staged.part_nbytes == 2 * default


def test_sizes_of_more_files_lose_nothing(bucket: MemoryBucket) -> None:
    """A merge announces attached files after it has written others."""
    storage = open_root(ROOT)
    assert isinstance(storage, ObjectStorage)
    staged = storage.stage(".staging", NAME)
    staged.write_at("first", 0, [memoryview(b"abc")])
    staged.expect({"second": 3})
    part_nbytes = staged.part_nbytes
    staged.write_at("second", 0, [memoryview(b"def")])
    staged.write_at("third", 0, [memoryview(b"ghi")])
    staged.expect({"huge": part_nbytes * MAX_PARTS + 1})
    assert staged.part_nbytes == 2 * part_nbytes
    sizes = {file: upload.nbytes for file, upload in staged.finish().items()}
    assert sizes == {"first": 3, "second": 3, "third": 3}


def test_last_part_is_sent_with_its_last_byte(bucket: MemoryBucket) -> None:
    """So a rank does not hold a part of each file that it has written."""
    storage = open_root(ROOT)
    assert isinstance(storage, ObjectStorage)
    staged = storage.stage(".staging", NAME)
    staged.expect({"file": 10})
    staged.write_at("file", 0, [memoryview(bytes(4))])
    assert staged.files["file"].etags == {}
    staged.write_at("file", 4, [memoryview(bytes(6))])
    deadline = time.monotonic() + 30
    while not staged.files["file"].etags and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread sends it
    assert list(staged.files["file"].etags) == [1]
    staged.finish()  # ends its thread


def test_source_that_cannot_be_listed_is_refused(bucket: MemoryBucket, source: Path) -> None:
    import fsspec

    (source / "nowhere").unlink()
    file_system = fsspec.filesystem("memory")
    file_system.put(str(source), "/copied", recursive=True)
    with pytest.raises(uc.StorageError, match="whose folders are not listed, expected a local"):
        copy("memory://copied", ROOT)
    assert bucket.bodies() == {}
    assert bucket.open_uploads() == []

"""A checkpoint in a bucket is opened, read and verified in one version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.objects.folders import copy_to_bucket, upload
from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.format.commit import CommitRecord, Tombstone, encode_record
from unified_ckpt.format.names import MANIFEST, commit_name
from unified_ckpt.runtime.objects.registry import register

URL = "s3://bucket/run/c"
MODEL = {
    f"w{number}": torch.arange(300_000, dtype=torch.float32).reshape(300, 1000) + number
    for number in range(4)
}
FILES = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
OPTIONS = uc.SaveOptions(max_file_bytes=1_300_000)  # four files


@pytest.fixture
def requests() -> Counter[str]:
    """Requests for each file."""
    return Counter()


@pytest.fixture
def store(requests: Counter[str]) -> Iterator[MemoryStore]:
    """A bucket with a checkpoint."""
    store = MemoryStore(MemoryBucket())
    register("s3://bucket", store)
    uc.save(URL, model=MODEL, extra={"a": 1}, step=3, options=OPTIONS)
    store.before = lambda _, key: requests.update([key.rpartition("/")[2]])
    yield store
    register("s3://bucket", None)


def key(file: str) -> str:
    return f"run/c/{file}"


def damage(store: MemoryStore, file: str, position: int) -> None:
    """Change a byte of an object that keeps its ETag, as rotten bytes do."""
    current = store.bucket.current(key(file))
    assert current is not None
    body = bytearray(current.body)
    body[position] ^= 1
    current.body = bytes(body)


def test_slices_are_read_alone(store: MemoryStore, requests: Counter[str]) -> None:
    with uc.open(URL) as opened:
        assert opened.step == 3
        assert opened.extra == {"a": 1}
        requests.clear()
        assert torch.equal(opened["model"]["w2"][100:103], MODEL["w2"][100:103])
    assert requests == {FILES[2]: 2}, "its header, and the slice"


def test_columns_are_read_in_few_requests(store: MemoryStore, requests: Counter[str]) -> None:
    with uc.open(URL) as opened:
        view = opened["model"]["w2"]
        requests.clear()
        assert torch.equal(view[:, 5:10], MODEL["w2"][:, 5:10])
    assert requests == {FILES[2]: 1}


def test_verify(store: MemoryStore, requests: Counter[str]) -> None:
    report = uc.verify(URL)
    assert (report.ok, report.tensors, report.path) == (True, 4, URL)
    small = {MANIFEST: 2, "model.safetensors.index.json": 1, "digests.safetensors": 1}
    assert requests == {**small, **dict.fromkeys(FILES, 1)}
    requests.clear()
    report = uc.verify(URL, deep=True)
    assert (report.ok, report.tensors, report.deep) == (True, 4, True)
    assert requests == {**small, **dict.fromkeys(FILES, 2)}


def test_verify_names_damage(store: MemoryStore) -> None:
    damage(store, FILES[0], 12)
    damage(store, FILES[1], 700_000)
    store.delete(key(FILES[2]))
    upload(store, key(FILES[3]), store.get(key(FILES[3]))[0][:-1])
    report = uc.verify(URL, deep=True)
    header, block, missing, replaced = report.problems
    assert header.startswith(f"{FILES[0]}: its header has CRC")
    assert block.startswith(f"{FILES[1]}: 1 of 1 tensor damaged: model:w1: block 0")
    assert missing == f"{FILES[2]} is missing, with 1 tensor"
    assert replaced.startswith(f"{FILES[3]}: got another object than the one of the save")


def put_record(store: MemoryStore) -> None:
    record = CommitRecord(
        save_id="b2",
        step=4,
        run_id="",
        uploads_id="b2",
        manifest="",
        replaces="",
        files={},
        replaced_files={},
    )
    store.put(f"run/{commit_name('c')}", encode_record(record))


UNFINISHED = (
    r"^s3://bucket/run/c: a commit of save b2 is unfinished; wait if its job is running; "
    r"otherwise save to this name, or run `unified-ckpt verify s3://bucket/run/c --repair`$"
)


@pytest.mark.parametrize("open_it", [uc.open, uc.verify, lambda path: uc.load(path, model=MODEL)])
def test_unfinished_commit_is_named(store: MemoryStore, open_it: Callable[[str], object]) -> None:
    """The manifest is a tombstone, or there is none yet. A reader finishes nothing."""
    put_record(store)
    with uc.open(URL) as opened:  # the record alone has changed nothing
        assert opened.step == 3
    store.put(key(MANIFEST), encode_record(Tombstone(committing="b2")))
    before = store.bucket.bodies()
    for _ in range(2):
        with pytest.raises(uc.IncompleteError, match=UNFINISHED):
            open_it(URL)
        store.delete(key(MANIFEST))
    assert before == {**store.bucket.bodies(), key(MANIFEST): before[key(MANIFEST)]}


def test_file_of_an_unfinished_commit(store: MemoryStore) -> None:
    """The old manifest, and a file of the save that replaces it."""
    with uc.open(URL) as opened:
        upload(store, key(FILES[1]), store.get(key(FILES[1]))[0] + b"1")
        assert torch.equal(opened["model"]["w0"][:], MODEL["w0"])
        with pytest.raises(uc.IntegrityError, match=r"00002-of-00004\.safetensors: got another o"):
            opened["model"]["w1"]
        put_record(store)
        with pytest.raises(uc.IncompleteError, match=UNFINISHED):
            opened["model"]["w1"]


def test_reader_beside_a_save_and_a_removal(store: MemoryStore) -> None:
    """Old bytes or an error, at any moment."""
    text = r"^s3://bucket/run/c: was removed or replaced while it was read; load again$"
    with uc.open(URL) as opened:
        view = opened["model"]["w3"]
        uc.save(
            URL,
            model={name: -tensor for name, tensor in MODEL.items()},
            options=OPTIONS.model_copy(update={"if_exists": "replace"}),
        )
        with pytest.raises(uc.NotFoundError, match=text):
            view[:]
        with pytest.raises(uc.NotFoundError, match=text):
            opened["model"]["w1"]
    with uc.open(URL) as opened:
        view = opened["model"]["w3"]
        assert torch.equal(view[:], -MODEL["w3"])
        store.delete(key(MANIFEST))
        store.delete(key(FILES[1]))
        with pytest.raises(uc.NotFoundError, match=text):
            opened["model"]["w1"]
    with pytest.raises(uc.FormatError, match="is an unfinished save"):
        uc.open(URL)


def test_file_is_missing(store: MemoryStore) -> None:
    store.delete(key(FILES[1]))
    with pytest.raises(
        uc.IncompleteError, match=r"(?s)files are missing.*00002-of-00004.*model:w1"
    ):
        uc.load(URL, model={name: torch.zeros_like(tensor) for name, tensor in MODEL.items()})


def test_deleted_part(store: MemoryStore) -> None:
    uc.save(f"{URL}2", model=MODEL, optimizer={"w0/m": MODEL["w0"]})
    for name in ("optimizer.safetensors", "optimizer.safetensors.index.json"):
        store.delete(f"run/c2/{name}")
    with uc.open(f"{URL}2") as opened:
        assert opened.parts == ("model",)


def test_huggingface_folder_and_file(store: MemoryStore, tmp_path: Path) -> None:
    uc.save(tmp_path / "hf", model=MODEL, options=OPTIONS)
    for name in (MANIFEST, "digests.safetensors"):
        (tmp_path / "hf" / name).unlink()
    copy_to_bucket(tmp_path / "hf", store, "hub/model")
    for path in ("s3://bucket/hub/model", "s3://bucket/hub/model/"):
        with uc.open(path) as opened:
            assert opened.format == "huggingface"
            assert torch.equal(opened["model"]["w1"][:], MODEL["w1"])
    with uc.open(f"s3://bucket/hub/model/{FILES[1]}") as opened:
        assert list(opened["model"]) == ["w1"]
    with uc.open(f"{URL}/{FILES[2]}") as opened:
        assert (opened.format, list(opened["model"])) == ("unified", ["w2"])


def test_nothing_there(store: MemoryStore) -> None:
    text = (
        r"^s3://bucket/gone: holds no checkpoint: expected .*; other formats are read from a disk$"
    )
    with pytest.raises(uc.NotFoundError, match=text):
        uc.open("s3://bucket/gone")
    with pytest.raises(
        uc.FormatError, match=r"s3://bucket/run: got a URL, expected a local folder"
    ):
        uc.open("s3://bucket/run", options=uc.SourceOptions(format="dcp"))


def test_manifest_of_a_copy_on_a_disk(store: MemoryStore, tmp_path: Path) -> None:
    """ETags are of a bucket: a copy on a disk is read without them."""
    for name, body in store.bucket.bodies().items():
        if name.startswith("run/c/"):
            (tmp_path / name.removeprefix("run/c/")).write_bytes(body)
    assert uc.verify(tmp_path, deep=True).ok


@pytest.mark.incident("orbax#394")
def test_copy_by_another_tool(store: MemoryStore, tmp_path: Path) -> None:
    """A copy has objects with other ETags; so has what was downloaded and uploaded again."""
    for file, body in store.bucket.bodies().items():
        store.put(file.replace("run/c/", "other/d/"), body)
        (tmp_path / file.rpartition("/")[2]).write_bytes(body)
    copied, replace = "s3://bucket/other/d", uc.SaveOptions(if_exists="replace")
    for path in (copied, str(tmp_path)):
        assert uc.verify(path, deep=True).ok
        loaded = {name: torch.zeros_like(tensor) for name, tensor in MODEL.items()}
        uc.load(path, model=loaded)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in MODEL.items())
        uc.save(path, model={"w0": MODEL["w1"]}, step=4, options=replace)
        assert uc.verify(path, deep=True).ok
    store.put(key(FILES[0]), store.bucket.bodies()[key(FILES[0])])  # in its own place
    with pytest.raises(uc.IntegrityError, match="got another object"):
        uc.load(URL, model=dict(MODEL))

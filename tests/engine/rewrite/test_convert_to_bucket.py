"""`convert` to and from buckets: files are those of a conversion on a disk, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.limits import peak_of
from tests.support.objects.buckets import URL, connect, folder_bodies, registered_bucket
from tests.support.objects.memory import MemoryBucket
from unified_ckpt.cli.main import main
from unified_ckpt.engine.rewrite.convert import ConvertReport, ConvertRequest, convert_source
from unified_ckpt.foreign.open import open_source
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.roots import open_root

NAME = "new"
PART_NBYTES = 64 << 10
CONVERT_TO_SINK = """
import hashlib
import unified_ckpt as uc
from tests.support.objects.memory import MemoryStore
from unified_ckpt.runtime.objects.registry import register
from unified_ckpt.runtime.objects.store import multipart_etag

class Sink(MemoryStore):
    def put_part(self, key, upload_id, number, buffers):
        return hashlib.md5(b"".join(buffers)).hexdigest()

    def complete(self, key, upload_id, etags, *, label=""):
        self.bucket.store(key, b"", multipart_etag(etags))
        return multipart_etag(etags)

register("s3://bucket", Sink())
small, large, url = sys.argv[1:]
uc.convert(small, url + "/small")
start = peak()
uc.convert(large, url + "/large", max_file_bytes=6 << 20)
print(peak() - start)
"""
TIMES = ("save_id", "created", "seconds", "etags", "url", "crc", "world_size")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    staged = "unified_ckpt.runtime.objects.staged.DEFAULT_PART_NBYTES"
    monkeypatch.setattr(staged, PART_NBYTES)
    with registered_bucket() as bucket:
        bucket.min_part_nbytes = PART_NBYTES
        yield bucket


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of tensors of several dtypes, with the state of three ranks."""
    path = tmp_path_factory.mktemp("source") / "checkpoint-11"
    masters = {f"w{i}": torch.randn(90, 301 + i) for i in range(5)}
    model: dict[str, torch.Tensor] = {name: value.bfloat16() for name, value in masters.items()}
    model |= {"count": torch.tensor(3), "none": torch.zeros(0, 4), "wide": torch.randn(300, 400)}

    def attach(folder: str) -> None:
        Path(folder, "notes").mkdir()
        Path(folder, "notes", "words.txt").write_text("hello")
        Path(folder, "config.json").write_text('{"model_type": "none"}')

    def save(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(
                path,
                model=model,
                master_weights=masters,
                optimizer={f"{name}/exp_avg": value for name, value in masters.items()},
                rank_extra={"seed": comm.rank},
                step=11,
                attach=attach,
            )

    run_ranks(3, save)
    return path


def convert_by(nodes: list[int], source: Path, root: str, **options: Any) -> list[Any]:
    """Convert with a thread per rank, whose nodes these are."""
    settings: dict[str, Any] = {
        "max_file_bytes": 200 << 10,
        "if_exists": "error",
        "timeout_seconds": 20.0,
        **options,
    }
    request = ConvertRequest(source_path=str(source), recorded_options={}, **settings)

    def act(comm: Comm) -> ConvertReport:
        opened, topology = open_source(str(source)), Topology.shared_folder(comm.rank, nodes)
        try:
            return convert_source(comm, opened, open_root(root), NAME, request, topology=topology)
        finally:
            opened.close()

    return try_ranks(len(nodes), act)


def comparable(bodies: Mapping[str, bytes]) -> dict[str, bytes | dict[str, Any]]:
    """The files, with a manifest without what differs between two conversions."""
    manifest = json.loads(bodies[names.MANIFEST])
    kept = {name: value for name, value in manifest.items() if name not in TIMES}
    return {**bodies, names.MANIFEST: kept}


def bodies_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("compression", ["none", "masters"])
def test_any_number_of_ranks_writes_the_files_of_a_disk(
    bucket: MemoryBucket, source: Path, tmp_path: Path, nodes: list[int], compression: str
) -> None:
    """Files are numbered by node, so the disk has as many."""
    (tmp_path / "root").mkdir()
    on_disk = convert_by(nodes, source, str(tmp_path / "root"), compression=compression)
    in_bucket = convert_by(nodes, source, f"{URL}/root", compression=compression)
    for reports in (on_disk, in_bucket):
        assert all(isinstance(report, ConvertReport) for report in reports), reports
    uploaded = folder_bodies(bucket, f"root/{NAME}")
    assert comparable(uploaded) == comparable(bodies_of(tmp_path / "root" / NAME))
    assert max(map(len, uploaded.values())) > 2 * PART_NBYTES
    assert bucket.open_uploads() == []
    assert uc.verify(f"{URL}/root/{NAME}", deep=True).ok


def test_ranks_write_whole_files_in_order(bucket: MemoryBucket, source: Path) -> None:
    """Each rank has some of the files, and its requests are few: parts and no more."""
    requests: list[tuple[str, str]] = []
    connect(bucket, before=lambda verb, key: requests.append((verb, key)))
    reports = convert_by([0, 0, 0], source, f"{URL}/root")
    assert all(isinstance(report, ConvertReport) for report in reports), reports
    uploaded = folder_bodies(bucket, f"root/{NAME}")
    parts = sum(-(-len(body) // PART_NBYTES) for body in uploaded.values())
    verbs = [verb for verb, _ in requests]
    assert verbs.count("put_part") == parts - -(-len(uploaded[names.MANIFEST]) // PART_NBYTES)
    assert verbs.count("begin") == verbs.count("complete") == len(uploaded) - 1
    assert verbs.count("abort") == 0


@pytest.mark.slow
def test_memory_of_a_rank_is_a_few_parts(tmp_path: Path) -> None:
    """Of 48 files of 288 MiB, no part stays in memory."""
    for folder, count in (("small", 1), ("large", 48)):
        (tmp_path / folder).mkdir()
        write_sparse(tmp_path / folder / "model.safetensors", count=count, nbytes=6 << 20)
    assert peak_of(CONVERT_TO_SINK, tmp_path / "small", tmp_path / "large", URL) < 224 << 20


def write_sparse(file: Path, *, count: int, nbytes: int) -> None:
    """Write tensors of zeros that take no space on the disk."""
    spans = ((i, i * nbytes) for i in range(count))
    header = {
        f"w{i:02}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [start, start + nbytes]}
        for i, start in spans
    }
    body = json.dumps(header).encode()
    with file.open("wb") as target:
        target.write(len(body).to_bytes(8, "little") + body)
        target.truncate(8 + len(body) + count * nbytes)


def test_failure_on_one_rank_leaves_nothing(bucket: MemoryBucket, source: Path) -> None:
    """All ranks raise, and the leader aborts the uploads of all."""

    def fail(verb: str, key: str) -> None:
        if verb == "put_part" and "model-00002" in key:
            raise uc.StorageError(f"{key}: put_part 1: got 503 four times")

    connect(bucket, before=fail)
    errors = convert_by([0, 0, 1], source, f"{URL}/root")
    assert {type(error) for error in errors} <= {uc.StorageError, uc.RankError}, errors
    assert all("got 503 four times" in str(error) for error in errors)
    assert bucket.bodies() == {}
    assert bucket.open_uploads() == []


def test_existing_checkpoint_is_replaced_or_kept(bucket: MemoryBucket, source: Path) -> None:
    url = f"{URL}/root/{NAME}"
    first = uc.convert(source, url, max_file_bytes=50_000)
    with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
        uc.convert(source, url)
    assert uc.convert(source, url, if_exists="keep").existed
    second = uc.convert(source, url, if_exists="replace")
    assert first.id != second.id
    assert uc.verify(url, deep=True).ok
    assert not any("model-00002" in key for key in bucket.bodies()), "fewer files than before"


def test_bucket_to_disk_and_bucket_to_bucket(
    bucket: MemoryBucket, source: Path, tmp_path: Path
) -> None:
    url = f"{URL}/root/checkpoint-11"
    uc.convert(source, url)
    for target in (str(tmp_path / NAME), f"{URL}/other/{NAME}"):
        report = uc.convert(url, target)
        assert report.left_out == ()
        assert report.verified == sum(report.tensors.values())
        assert uc.verify(target, deep=True).ok
    expected, actual = bodies_of(source), bodies_of(tmp_path / NAME)
    del expected[names.MANIFEST], actual[names.MANIFEST]
    assert actual == expected
    assert folder_bodies(bucket, f"other/{NAME}").items() >= expected.items()
    assert (
        json.loads((tmp_path / NAME / names.MANIFEST).read_text())["converted_from"]["path"] == url
    )


def test_side_files_of_a_bucket(bucket: MemoryBucket, source: Path, tmp_path: Path) -> None:
    """Of a model folder without a manifest, what is not copied is named."""
    prefix = "hub/model"
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = {
        "model.safetensors": (tmp_path / "model.safetensors").read_bytes(),
        "config.json": b'{"model_type": "none"}',
        "tokenizer.model": b"tokens",
        "1_Pooling/config.json": b"{}",
        "modules.json": b'[{"path": ""}, {"path": "1_Pooling"}]',
        "original/consolidated.pth": b"large",
        "weights.gguf": b"larger",
    }
    requests: list[tuple[str, str]] = []
    for file, body in files.items():
        bucket.store(f"{prefix}/{file}", body, file)
    connect(bucket, before=lambda verb, key: requests.append((verb, key)))
    report = uc.convert(f"{URL}/{prefix}", tmp_path / NAME)
    assert report.left_out == ("original/", "weights.gguf")
    copied = {"config.json", "tokenizer.model", "1_Pooling/config.json", "modules.json"}
    actual = bodies_of(tmp_path / NAME)
    assert {file: actual[file] for file in copied} == {file: files[file] for file in copied}
    read = {key.removeprefix(f"{prefix}/") for verb, key in requests if verb == "get_range"}
    assert read == {*copied, "model.safetensors"}


@pytest.mark.parametrize("to", ["huggingface", "peft", "maxtext", "dcp", "orbax", "paddle"])
def test_foreign_formats_are_not_written_to_a_bucket(
    bucket: MemoryBucket, source: Path, to: str
) -> None:
    with pytest.raises(uc.FormatError, match=f"got a URL for '{to}', expected a local path"):
        uc.convert(source, f"{URL}/root/{NAME}", to=to)
    assert bucket.bodies() == {}


def test_target_and_source_may_not_contain_one_another(bucket: MemoryBucket, source: Path) -> None:
    url = f"{URL}/root/checkpoint-11"
    uc.convert(source, url)
    before = bucket.bodies()
    for target in (f"{url}/inside", f"{URL}/root"):
        with pytest.raises(uc.StorageError, match="contain one another"):
            uc.convert(url, target, if_exists="replace")
    assert bucket.bodies() == before
    uc.convert(url, f"{url}-inside")


def test_source_in_a_bucket_is_read_ahead(
    bucket: MemoryBucket, source: Path, tmp_path: Path
) -> None:
    """Requests are those of merged ranges, not one for each chunk of a tensor."""
    url = f"{URL}/root/checkpoint-11"
    uc.convert(source, url)
    requests: list[tuple[str, str]] = []
    connect(bucket, before=lambda verb, key: requests.append((verb, key)))
    report = uc.convert(url, tmp_path / NAME, compare=False)
    reads = [
        key for verb, key in requests if verb == "get_range" and key.endswith("/model.safetensors")
    ]
    assert report.tensors["model"] == 8
    assert len(reads) <= 3, "its first bytes, twice, and all tensors"


def test_file_of_torch_converts_by_the_command(
    bucket: MemoryBucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {f"w{i}": torch.randn(50, 60 + i) for i in range(9)}
    torch.save({"model": weights, "step": 3}, tmp_path / "old.pt")
    for target in (str(tmp_path / NAME), f"{URL}/root/{NAME}"):
        assert main(["convert", str(tmp_path / "old.pt"), target]) == 0
        assert "every element was written exactly once" in capsys.readouterr().out
    on_disk = comparable(bodies_of(tmp_path / NAME))
    assert comparable(folder_bodies(bucket, f"root/{NAME}")) == on_disk
    assert main(["convert", str(tmp_path / "old.pt"), f"{URL}/x", "--to", "dcp"]) != 0
    assert "got a URL for 'dcp', expected a local path" in capsys.readouterr().err


class KilledError(BaseException):
    """The process is gone: nothing may handle it."""


def test_conversion_killed_at_a_request(bucket: MemoryBucket, source: Path) -> None:
    """The next one of the job aborts its uploads, or finds its commit finished."""
    requests: list[tuple[str, str]] = []
    connect(bucket, before=lambda verb, key: requests.append((verb, key)))
    uc.convert(source, f"{URL}/root/{NAME}")
    count, record = len(requests), ("put", f"root/{names.commit_name(NAME)}")
    certain = count - requests[::-1].index(record)  # after the claim, the record is put
    for index in range(1, count, count // 12):
        bucket.versions.clear()
        bucket.uploads.clear()
        remaining = [index]

        def kill(verb: str, key: str, remaining: list[int] = remaining) -> None:
            remaining[0] -= 1
            if remaining[0] < 0:
                raise KilledError

        connect(bucket, before=kill)
        with pytest.raises(KilledError):
            uc.convert(source, f"{URL}/root/{NAME}")
        connect(bucket)
        report = uc.convert(source, f"{URL}/root/{NAME}", if_exists="keep")
        assert report.existed == (index >= certain), index
        assert uc.verify(f"{URL}/root/{NAME}", deep=True).ok
        assert bucket.open_uploads() == []

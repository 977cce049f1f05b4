"""All ranks load from a bucket, which few of them ask for metadata."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import LOAD, load_case, on_node, states
from tests.support.engine.reshard_cases import NAME, Case, cases, root, save_case
from tests.support.equality import check_equal
from tests.support.harness import run_ranks, try_ranks
from tests.support.objects.folders import copy_to_bucket
from tests.support.objects.memory import MemoryBucket, MemoryStore
from tests.support.refusals import same_error
from unified_ckpt.core.planning import exchange
from unified_ckpt.format.names import MANIFEST
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.objects import read_ahead
from unified_ckpt.runtime.objects.read_ahead import ReadAhead
from unified_ckpt.runtime.objects.registry import register

__all__ = ["root", "states"]  # fixtures

URL = "s3://bucket/run/c"
WIDE = {
    f"w{number}": torch.arange(480_000, dtype=torch.float32).reshape(480, 1000) + number
    for number in range(4)
}
FULL = {**WIDE, "b": torch.arange(10_000.0)}
SAVE = uc.SaveOptions(max_file_bytes=2_000_000)  # four files


class Requests:
    """Serves a bucket, and counts the requests of each file.

    `by_ranks`: those that were not sent ahead, but by the thread of a rank.
    """

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()
        self.by_ranks: Counter[str] = Counter()
        self.store = MemoryStore(MemoryBucket(), before=self._count)

    def _count(self, verb: str, key: str) -> None:
        del verb
        self.by_file[key.rpartition("/")[2]] += 1
        if threading.current_thread().name.startswith("rank-"):
            self.by_ranks[key.rpartition("/")[2]] += 1


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    register("s3://bucket", requests.store)
    yield requests
    register("s3://bucket", None)


def load(nodes: list[int], *, path: str = URL, **arguments: Any) -> list[Any]:
    """Load rows of the wide tensors and all of `b`, and compare them."""

    def act(comm: Comm) -> uc.LoadReport:
        right = {name: wide.chunk(comm.world)[comm.rank] for name, wide in WIDE.items()}
        right["b"] = FULL["b"]
        target = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
        layout = uc.Layout(mesh={"dp": comm.world}, rules={"w*": {"dp": 0}})
        with on_node(comm, nodes) as checkpointer:
            report = checkpointer.load(
                path, **{"model": target, "layout": layout, "options": LOAD, **arguments}
            )
        check_equal(target, right, comm.rank)
        return report

    return try_ranks(len(nodes), act)


def save(**arguments: Any) -> None:
    uc.save(URL, **{"model": FULL, "step": 3, "options": SAVE, **arguments})


@given(
    cases(max_world=5, max_tensors=4, loads=2),
    st.sampled_from([20_000, 1 << 30]),
    st.sampled_from([(64, 256), (1000, 20_000), (256 << 10, 16 << 20)]),
    st.sampled_from(["read", "full", "off"]),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
@settings(max_examples=6)
def test_any_layout_is_loaded_from_a_bucket(
    root: Path,
    case: Case,
    max_file_bytes: int,
    request_nbytes: tuple[int, int],
    verify: str,
    nodes: list[int],
) -> None:
    store = MemoryStore(MemoryBucket())
    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "TILE_NBYTES", 64 << 10)
        patch.setattr(read_ahead, "GAP_NBYTES", request_nbytes[0])
        patch.setattr(read_ahead, "REQUEST_NBYTES", request_nbytes[1])
        save_case(case, Path(name), max_file_bytes=max_file_bytes)
        copy_to_bucket(Path(name) / NAME, store, "run/c")
        register("s3://bucket", store)
        options = LOAD.model_copy(update={"verify": verify})
        try:
            for layout in case.loaded:
                paths: Any = {node: [URL] for node in range(3)}
                results = load_case(case, layout, nodes[: layout.world], paths, options=options)
                assert [type(result) for result in results] == [uc.LoadReport] * layout.world
        finally:
            register("s3://bucket", None)


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1, 1, 2, 2], [0, 1, 2, 3]])
def test_metadata_is_read_once(requests: Requests, nodes: list[int]) -> None:
    extra = {"history": torch.arange(30_000.0)}
    save(extra=extra, rank_extra={"position": 5})
    requests.by_file.clear()
    reports = load(nodes, extra={"history": None}, rank_extra={"position": None})
    assert all(isinstance(report, uc.LoadReport) for report in reports), reports
    assert torch.equal(reports[0].extra["history"], extra["history"])
    headers = {file: count for file, count in requests.by_file.items() if "-of-" in file}
    assert len(headers) == 4
    assert {file: n for file, n in requests.by_file.items() if file not in headers} == {
        MANIFEST: 2,
        "model.safetensors.index.json": 1,
        "extra.safetensors": 2,  # its first bytes, and all
        "digests.safetensors": len(set(nodes)),
        "rank_extra.safetensors": 1,
    }


def test_requests_of_many_ranks_are_those_of_the_plan(requests: Requests) -> None:
    """One for each header, and one for each run of bytes that a rank reads."""
    save()
    requests.by_file.clear()
    load([0] * 8)
    in_files = sum(count for file, count in requests.by_file.items() if "-of-" in file)
    assert in_files == 4 + 8 * len(WIDE), "shared bytes lie beside those of one rank"
    assert not [file for file in requests.by_ranks if "-of-" in file], "all is read ahead"


def test_checkpoint_that_is_absent(requests: Requests) -> None:
    requests.store.put("run/c/notes.txt", b"")
    same_error(
        load([0, 0, 1]), uc.NotFoundError, r"^rank 0.*s3://bucket/run/c: holds no checkpoint"
    )
    assert requests.by_file[".unified_commit-c.json"] == 1, "rank 0 alone has looked"


def test_checkpoint_that_is_replaced_while_it_is_read(requests: Requests) -> None:
    """All ranks get one error, and none a mix."""
    save()

    def replace(_: str, key: str) -> None:
        if "00003-of" in key and requests.by_file["digests.safetensors"]:  # a tensor's bytes
            requests.store.before = None
            save(model={name: -tensor for name, tensor in FULL.items()}, options=replacing)
        requests.by_file[key.rpartition("/")[2]] += 1

    replacing = SAVE.model_copy(update={"if_exists": "replace"})
    requests.by_file.clear()
    requests.store.before = replace
    text = r"run/c: was removed or replaced while it was read; load again; the target holds a mix"
    same_error(load([0, 0]), uc.NotFoundError, text)


def test_damaged_header_is_an_error_of_the_ranks_that_need_it(requests: Requests) -> None:
    """Rank 0 reads all headers, also those that a load does not need."""
    save(optimizer={"w0/m": FULL["w0"]})
    bucket = requests.store.bucket
    file = next(key for key in bucket.bodies() if "optimizer-" in key or "optimizer.s" in key)
    bucket.remove(file)
    reports = load([0, 0])
    assert all(isinstance(report, uc.LoadReport) for report in reports), reports

    def act(comm: Comm) -> object:
        with on_node(comm, [0, 0]) as checkpointer:
            return checkpointer.load(
                URL, model=dict(FULL), optimizer={"w0/m": FULL["w0"].clone()}, options=LOAD
            )

    same_error(try_ranks(2, act), uc.IncompleteError, r"run/c: files are missing")


def test_plain_folder_is_read_once(requests: Requests, tmp_path: Path) -> None:
    """A Hugging Face folder has no manifest, so the first look decides."""
    uc.save(tmp_path / "c", model=FULL, options=SAVE)
    for name in (MANIFEST, "digests.safetensors"):
        (tmp_path / "c" / name).unlink()
    copy_to_bucket(tmp_path / "c", requests.store, "run/c")
    requests.by_file.clear()
    reports = load([0, 0, 1, 1])
    assert all(isinstance(report, uc.LoadReport) for report in reports), reports
    assert requests.by_file.pop("") == 1  # the listing
    in_files = {
        file: requests.by_file.pop(file) for file in list(requests.by_file) if "-of-" in file
    }
    assert requests.by_file == {
        MANIFEST: 1,
        ".unified_commit-c.json": 1,
        "model.safetensors.index.json": 2,
    }
    assert sum(in_files.values()) == 2 * len(in_files) + 4 * len(WIDE) + 1


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
@pytest.mark.parametrize("held_nbytes", [1, 1 << 30])
def test_encoded_tensors_are_read_ahead(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, nodes: list[int], held_nbytes: int
) -> None:
    """A tensor that is decoded from several stored ones is announced like a plain one.

    Ranks announce exactly what they read, in this order, so none reads by itself, whichever
    request was sent when. With memory for one request, most are not sent when they are needed.
    """
    limits = {"in_flight": 16, "held_nbytes": held_nbytes}
    monkeypatch.setattr(ReadAhead.__init__, "__kwdefaults__", limits)
    masters = {name: tensor / 3 for name, tensor in WIDE.items()}
    model = {name: tensor.bfloat16() for name, tensor in masters.items()}
    moments = {f"{name}/exp_avg": tensor / 7 for name, tensor in WIDE.items()}
    state = {"model": model, "master_weights": masters, "optimizer": moments}
    uc.save(URL, **state, options=uc.SaveOptions(compression="O1"))
    with uc.open(URL) as opened:
        stored = {part: {name: opened[part][name][:] for name in state[part]} for part in state}
    check_equal(stored["master_weights"], masters, 0)
    requests.by_file.clear()

    def act(comm: Comm) -> None:
        right: dict[str, Any] = {
            part: {name: tensor.chunk(2, 1)[comm.rank] for name, tensor in tensors.items()}
            for part, tensors in stored.items()
        }
        target = {
            part: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            for part, tensors in right.items()
        }
        layout = uc.Layout(mesh={"tp": 2}, rules={"w*": {"tp": 1}})
        with on_node(comm, nodes) as checkpointer:
            checkpointer.load(URL, **target, layout=layout, options=LOAD)
        for part, tensors in right.items():
            check_equal(target[part], tensors, comm.rank)

    run_ranks(2, act)
    files = {f"{part}.safetensors" for part in state}
    assert files <= requests.by_file.keys()
    assert not files & requests.by_ranks.keys(), "all is read ahead"
    readers = len(set(nodes))  # of each tensor, which is one block
    assert requests.by_file["master_weights.safetensors"] == 1 + readers * len(masters)

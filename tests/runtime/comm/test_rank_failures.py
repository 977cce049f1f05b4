"""One rank fails at any moment: all raise one error at once, and the next call works."""

from __future__ import annotations

import gc
import random
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.node_commits import LAYOUT, contents
from tests.support.engine.cluster.simulated_nodes import LOAD, NAME, SAVE, folder_of, on_node
from tests.support.equality import check_equal
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.refusals import same_error
from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.file_server import PeerStorage
from unified_ckpt.runtime.exchange.shared_memory import TileBuffer
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers
from unified_ckpt.runtime.storage.storage import LocalStorage

WORLD, LONG = 4, 60.0  # LONG: seconds that no call may reach
AT_ONCE = LONG / 2
TALK = ("put", "get", "add", "collect", "broadcast", "set_once")
STORAGE = (
    "read",
    "read_at",
    "write_at",
    "put",
    "make_folder",
    "rename",
    "sync",
    "entries",
    "names",
    "kind",
    "version_token",
)
ALWAYS = ("PeerTransport.__init__", "Call.after_commit")  # once in a call: never left out
_COLLECTIVE_FILES = (
    "collective.py",
    "comm.py",
    "contextlib.py",
)  # the collective's own calls, which continue when a rank fails


@dataclass
class Moments:
    """Counts the operations of each rank, and makes one of them fail."""

    moment: tuple[int, int] | None = None  # rank and number of the operation
    failed: str = ""
    labels: dict[int, list[str]] = field(default_factory=dict)  # of each rank's operations
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, moment: tuple[int, int]) -> None:
        self.moment, self.failed, self.labels = moment, "", {}

    def disarm(self) -> None:
        self.moment = None

    def pass_by(self, label: str) -> None:
        rank = getattr(threading.current_thread(), "of_rank", None)
        if rank is None or self.moment is None:
            return
        with self._lock:
            labels = self.labels.setdefault(rank, [])
            labels.append(label)
            hit = self.moment == (rank, len(labels))
        if hit:
            self.failed = label
            raise StorageError("made to fail")

    def watch(self, owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code
            if not (owner is Collective and caller.co_filename.endswith(_COLLECTIVE_FILES)):
                self.pass_by(f"{owner.__name__}.{name} in {caller.co_name}")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Moments:
    created, start = Moments(), threading.Thread.start

    def of_the_same_rank(thread: threading.Thread) -> None:
        thread.of_rank = getattr(threading.current_thread(), "of_rank", None)  # type: ignore[attr-defined]
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", of_the_same_rank)
    for owner, names in (
        (Collective, TALK),
        (LocalStorage, STORAGE),
        (TileBuffer, ("open_for", "advance", "set_done")),
    ):
        for name in names:
            created.watch(owner, name, monkeypatch)
    created.watch(TileBuffers, "prepare", monkeypatch)
    created.watch(PeerStorage, "read_at", monkeypatch)
    created.watch(PeerTransport, "__init__", monkeypatch)
    created.watch(Call, "after_commit", monkeypatch)
    return created


@dataclass(frozen=True)
class Call:
    """A call of all ranks. `nodes`: of each rank; `folders`: of each rank, unless all share one."""

    do: str  # save, load or repair
    nodes: tuple[int, ...] = (0, 0, 0, 0)
    folders: tuple[int, ...] = ()
    background: bool = False
    again: bool = False  # a save that is not the first of its layout
    copies: int = 1
    damaged: bool = False

    def place(self, root: Path, rank: int) -> Path:
        return folder_of(root, self.folders[rank]) if self.folders else root / NAME

    def after_commit(self, report: uc.SaveReport) -> None:
        """Does nothing, but is a moment."""

    def save(self, created: uc.Checkpointer, root: Path, rank: int, step: int) -> int:
        options = SAVE.model_copy(
            update={
                "timeout_seconds": LONG,
                "if_exists": "replace",
                "fsync": True,
                "node_copies": self.copies,
                "write_alignment": 4096,
            }
        )
        arguments = {
            "model": contents(step, rank),
            "layout": LAYOUT,
            "step": step,
            "extra": {"step": step},
            "rank_extra": (rank, step),
            "options": options,
        }
        if self.background:
            arguments["after_commit"] = self.after_commit
            created.save_async(self.place(root, rank), **arguments).result(2 * LONG)
        else:
            created.save(self.place(root, rank), **arguments)
        return step

    def load(self, created: uc.Checkpointer, root: Path, rank: int) -> int:
        target = {name: torch.full_like(t, -1) for name, t in contents(0, rank).items()}
        options = LOAD.model_copy(update={"timeout_seconds": LONG})
        report = created.load(self.place(root, rank), model=target, layout=LAYOUT, options=options)
        assert report.step is not None
        check_equal(target, contents(report.step, rank))
        return report.step

    def __call__(self, created: uc.Checkpointer, root: Path, rank: int) -> object:
        if self.do == "save":
            return self.save(created, root, rank, 2)
        return (
            self.load(created, root, rank)
            if self.do == "load"
            else len(created.repair(self.place(root, rank)))
        )

    def prepare(self, root: Path) -> None:
        root.mkdir()
        if self.do == "save":
            return

        def act(comm: Comm) -> None:
            with on_node(comm, self.nodes) as created:
                self.save(created, root, comm.rank, 1)

        run_ranks(WORLD, act)
        for file in self.place(root, WORLD - 1).glob("model*.safetensors") if self.damaged else ():
            flip(file, -1)


SEPARATE = {"nodes": (0, 0, 1, 1), "folders": (0, 0, 1, 1)}
SHARED = {"nodes": (0, 0, 1, 1)}
CALLS = {
    "save": Call("save"),
    "save again": Call("save", again=True),
    "save in the background": Call("save", background=True, again=True),
    "save, shared folder": Call("save", **SHARED),
    "save in the background, shared folder": Call("save", background=True, again=True, **SHARED),
    "save, two shared folders": Call("save", nodes=(0, 1, 2, 3), folders=(0, 0, 1, 1)),
    "save, nodes separate": Call("save", **SEPARATE),
    "save again, nodes separate": Call("save", again=True, **SEPARATE),
    "save in the background, nodes separate": Call("save", background=True, again=True, **SEPARATE),
    "save of two copies": Call("save", copies=2, **SEPARATE),
    "load": Call("load"),
    "load, shared folder": Call("load", **SHARED),
    "load, nodes separate": Call("load", **SEPARATE),
    "load, a damaged copy": Call("load", copies=2, damaged=True, **SEPARATE),
    "repair": Call("repair", copies=2, damaged=True, **SEPARATE),
}


def run(
    call: Call, root: Path, moments: Moments, moment: tuple[int, int]
) -> tuple[list[object], list[object], float]:
    """Returns each rank's results of the failed call and of the next one, and the seconds."""
    together, seconds = threading.Barrier(WORLD), list[float]()

    def act(comm: Comm) -> tuple[object, object]:
        threading.current_thread().of_rank = comm.rank  # type: ignore[attr-defined]
        with on_node(comm, call.nodes) as created:
            if call.again:
                call.save(created, root, comm.rank, 1)
            results: list[object] = []
            for prepare in (lambda: moments.arm(moment), moments.disarm):
                together.wait(2 * LONG)
                if comm.rank == 0:
                    prepare()
                together.wait(2 * LONG)
                began = time.monotonic()
                try:
                    results.append(call(created, root, comm.rank))
                except Exception as error:  # of any kind: the other ranks wait at the barrier
                    results.append(error)
                seconds.append(time.monotonic() - began)
        return results[0], results[1]

    pairs = run_ranks(WORLD, act)
    return [first for first, _ in pairs], [second for _, second in pairs], max(seconds)


def check_moment(
    call: Call, root: Path, moments: Moments, moment: tuple[int, int], fine: list[object]
) -> None:
    """All ranks raise one error at once, or finish; the next call works."""
    first, second, seconds = run(call, root, moments, moment)
    label = f"rank {moment[0]}, moment {moment[1]}: {moments.failed}"
    assert seconds < AT_ONCE, f"{label}: took {seconds:.0f} s"
    assert second == fine, f"{label}: {second}"
    if first != fine:
        kinds = {type(result) for result in first}
        assert len(kinds) == 1, f"{label}: {first}"
        same_error(first, kinds.pop(), "made to fail" if call.do == "save" else ".")


@pytest.mark.slow
@pytest.mark.parametrize("samples", [5, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
def test_one_rank_fails_at_any_moment(
    tmp_path: Path, moments: Moments, name: str, samples: int
) -> None:
    call, draw = CALLS[name], random.Random(name)
    call.prepare(tmp_path / "start")
    shutil.copytree(tmp_path / "start", tmp_path / "through")
    fine, _, _ = run(call, tmp_path / "through", moments, (-1, 0))
    labels = dict(moments.labels)
    assert min(map(len, labels.values())) > 5
    for rank, of_rank in sorted(labels.items()):
        numbers = {n for n, label in enumerate(of_rank, 1) if label.startswith(ALWAYS)}
        numbers |= {*draw.sample(range(1, len(of_rank) + 1), min(samples, len(of_rank)))}
        for number in sorted(numbers):
            shutil.copytree(tmp_path / "start", tmp_path / "root")
            check_moment(call, tmp_path / "root", moments, (rank, number), fine)
            shutil.rmtree(tmp_path / "root")
    gc.collect()  # a socket that was not closed fails this test, not a later one


@pytest.mark.integration  # waits for seconds
@pytest.mark.usefixtures("moments")
def test_load_that_makes_progress_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's storage takes more than twice the timeout; rank 1 waits."""
    full = {f"w{number}": torch.full((400, 400), float(number)) for number in range(16)}
    layout = uc.Layout(mesh={"dp": 2}, rules={"w*": {"dp": 0}})
    run_ranks(1, lambda comm: make_checkpointer(comm).save(tmp_path / NAME, model=full))
    read_at, slept = LocalStorage.read_at, list[float]()

    def slow(storage: LocalStorage, name: str, start: int, into: memoryview) -> None:
        if getattr(threading.current_thread(), "of_rank", None) == 0 and name.startswith("model"):
            slept.append(0.45)
            time.sleep(slept[-1])
        read_at(storage, name, start, into)

    def act(comm: Comm) -> None:
        threading.current_thread().of_rank = comm.rank  # type: ignore[attr-defined]
        target = {name: torch.zeros(200, 400) for name in full}
        options = uc.LoadOptions(timeout_seconds=1.0, verify="full")
        make_checkpointer(comm).load(tmp_path / NAME, model=target, layout=layout, options=options)
        assert all(torch.equal(target[name], full[name][:200]) for name in full)

    monkeypatch.setattr(LocalStorage, "read_at", slow)
    run_ranks(2, act)
    assert sum(slept) > 2, "that is twice the time-out"

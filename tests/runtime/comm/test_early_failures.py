"""One rank fails early: the others raise its error at once, wherever they wait."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.refusals import same_error
from tests.support.simulated_nodes import SAVE, folder_of, on_node
from unified_ckpt.core.nodes.write_alignment import WriteAlignment
from unified_ckpt.errors import FormatError, RankError, StorageError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import make_checkpointer, run_ranks, try_ranks

NAME, SECONDS = "checkpoint-1", 60.0
LOAD = uc.LoadOptions(timeout_seconds=SECONDS)
SHAPES = {"both": (40, 30), "alone": (7,)}


def wanted(rank: int) -> dict[str, torch.Tensor]:
    """Ranks 0 and 1 read one tensor together, rank 2 reads another."""
    return {"alone": torch.zeros(7)} if rank == 2 else {"both": torch.zeros(40, 30)}


def test_a_rank_that_left_before_the_exchange_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 fails while rank 1 waits for rank 0, which arrives last."""
    run_ranks(
        1,
        lambda comm: make_checkpointer(comm).save(
            tmp_path / NAME, model={n: torch.ones(s) for n, s in SHAPES.items()}
        ),
    )
    left, ready = threading.Event(), TileBuffers.prepare

    def late(tile_buffers: TileBuffers, collective: Collective, **what: Any) -> Any:
        if collective.rank == 2:
            raise StorageError("oh")
        if collective.rank == 0:
            assert left.wait(SECONDS)
        try:
            return ready(tile_buffers, collective, **what)
        finally:
            if collective.rank == 1:
                left.set()

    def act(comm: Comm) -> None:
        make_checkpointer(comm).load(tmp_path / NAME, model=wanted(comm.rank), options=LOAD)

    run_ranks(3, act)
    monkeypatch.setattr(TileBuffers, "prepare", late)
    started = time.monotonic()
    same_error(try_ranks(3, act), StorageError, "rank 2: oh")
    assert time.monotonic() - started < SECONDS / 2


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("cut", [0, 1])
def test_a_load_that_gets_on_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, verify: str
) -> None:
    """Rank 0's storage takes more than twice the timeout; the others wait."""
    names = [f"w{number}" for number in range(16)]
    full = {name: torch.arange(160_000.0).reshape(400, 400) for name in names}
    layout = uc.Layout(
        mesh={"dp": 2}, rules={"w*": {"dp": cut}}, shapes=dict.fromkeys(names, (400, 400))
    )
    run_ranks(1, lambda comm: make_checkpointer(comm).save(tmp_path / NAME, model=full))
    make, read_at, of_first = LocalStorage.__init__, LocalStorage.read_at, set[int]()

    def made(storage: LocalStorage, *args: Any, **what: Any) -> None:
        make(storage, *args, **what)
        if threading.current_thread().name == "rank-0":
            of_first.add(id(storage))

    def slow(storage: LocalStorage, name: str, start: int, into: memoryview) -> None:
        if id(storage) in of_first and name.startswith("model"):
            slept.append(0.45)
            time.sleep(slept[-1])
        read_at(storage, name, start, into)

    def act(comm: Comm) -> None:
        target = {
            name: torch.zeros_like(tensor.chunk(2, cut)[comm.rank]) for name, tensor in full.items()
        }
        options = uc.LoadOptions(timeout_seconds=1.0, verify=verify)
        make_checkpointer(comm).load(tmp_path / NAME, model=target, layout=layout, options=options)
        assert all(torch.equal(target[name], full[name].chunk(2, cut)[comm.rank]) for name in names)

    slept: list[float] = []
    monkeypatch.setattr(LocalStorage, "__init__", made)
    monkeypatch.setattr(LocalStorage, "read_at", slow)
    run_ranks(2, act)
    assert sum(slept) > 2, "that is twice the time-out"


def test_what_cannot_be_saved_ends_the_waiting_of_all_nodes(tmp_path: Path) -> None:
    """A cached background save starts with a collective of each node group."""
    nodes = [0, 0, 1, 1]
    options = SAVE.model_copy(update={"if_exists": "replace", "timeout_seconds": SECONDS})

    def act(comm: Comm) -> list[BaseException | None]:
        results: list[BaseException | None] = []
        with on_node(comm, nodes) as made:
            for barrier in range(5):
                extra = object() if barrier % 2 and comm.rank == 3 else barrier
                state = {"w": torch.full((4, 3), float(barrier))}
                try:
                    made.save_async(
                        folder_of(tmp_path, nodes[comm.rank]),
                        model=state,
                        rank_extra=extra,
                        options=options,
                    ).result(SECONDS)
                except uc.CheckpointError as error:
                    results.append(error)
                else:
                    results.append(None)
        return results

    started = time.monotonic()
    results = run_ranks(4, act)
    assert time.monotonic() - started < SECONDS / 2
    for barrier, of_ranks in enumerate(zip(*results, strict=True)):
        if barrier % 2:
            same_error(of_ranks, FormatError, "rank 3: rank_extra")
        else:
            assert of_ranks == (None,) * 4


def test_a_rank_that_cannot_listen_is_known_to_nodes_with_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes 0 and 1 share a folder, 2 and 3 another; rank 3 can open no socket."""
    make = PeerTransport.__init__

    def without_sockets(
        transport: PeerTransport, volume: WriteAlignment, find: Any, *, rank: int, **what: Any
    ) -> None:
        if threading.current_thread().name == "rank-3":
            raise OSError(errno.EMFILE, "Too many open files")
        make(transport, volume, find, rank=rank, **what)

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1, 2, 3]) as made:
            options = SAVE.model_copy(update={"timeout_seconds": SECONDS})
            place = tmp_path / f"pair-{comm.rank // 2}" / NAME
            place.parent.mkdir(exist_ok=True)
            made.save(place, model={"w": torch.ones(4, 3)}, options=options)

    run_ranks(4, act)
    shutil.rmtree(tmp_path / "pair-0")
    shutil.rmtree(tmp_path / "pair-1")
    monkeypatch.setattr(PeerTransport, "__init__", without_sockets)
    started = time.monotonic()
    same_error(try_ranks(4, act), RankError, "rank 3: OSError: .*Too many open files")
    assert time.monotonic() - started < SECONDS / 2
    monkeypatch.undo()
    run_ranks(4, act)


def test_after_commit_fails_on_all_nodes_or_none(tmp_path: Path) -> None:
    """One rank of one node fails, while a rank of the other node is late."""
    nodes = [0, 0, 1, 1]

    def after(rank: int) -> None:
        if rank == 3:
            raise StorageError("after")
        time.sleep(1.0 if rank == 1 else 0.0)

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as made:
            what = {
                "model": {"w": torch.ones(4, 3)},
                "options": SAVE,
                "after_commit": lambda _: after(comm.rank),
            }
            made.save_async(folder_of(tmp_path, nodes[comm.rank]), **what).result(SECONDS)

    same_error(try_ranks(4, act), StorageError, "rank 3: after")

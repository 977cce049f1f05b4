"""Ranks of several nodes that save to one folder: bytes of one block are written by one node,
and what stands there is what any save makes.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.managers import manager_of
from tests.support.refusals import same_error
from tests.support.reshard_cases import Case, cases
from tests.support.reshard_cases import save_case as save_alone
from tests.support.simulated_nodes import LOAD, NAME, SAVE, Held, counting, fine, on_node, states
from unified_ckpt.core.planning import save_plan
from unified_ckpt.engine.save import save as save_module
from unified_ckpt.engine.save import tiles
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage
from unified_ckpt.testing import (
    FaultPoint,
    FaultyStorage,
    FullStorage,
    SimulatedCrash,
    run_ranks,
    try_ranks,
)

__all__ = ["states"]  # a fixture
NODES = [0, 0, 1, 1]
SHAPES = {"rows": (500, 90), "columns": (300, 701), "small": (50,), "norm": (4,)}
FULL = {name: torch.arange(float(np.prod(shape))).reshape(shape) for name, shape in SHAPES.items()}
LAYOUT = uc.Layout(
    mesh={"dp": 4},
    rules={"rows": {"dp": 0}, "columns": {"dp": 1}, "small": {"dp": 0}},
    shapes=SHAPES,
)
BLOCKS = [1, 0, 4096, 1 << 20]
Storages = Callable[[int, str], LocalStorage]  # by node and folder


def contents(step: int, rank: int) -> dict[str, torch.Tensor]:
    cut = {"rows": 0, "columns": 1, "small": 0}
    return {
        name: (full + step).chunk(4, cut[name])[rank].clone() if name in cut else full + step
        for name, full in FULL.items()
    }


def save(
    root: Path,
    step: int,
    *,
    block: int | None = 4096,
    storages: Storages | None = None,
    background: bool = False,
    nodes: Sequence[int] = NODES,
    **options: object,
) -> list[uc.SaveReport | BaseException]:
    def act(comm: Comm) -> uc.SaveReport:
        node = nodes[comm.rank]
        storage = (lambda place: storages(node, place)) if storages is not None else None
        with on_node(comm, nodes, storage=storage) as made:
            told = {
                "model": contents(step, comm.rank),
                "layout": LAYOUT,
                "step": step,
                "rank_extra": ("of", comm.rank, "x" * comm.rank),
            }
            chosen = SAVE.model_copy(
                update={"timeout_seconds": 10.0, "write_alignment": block, **options}
            )
            call = made.save_async if background else made.save
            found = call(root / NAME, options=chosen, **told)
            return found.result(60) if background else found

    return try_ranks(4, act)


def check(root: Path, step: int) -> None:
    """By our own reader, and every file by its digests."""
    report = uc.verify(root / NAME, deep=True)
    assert report.ok, report.problems
    opened = uc.open(root / NAME)
    for name, full in FULL.items():
        assert torch.equal(opened["model"][name][...], full + step), name
    assert [opened.rank_extra[rank] for rank in range(4)] == [
        ("of", rank, "x" * rank) for rank in range(4)
    ]


class Writes:
    """Who wrote and synced what: file -> block -> nodes, file -> nodes."""

    def __init__(self, block: int) -> None:
        self.block, self.lock = block, threading.Lock()
        self.blocks: dict[str, dict[int, set[int]]] = {}
        self.synced: dict[str, set[int]] = {}

    def storage(self, node: int, place: str) -> LocalStorage:
        writes = self

        class Watched(LocalStorage):
            def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
                stop, file = start + sum(map(len, buffers)), name.rpartition("/")[2]
                with writes.lock:
                    for block in range(start // writes.block, -(-stop // writes.block)):
                        writes.blocks.setdefault(file, {}).setdefault(block, set()).add(node)
                super().write_at(name, start, buffers)

            def sync(self, name: str) -> None:
                with writes.lock:
                    writes.synced.setdefault(name.rpartition("/")[2], set()).add(node)
                super().sync(name)

        return Watched(place)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("block", [4096, 10_000, 1 << 30])
def test_each_block_is_written_and_synced_by_one_node(
    tmp_path: Path, block: int, background: bool
) -> None:
    writes = Writes(block)
    fine(
        save(
            tmp_path,
            3,
            block=block if block < 1 << 30 else 0,
            storages=writes.storage,
            background=background,
            fsync=True,
        )
    )
    check(tmp_path, 3)
    shared = [
        file
        for file in writes.blocks
        if file.endswith(".safetensors") and not file.startswith("extra")
    ]
    assert len(shared) == 3, "model, digests and rank_extra"
    for file in shared:
        assert all(len(nodes) == 1 for nodes in writes.blocks[file].values()), file
        assert set().union(*writes.blocks[file].values()) <= writes.synced[file], file
    everybody = set().union(*(nodes for file in shared for nodes in writes.blocks[file].values()))
    assert everybody == {0, 1}, "both nodes write"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 3]])
def test_same_checkpoint_as_from_one_node(
    tmp_path: Path, nodes: list[int], block: int, background: bool
) -> None:
    fine(save(tmp_path / "one", 5, nodes=[0, 0, 0, 0]))
    fine(save(tmp_path / "more", 5, block=block, background=background, nodes=nodes))
    check(tmp_path / "more", 5)
    one, more = (
        {file.name: file.read_bytes() for file in (tmp_path / name / NAME).iterdir()}
        for name in ("one", "more")
    )
    assert one.keys() == more.keys()
    assert {name for name in one if one[name] != more[name]} <= {"unified_checkpoint.json"}


@given(cases(max_world=6, max_tensors=3, loads=1), st.data())
@settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_ranks_on_any_nodes(tmp_path: Path, case: Case, data: st.DataObject) -> None:
    nodes = data.draw(
        st.lists(st.integers(0, 2), min_size=case.saved.world, max_size=case.saved.world)
    )
    block = data.draw(st.sampled_from([0, 1, 512, 70_000, 1 << 20]))
    tile_nbytes, background = (
        data.draw(st.sampled_from([64 << 10, 16 << 20])),
        data.draw(st.booleans()),
    )
    options = SAVE.model_copy(update={"write_alignment": block})

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as made:
            for _ in range(2):
                state = case.state(comm.rank)
                if background:
                    made.save_async(
                        root / NAME,
                        model=state,
                        options=options.model_copy(update={"if_exists": "replace"}),
                    ).result(60)
                else:
                    made.save(
                        root / NAME,
                        model=state,
                        options=options.model_copy(update={"if_exists": "replace"}),
                    )

    with TemporaryDirectory(dir=tmp_path) as name, pytest.MonkeyPatch.context() as patch:
        root = Path(name)
        patch.setattr(save_plan, "TILE_NBYTES", tile_nbytes)
        run_ranks(case.saved.world, act)
        assert uc.verify(root / NAME, deep=True).ok
        (root / "alone").mkdir()
        save_alone(case, root / "alone")
        one, more = (
            {file.name: file.read_bytes() for file in folder.iterdir()}
            for folder in (root / "alone" / NAME, root / NAME)
        )
        assert {name for name in one.keys() | more.keys() if one.get(name) != more.get(name)} <= {
            "unified_checkpoint.json"
        }


def test_load_on_the_saving_nodes(tmp_path: Path) -> None:
    fine(save(tmp_path, 2))

    def act(comm: Comm) -> None:
        target = {name: torch.zeros_like(tensor) for name, tensor in contents(0, comm.rank).items()}
        with on_node(comm, NODES) as made:
            report = made.load(tmp_path / NAME, model=target, layout=LAYOUT, options=LOAD)
        assert report.rank_extra == ("of", comm.rank, "x" * comm.rank)
        assert all(
            torch.equal(target[name], tensor) for name, tensor in contents(2, comm.rank).items()
        )

    run_ranks(4, act)


def test_two_folders_of_two_nodes_each(tmp_path: Path) -> None:
    """Nodes 0 and 1 share one folder, 2 and 3 another: shards in each, and both together are
    the checkpoint.
    """
    nodes, full = [0, 1, 2, 3], FULL["rows"]
    layout = uc.Layout(mesh={"dp": 4}, rules={"w": {"dp": 0}})

    def act(comm: Comm) -> None:
        folder = tmp_path / f"pair-{comm.rank // 2}" / NAME
        with on_node(comm, nodes) as made:
            for step in range(3):
                mine = {
                    "w": (full + step).chunk(4)[comm.rank].clone(),
                    "b": torch.arange(9.0) + step,
                }
                options = SAVE.model_copy(update={"if_exists": "replace", "write_alignment": 4096})
                if step % 2:
                    made.save_async(
                        folder, model=mine, layout=layout, options=options, step=step
                    ).result(60)
                else:
                    made.save(folder, model=mine, layout=layout, options=options, step=step)
                target = {"w": torch.zeros_like(full), "b": torch.zeros(9)}
                assert made.load(folder, model=target, options=LOAD).step == step
                assert torch.equal(target["w"], full + step)
                assert torch.equal(target["b"], torch.arange(9.0) + step)

    run_ranks(4, act)
    assert [
        len(list((tmp_path / f"pair-{i}" / NAME).glob("model_shards*.safetensors"))) for i in (0, 1)
    ] == [2, 2]


def test_repeated_saves_leave_nothing(tmp_path: Path) -> None:
    """No sockets, threads or keys more after 30 saves than after 6, and the plan is made once."""
    held: list[Held] = []
    keys: list[int] = []

    def act(comm: Comm) -> None:
        with on_node(comm, NODES) as made:
            options = SAVE.model_copy(update={"if_exists": "replace", "write_alignment": 4096})
            for turn in range(30):
                state = contents(turn, comm.rank)
                if turn % 2:
                    made.save(tmp_path / NAME, model=state, layout=LAYOUT, options=options)
                else:
                    made.save_async(
                        tmp_path / NAME, model=state, layout=LAYOUT, options=options
                    ).result(60)
                if turn in (5, 29):
                    with counting(comm):
                        if comm.rank == 0:
                            keys.append(comm._store.num_keys())
                            held.append(Held())
                            held[0].no_more()

    run_ranks(4, act)
    assert keys[1] <= keys[0]


# what goes wrong


def full_at(number: int, node: int) -> Storages:
    return lambda at, place: FullStorage(place, number) if at == node else LocalStorage(place)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("node", [0, 1])
def test_full_disk_for_one_node(tmp_path: Path, node: int, background: bool) -> None:
    """One text for all ranks, nothing left behind, and the older checkpoint is as it was."""
    fine(save(tmp_path, 1))
    number = 0
    while True:
        found = save(
            tmp_path,
            2,
            storages=full_at(number, node),
            background=background,
            if_exists="replace",
        )
        if not any(isinstance(one, BaseException) for one in found):
            break
        same_error(found, uc.StorageError, "No space left on device")
        assert os.listdir(tmp_path) == [NAME]
        check(tmp_path, 1)
        number += 3
    assert number > 6
    check(tmp_path, 2)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # a thread that serves dies with its process
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", [[1], [0, 1]])
def test_crash_at_any_operation(tmp_path: Path, where: list[int], every: int) -> None:
    """The older checkpoint or the newer one is there, and the next save gets through."""
    start, seen = tmp_path / "start", set[int]()
    fine(save(start, 1))
    shutil.copytree(start, tmp_path / "through")
    fuse = FaultPoint(None)
    fine(save(tmp_path / "through", 2, storages=faulty(where, fuse), if_exists="replace"))
    for at in range(0, len(fuse.operations), every):
        root, fuse = tmp_path / f"at-{at}", FaultPoint(at)
        shutil.copytree(start, root)
        found = save(
            root, 2, storages=faulty(where, fuse), if_exists="replace", timeout_seconds=6.0
        )
        assert all(
            isinstance(one, SimulatedCrash | uc.CheckpointError | uc.SaveReport) for one in found
        ), found
        step = uc.open(root / NAME).step
        seen.add(step)
        assert step == 2 or not any(isinstance(one, uc.SaveReport) for one in found)
        check(root, step)
        fine(save(root, 3, if_exists="replace"))
        check(root, 3)
        shutil.rmtree(root)
    assert 1 in seen


def faulty(where: Sequence[int], fuse: FaultPoint) -> Storages:
    return lambda node, place: FaultyStorage(place, fuse) if node in where else LocalStorage(place)


@pytest.mark.parametrize("background", [False, True])
def test_rank_fails_during_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """The ranks that wait for its part of a tile hear why long before their time is out."""
    real = tiles.tile_spans
    once = iter([True])

    def broken(*args: object, **what: object) -> object:
        if next(once, False):
            raise ValueError("no such piece")
        return real(*args, **what)  # type: ignore[arg-type]

    monkeypatch.setattr(tiles, "tile_spans", broken)
    same_error(
        save(tmp_path, 1, background=background, timeout_seconds=30.0),
        uc.RankError,
        "ValueError: no such piece",
    )
    assert os.listdir(tmp_path) == []


def test_rank_receives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: PeerTransport, *_: object) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(PeerTransport, "_serve", deaf)
    found = save(tmp_path, 1, timeout_seconds=3.0)
    assert all(isinstance(one, uc.RankError) for one in found), found
    assert os.listdir(tmp_path) == []


def test_late_bytes_of_an_ended_save_are_refused(tmp_path: Path) -> None:
    """They come late, and the save that they name has failed or is done."""

    def act(comm: Comm) -> str:
        with on_node(comm, [0, 1]) as made:
            made.save(tmp_path / NAME, model={"w": torch.ones(3)}, options=SAVE)
            ((_, land),) = made._topologies.values()
            assert land is not None
            assert land.transport is not None
            if comm.rank == 1:
                land.transport.write("ab" * 8, 0, "model.safetensors", 0, [memoryview(b"late")])
                with pytest.raises(
                    uc.StorageError, match="save abababababababab: this rank does not accept bytes"
                ):
                    land.transport.flush_writes()
            comm.begin_collective("end", cached=False, timeout_seconds=10)
            return "ok"

    assert run_ranks(2, act) == ["ok", "ok"]
    assert uc.verify(tmp_path / NAME, deep=True).ok


def test_one_way_visibility_is_refused(tmp_path: Path) -> None:
    """A copy of a folder that somebody keeps, say: to take it for shared would lose one node's
    bytes.
    """
    (tmp_path / "other").mkdir()

    class OneWay(LocalStorage):
        def size(self, name: str) -> int | None:
            found = super().size(name)
            return found if found is not None else LocalStorage(str(tmp_path)).size(name)

    def storages(node: int, place: str) -> LocalStorage:
        return LocalStorage(str(tmp_path)) if node == 0 else OneWay(str(tmp_path / "other"))

    same_error(
        save(tmp_path, 1, storages=storages),
        uc.StorageError,
        "only one side sees the other's files",
    )
    assert sorted(os.listdir(tmp_path)) == ["other"]
    assert os.listdir(tmp_path / "other") == []


def test_plan_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_plans, real = [], save_module.make_plan
    monkeypatch.setattr(
        save_module,
        "make_plan",
        lambda *args, **what: (made_plans.append(1), real(*args, **what))[1],
    )

    def act(comm: Comm) -> None:
        with on_node(comm, NODES) as made:
            for turn in range(3):
                made.save(
                    tmp_path / f"{turn}",
                    model=contents(turn, comm.rank),
                    layout=LAYOUT,
                    options=SAVE,
                )

    run_ranks(4, act)
    assert len(made_plans) == 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_manager_on_two_nodes_with_one_root(tmp_path: Path, asynchronous: bool) -> None:
    """One rank removes what the rules do not keep, once for all nodes; all start from the same
    step.
    """

    def act(comm: Comm) -> list[str]:
        options = uc.SaveOptions(timeout_seconds=30, fsync=False, write_alignment=4096)
        with manager_of(
            comm,
            tmp_path,
            save_options=options,
            interval_steps=1,
            keep_latest=2,
            asynchronous=asynchronous,
            node=f"m{comm.rank // 2}",
        ) as manager:
            for step in range(1, 6):
                manager.save(step, model=contents(step, comm.rank), layout=LAYOUT)
            manager.wait()
            target = {
                name: torch.zeros_like(tensor) for name, tensor in contents(0, comm.rank).items()
            }
            report = manager.restore(model=target, layout=LAYOUT)
        assert report is not None
        assert report.step == 5
        assert all(
            torch.equal(target[name], tensor) for name, tensor in contents(5, comm.rank).items()
        )
        return sorted(os.listdir(tmp_path))

    assert run_ranks(4, act) == [["checkpoint-4", "checkpoint-5"]] * 4

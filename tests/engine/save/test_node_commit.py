"""A save by several nodes is there on all of them or on none: whatever stops, and wherever, the
older or the newer one loads.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.node_commits import (
    FULL,
    LAYOUT,
    NODES,
    QUICK,
    REPLACE,
    contents,
    faulty,
    full_at,
    left,
    load_all,
    loads,
    save,
)
from tests.support.refusals import same_error
from tests.support.simulated_nodes import (
    LOAD,
    NAME,
    fine,
    folder_of,
    keys_in_store,
    on_node,
)
from unified_ckpt.engine.save import probe_topology as lands_module
from unified_ckpt.engine.save import save as save_module
from unified_ckpt.errors import StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import FaultPoint, SimulatedCrash, run_ranks, try_ranks

pytestmark = pytest.mark.slow  # minutes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def stop_everywhere(
    tmp_path: Path,
    check: Callable[[Path], None],
    *,
    where: Sequence[int],
    exists: bool,
    options: uc.SaveOptions,
    every: int,
) -> None:
    """Saves step 2 again and again, its storage stopped on the nodes `where` at an operation:
    each of the last, where names change, and one in `every` of those before.
    """
    start = tmp_path / "start"
    fine(save(start, 1, name=NAME if exists else "other"))
    shutil.copytree(start, tmp_path / "through")
    fuse = FaultPoint(None)
    fine(save(tmp_path / "through", 2, storages=faulty(where, fuse), options=options))
    assert loads(tmp_path / "through") == 2
    count, last = len(fuse.operations), 9 * len(where)
    assert count > 20 * len(where)
    for at in range(count):
        if at < count - last and at % every:
            continue
        root, fuse = tmp_path / f"at-{at}", FaultPoint(at)
        shutil.copytree(start, root)
        found = save(root, 2, storages=faulty(where, fuse), options=options)
        assert fuse.triggered
        assert all(
            isinstance(one, SimulatedCrash | uc.CheckpointError | uc.SaveReport) for one in found
        ), found
        if any(isinstance(one, uc.SaveReport) for one in found):
            assert loads(root) == 2, "a rank has said that it is there"
        check(root)
        shutil.rmtree(root)


WHERE = [pytest.param([1], id="one node"), pytest.param([0, 1], id="all")]
EVERY = [20, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("where", WHERE)
def test_crash_while_replacing(tmp_path: Path, where: list[int], every: int) -> None:
    """The older one or the newer one is there as a whole, and the next save gets through."""
    seen = set[int]()

    def check(root: Path) -> None:
        seen.add(loads(root))
        fine(save(root, 3, options=REPLACE))
        assert loads(root) == 3

    stop_everywhere(tmp_path, check, where=where, exists=True, options=REPLACE, every=every)
    assert seen == {1, 2}


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("where", WHERE)
def test_crash_while_creating(tmp_path: Path, where: list[int], every: int) -> None:
    def check(root: Path) -> None:
        assert loads(root, name="other") == 1
        found = load_all(root, NAME)
        if any(isinstance(one, BaseException) for one in found):
            assert all(
                isinstance(one, uc.NotFoundError | uc.IncompleteError | uc.FormatError)
                for one in found
            ), found
        else:
            assert set(found) == {2}
        fine(save(root, 3, options=REPLACE))
        assert loads(root) == 3

    stop_everywhere(tmp_path, check, where=where, exists=False, options=QUICK, every=every)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("node", [0, 1])
def test_full_disk_on_one_node(tmp_path: Path, node: int, background: bool) -> None:
    """One text for all ranks, nothing left behind, and the older checkpoint is as it was."""
    fine(save(tmp_path, 1))
    before, number = left(tmp_path), 0
    while True:
        found = save(
            tmp_path, 2, storages=full_at(number, node), options=REPLACE, background=background
        )
        if not any(isinstance(one, BaseException) for one in found):
            break
        same_error(found, uc.StorageError, "No space left on device")
        assert left(tmp_path) == before, number
        assert loads(tmp_path) == 1, number
        number += 1
    assert number > 8
    assert loads(tmp_path) == 2


def test_full_disk_with_a_new_name(tmp_path: Path) -> None:
    fine(save(tmp_path, 1, name="other"))
    number = 0
    while True:
        found = save(tmp_path, 2, storages=full_at(number, 1))
        if not any(isinstance(one, BaseException) for one in found):
            break
        same_error(found, uc.StorageError, "No space left on device")
        assert left(tmp_path) == {0: ["other"], 1: ["other"]}, number
        number += 1
    assert loads(tmp_path) == 2


class Stuck(LocalStorage):
    """A file system that gives no folder another name."""

    def rename(self, old: str, new: str) -> None:
        raise StorageError(f"{self.path(old)}: rename failed: Input/output error")

    def exchange(self, old: str, new: str) -> bool:
        raise StorageError(f"{self.path(old)}: exchange failed: Input/output error")


class TwoRenames(LocalStorage):
    """A file system that cannot swap two names in one step."""

    def exchange(self, old: str, new: str) -> bool:
        return False


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("other", [LocalStorage, TwoRenames])
@pytest.mark.parametrize("node", [0, 1])
def test_rename_fails_on_one_node(
    tmp_path: Path, node: int, other: type[LocalStorage], exists: bool
) -> None:
    """The other one has given it already, and takes it back."""
    fine(save(tmp_path, 1, name=NAME if exists else "other"))
    before = left(tmp_path)
    found = save(
        tmp_path,
        2,
        storages=lambda at, place: (Stuck if at == node else other)(place),
        options=REPLACE,
    )
    same_error(found, uc.StorageError, "Input/output error")
    assert left(tmp_path) == before
    assert loads(tmp_path, name=NAME if exists else "other") == 1


# if_exists


def test_if_exists(tmp_path: Path) -> None:
    first = fine(save(tmp_path, 1))
    same_error(save(tmp_path, 2), uc.StorageError, "holds a committed checkpoint")
    kept = fine(save(tmp_path, 2, options=QUICK.model_copy(update={"if_exists": "keep"})))
    assert {report.id for report in (*first, *kept)} == {first[0].id}
    assert {report.step for report in kept} == {1}
    assert loads(tmp_path) == 1
    fine(save(tmp_path, 2, options=REPLACE))
    assert loads(tmp_path) == 2
    assert left(tmp_path) == {0: [NAME], 1: [NAME]}


@pytest.mark.parametrize("node", [0, 1])
def test_existing_save_on_one_node_only(tmp_path: Path, node: int) -> None:
    """It is no checkpoint: "keep" does not keep it; "error" says so."""
    fine(save(tmp_path, 1))
    shutil.rmtree(folder_of(tmp_path, node))
    same_error(save(tmp_path, 2), uc.StorageError, "that is not on every node")
    fine(save(tmp_path, 2, options=QUICK.model_copy(update={"if_exists": "keep"})))
    assert loads(tmp_path) == 2


def test_error_before_staging_on_one_node(tmp_path: Path) -> None:
    """The other node's ranks hear of it at once."""
    fine(save(tmp_path, 1))
    folder = folder_of(tmp_path, 1)
    folder.rename(folder.with_name(f".replaced-{'0' * 16}-{NAME}"))
    error = same_error(
        save(tmp_path, 2), uc.StorageError, "an interrupted replacement|not on every node"
    )
    assert "did not" not in str(error)


# what goes along


@pytest.mark.parametrize("background", [False, True])
def test_attach_extra_and_metrics(tmp_path: Path, background: bool) -> None:
    """On every node: each folder may be the one that is left."""

    def attach(folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")

    fine(save(tmp_path, 4, attach=attach, metrics={"loss": 0.5}, background=background))
    for node in (0, 1):
        folder = folder_of(tmp_path, node)
        assert (folder / "config.json").read_text() == "{}"
        told = json.loads((folder / names.MANIFEST).read_text())
        assert (told["metrics"], told["step"]) == ({"loss": 0.5}, 4)
        assert told["node_group"] == {
            "number": node,
            "count": 2,
            "ranks": [2 * node, 2 * node + 1],
            "world_size": 4,
            "totals": {"model": [3, 4 * (500 * 90 + 900 + 5)]},
            "replicas": [],
        }
        assert uc.verify(folder, deep=True).ok
    assert (
        len(
            {
                json.loads((folder_of(tmp_path, m) / names.MANIFEST).read_text())["save_id"]
                for m in (0, 1)
            }
        )
        == 1
    )
    assert loads(tmp_path) == 4


def test_attach_fails_on_one_node(tmp_path: Path) -> None:
    fine(save(tmp_path, 1))
    before = left(tmp_path)

    def attach(folder: str) -> None:
        if "node-1" in folder:
            raise ValueError("no config today")

    same_error(
        save(tmp_path, 2, attach=attach, options=REPLACE),
        uc.RankError,
        "ValueError: no config today",
    )
    assert left(tmp_path) == before
    assert loads(tmp_path) == 1


# saves in a row


@pytest.mark.parametrize("background", [False, True])
def test_second_save_reuses_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    counts = {"plan": 0, "rules": 0, "find": 0}

    def counted(module: object, attribute: str, name: str) -> None:
        real = getattr(module, attribute)

        def call(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, attribute, call)

    counted(save_module, "make_plan", "plan")
    counted(save_module, "local_shardings", "rules")

    def act(comm: Comm) -> list[int]:
        keys = []
        with on_node(comm, NODES) as made:
            for turn in range(30):
                state = contents(turn, comm.rank)
                place = folder_of(tmp_path, NODES[comm.rank])
                if background:
                    made.save_async(
                        place, model=state, layout=LAYOUT, step=turn, options=REPLACE, extra=turn
                    ).result(60)
                else:
                    made.save(
                        place, model=state, layout=LAYOUT, step=turn, options=REPLACE, extra=turn
                    )
                if turn in (5, 29):
                    keys.append(keys_in_store(comm))
        return keys

    keys = run_ranks(4, act)[0]
    assert (counts["plan"], counts["rules"]) == (4, 4), "once for each rank"
    assert keys[1] < keys[0] + 60, f"keys in the store: {keys}"


def test_layout_changes_and_returns(tmp_path: Path) -> None:
    """Plans and totals are those of the state that is saved."""

    def act(comm: Comm) -> None:
        place = folder_of(tmp_path, NODES[comm.rank])
        with on_node(comm, NODES) as made:
            for step, keys in enumerate([("w", "o", "b"), ("b",), ("w", "b"), ("w", "o", "b")]):
                state = {
                    key: tensor for key, tensor in contents(step, comm.rank).items() if key in keys
                }
                layout = uc.Layout(
                    mesh={"dp": 4},
                    rules={k: {"dp": int(k == "o")} for k in keys if k != "b"},
                    shapes={"w": (500, 90), "o": (30, 30)},
                )
                made.save(place, model=state, layout=layout, step=step, options=REPLACE)
                target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
                made.load(place, model=target, layout=layout, options=LOAD)
                assert all(torch.equal(target[key], state[key]) for key in state), (step, comm.rank)

    run_ranks(4, act)


def test_alternating_save_and_load(tmp_path: Path) -> None:
    """What ranks put together within a node for a save is not what they put together for a load."""

    def act(comm: Comm) -> None:
        place = folder_of(tmp_path, NODES[comm.rank])
        with on_node(comm, NODES) as made:
            for step in range(6):
                state = contents(step, comm.rank)
                made.save(place, model=state, layout=LAYOUT, step=step, options=REPLACE)
                target = {
                    key: torch.zeros(shape)
                    for key, shape in (("w", (500, 90)), ("o", (30, 30)), ("b", (5,)))
                }
                made.load(place, model=target, options=LOAD)
                assert all(torch.equal(target[key], FULL[key] + step) for key in FULL), (
                    step,
                    comm.rank,
                )

    run_ranks(4, act)


def test_lazy_saves(tmp_path: Path) -> None:
    """A step of the optimizer waits for the copy; what is saved is what was there at the call."""

    start = torch.nn.Linear(400, 300)

    def act(comm: Comm) -> None:
        net = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        place = folder_of(tmp_path, NODES[comm.rank])
        with on_node(comm, NODES) as made:
            for step in range(3):
                net(torch.ones(2, 400)).sum().backward()
                optimizer.step()
                expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
                pending = made.save_async(
                    place, model=net, optimizer=optimizer, step=step, options=REPLACE, lazy=True
                )
                net(torch.ones(2, 400)).sum().backward()
                optimizer.step()
                assert pending.staged()
                assert pending.result(60).step == step
                target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
                made.load(place, model=target, options=LOAD)
                assert all(torch.equal(target[name], expected[name]) for name in expected), step

    run_ranks(4, act)


def test_snapshot_fails_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hear of it before their time is out."""
    real = save_module.copy_tensors
    once = iter([True])

    def broken(snapshot: object, keys: object) -> object:
        if next(once, False):
            raise ValueError("no memory to copy into")
        return real(snapshot, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(save_module, "copy_tensors", broken)
    found = save(tmp_path, 1, background=True)
    same_error(found, uc.RankError, "no memory to copy into")
    assert left(tmp_path) == {0: [], 1: []}


# folders


def test_ranks_of_one_node_with_different_folders(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1, 1]) as made:
            made.save(folder_of(tmp_path, comm.rank), model={"w": torch.ones(3)}, options=QUICK)

    same_error(
        try_ranks(3, act),
        uc.StorageError,
        "this rank does not see the folder that rank 1 of its node sees",
    )
    assert [os.listdir(folder_of(tmp_path, node).parent) for node in range(3)] == [[], [], []]


def test_probe_cannot_be_written(tmp_path: Path) -> None:
    found = save(tmp_path, 1, storages=full_at(0, 1))
    same_error(found, uc.StorageError, "No space left on device")
    assert left(tmp_path) == {0: [], 1: []}
    assert lands_module._PROBE_PREFIX.startswith("."), (
        "a name that no trainer takes for a checkpoint"
    )

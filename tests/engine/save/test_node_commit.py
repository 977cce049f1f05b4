"""A save by several nodes, one save after another: it is committed on all of them or on none."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.node_commits import (
    EACH,
    LAYOUT,
    QUICK,
    REPLACE,
    SHARED,
    Ranks,
    contents,
    loads,
    save,
)
from tests.support.engine.cluster.simulated_nodes import (
    LOAD,
    NAME,
    ResourceUsage,
    counting,
    fine,
    folder_of,
    on_node,
)
from tests.support.engine.compressed import trained_state
from tests.support.harness import run_ranks, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.engine.cluster import save_scope
from unified_ckpt.engine.save import scope
from unified_ckpt.errors import StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange import probe_topology as probe_topology_module
from unified_ckpt.runtime.storage.storage import LocalStorage


class Stuck(LocalStorage):
    """A file system that cannot rename folders."""

    def _rename(self, old: str, new: str) -> None:
        raise StorageError(f"{self.path(old)}: rename failed: Input/output error")

    def _exchange(self, old: str, new: str) -> bool:
        raise StorageError(f"{self.path(old)}: exchange failed: Input/output error")


class TwoRenames(LocalStorage):
    """A file system that cannot swap two names in one step."""

    def _exchange(self, old: str, new: str) -> bool:
        return False


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("other", [LocalStorage, TwoRenames])
@pytest.mark.parametrize("node", [0, 1])
def test_rename_fails_on_one_node(
    tmp_path: Path, node: int, other: type[LocalStorage], exists: bool
) -> None:
    """The other node has renamed already, and rolls back; no rank waits for one that waits."""
    fine(save(tmp_path, 1, name=NAME if exists else "other"))
    before, started = EACH.left(tmp_path), time.monotonic()
    outcomes = save(
        tmp_path,
        2,
        storages=lambda rank, place: (Stuck if rank // 2 == node else other)(place),
        options=REPLACE.model_copy(update={"timeout_seconds": 60.0}),
    )
    assert time.monotonic() - started < 9.0  # a leader waits 10 s for ranks to stop
    same_error(outcomes, uc.StorageError, "Input/output error")
    assert EACH.left(tmp_path) == before
    assert loads(tmp_path, name=NAME if exists else "other") == 1


# if_exists


@pytest.mark.parametrize("node", [0, 1])
def test_existing_save_on_one_node_only(tmp_path: Path, node: int) -> None:
    """An incomplete checkpoint: `keep` replaces it, and `error` reports it."""
    fine(save(tmp_path, 1))
    shutil.rmtree(folder_of(tmp_path, node))
    same_error(save(tmp_path, 2), uc.StorageError, "that is not on every node")
    fine(save(tmp_path, 2, options=QUICK.model_copy(update={"if_exists": "keep"})))
    assert loads(tmp_path) == 2


def test_error_before_staging_on_one_node(tmp_path: Path) -> None:
    """The other node's ranks raise the error at once, without a timeout."""
    fine(save(tmp_path, 1))
    folder = folder_of(tmp_path, 1)
    folder.rename(folder.with_name(f".replaced-{'0' * 16}-{NAME}"))
    error = same_error(
        save(tmp_path, 2), uc.StorageError, "an interrupted replacement|not on every node"
    )
    assert "did not" not in str(error)


# attached files, extra and metrics


@pytest.mark.parametrize("background", [False, True])
def test_attach_extra_and_metrics(tmp_path: Path, background: bool) -> None:
    """Every node stores them, since any folder may be the only survivor."""

    def attach(folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")

    fine(save(tmp_path, 4, attach=attach, metrics={"loss": 0.5}, background=background))
    for node in (0, 1):
        folder = folder_of(tmp_path, node)
        assert (folder / "config.json").read_text() == "{}"
        manifest = json.loads((folder / names.MANIFEST).read_text())
        assert (manifest["metrics"], manifest["step"]) == ({"loss": 0.5}, 4)
        assert manifest["node_group"] == {
            "number": node,
            "count": 2,
            "ranks": [2 * node, 2 * node + 1],
            "world_size": 4,
            "totals": {part: [3, 4 * (500 * 90 + 900 + 5)] for part in ("model", "ema")},
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
    before = EACH.left(tmp_path)

    def attach(folder: str) -> None:
        if "node-1" in folder:
            raise ValueError("no config today")

    same_error(
        save(tmp_path, 2, attach=attach, options=REPLACE),
        uc.RankError,
        "ValueError: no config today",
    )
    assert EACH.left(tmp_path) == before
    assert loads(tmp_path) == 1


# consecutive saves


TWICE = REPLACE.model_copy(update={"node_copies": 2})


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("ranks", "options", "planned"),
    [
        (SHARED, REPLACE, ["make_plan"]),
        (EACH, REPLACE, ["make_plan", "local_shardings"]),
        (EACH, TWICE, ["make_plan", "local_shardings", "plan_copies"]),
    ],
)
def test_saves_reuse_the_plan_and_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: Ranks,
    options: uc.SaveOptions,
    planned: Sequence[str],
    background: bool,
) -> None:
    """Plans are made once. Keys, threads and open files do not grow between saves 4 and 14."""
    counts, keys = Counter[str](), list[int]()
    resources: list[ResourceUsage] = []
    for name in planned:
        module = scope if ranks is SHARED else save_scope
        real = getattr(module, name)

        def counted(*args: object, name: str = name, real: Any = real, **kwargs: object) -> object:
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    def act(comm: Comm) -> None:
        with on_node(comm, ranks.nodes) as checkpointer:
            for step in range(14):
                call = checkpointer.save_async if background else checkpointer.save
                call(
                    ranks.place(tmp_path, comm.rank) / NAME,
                    model=contents(step, comm.rank),
                    layout=LAYOUT,
                    step=step,
                    options=options,
                    extra=step,
                )
                checkpointer.wait()
                if step in (3, 13):
                    with counting(comm):
                        if comm.rank == 0:
                            keys.append(comm._store.num_keys())
                            resources.append(ResourceUsage())
                            resources[0].no_more()

    run_ranks(4, act)
    assert counts == dict.fromkeys(planned, 4), "once for each rank"
    assert keys[1] < keys[0] + 60, f"keys in the store: {keys}"


def test_layout_changes_and_returns(tmp_path: Path) -> None:
    """Plans and totals follow the state of each save."""

    def act(comm: Comm) -> None:
        place = folder_of(tmp_path, EACH.nodes[comm.rank])
        with on_node(comm, EACH.nodes) as checkpointer:
            for step, keys in enumerate([("w", "o", "b"), ("b",), ("w", "b"), ("w", "o", "b")]):
                state = {
                    key: tensor for key, tensor in contents(step, comm.rank).items() if key in keys
                }
                layout = uc.Layout(
                    mesh={"dp": 4},
                    rules={k: {"dp": int(k == "o")} for k in keys if k != "b"},
                    shapes={k: s for k, s in {"w": (500, 90), "o": (30, 30)}.items() if k in keys},
                )
                checkpointer.save(place, model=state, layout=layout, step=step, options=REPLACE)
                target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
                checkpointer.load(place, model=target, layout=layout, options=LOAD)
                assert all(torch.equal(target[key], state[key]) for key in state), (step, comm.rank)

    run_ranks(4, act)


# folders


def test_ranks_of_one_node_with_different_folders(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1, 1]) as checkpointer:
            checkpointer.save(
                folder_of(tmp_path, comm.rank), model={"w": torch.ones(3)}, options=QUICK
            )

    same_error(
        try_ranks(3, act),
        uc.StorageError,
        "this rank does not see the folder that rank 1 of its node sees",
    )
    assert [os.listdir(folder_of(tmp_path, node).parent) for node in range(3)] == [[], [], []]
    assert probe_topology_module._PROBE_PREFIX.startswith("."), "trainers ignore hidden names"


# compression


def save_trained(
    root: Path,
    *,
    dim: int | None,
    whole: bool = True,
    times: int = 1,
    drift: float = 0,
    background: bool = False,
) -> list[list[uc.SaveReport | uc.CheckpointError]]:
    """Save compressed on two nodes. `dim`: along which ranks cut the parameter `cut`, None if each
    has all. `whole`: whether there is a second one, which ranks have whole. `drift`: of a master of
    it on the second rank, and of its model, which are not compared then.
    """
    options = QUICK.model_copy(update={"compression": "O1", "if_exists": "replace"})
    if drift:
        options = options.model_copy(update={"check_replicas": "never"})

    def act(comm: Comm) -> list[uc.SaveReport | uc.CheckpointError]:
        state = trained_state({"cut": (128, 128), **({"whole": (3, 64)} if whole else {})})
        if whole:
            master = state["master_weights"]["whole"]
            master[1, 7] += comm.rank * drift
            state["model"]["whole"] = master.bfloat16()
        layout = None
        if dim is not None:
            layout = uc.Layout({"dp": 2}, {"cut": {"dp": dim}}, {"cut": (128, 128)})
            for tensors in state.values():
                for name, tensor in tensors.items():
                    if name.startswith("cut") and tensor.shape:
                        tensors[name] = tensor.chunk(2, dim)[comm.rank].clone()
        reports = list[uc.SaveReport | uc.CheckpointError]()
        with on_node(comm, [0, 1]) as checkpointer:
            call = checkpointer.save_async if background else checkpointer.save
            for _ in range(times):
                try:
                    path = folder_of(root, comm.rank)
                    saved = call(path, **state, layout=layout, options=options)
                    reports.append(saved.result(60) if background else saved)
                except uc.CheckpointError as error:
                    reports.append(error)
        return reports

    return run_ranks(2, act)


@pytest.mark.parametrize(("dim", "plain"), [(0, 0), (1, 3), (None, 0)])
def test_tensors_with_cut_rows_are_counted_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dim: int | None, plain: int
) -> None:
    for background in (False, True):
        caplog.clear()
        for reports in save_trained(tmp_path, dim=dim, times=2, background=background):
            for report in reports:
                assert isinstance(report, uc.SaveReport), report
                assert report.plain_tensors == plain
                assert report.encoded_nbytes > 0
                assert report.outliers == (0 if plain else 6)
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == bool(plain)
        for text in warnings:
            assert "compression='O1': these tensors are not compressed" in text
            assert all(name in text for name in ("master_weights:cut", "optimizer:cut/exp_avg_sq"))


@pytest.mark.parametrize("background", [False, True])
def test_models_that_differ_between_nodes_give_no_masters(tmp_path: Path, background: bool) -> None:
    """A load could decode a master of one node beside the model of another one."""
    for dim in (None, 0):
        (first, second) = save_trained(tmp_path, dim=dim, drift=1.0, background=background)
        (error,) = first
        assert isinstance(error, uc.LayoutError), error
        assert str(error) == str(second[0])
        assert "nodes hold different bytes of the model of these master weights" in str(error)
        assert "whole" in str(error)
        assert "cut" not in str(error)
        assert not folder_of(tmp_path, 0).exists()
        assert not folder_of(tmp_path, 1).exists()
    for reports in save_trained(tmp_path, dim=None, drift=1e-9):
        assert isinstance(reports[0], uc.SaveReport), "masters alone may drift"


@pytest.mark.parametrize("whole", [True, False])
def test_a_part_of_node_folders_is_deleted_with_its_exceptions(tmp_path: Path, whole: bool) -> None:
    """Also where a folder has only shards of it; until then, its exceptions are repaired."""
    save_trained(tmp_path, dim=0, whole=whole)
    folders = [folder_of(tmp_path, node) for node in (0, 1)]
    assert (folders[0] / "master_weights.safetensors").exists() == whole
    exceptions = folders[0] / "master_weights.exceptions.safetensors"
    body = exceptions.read_bytes()
    exceptions.write_bytes(body[:-1] + b"\xff")
    assert not uc.verify(folders[0]).ok
    assert uc.repair(folders[0], folders[1:]).ok
    assert exceptions.read_bytes() == body
    for path in (path for folder in folders for path in folder.glob("master_weights*")):
        path.unlink()
    for folder in folders:
        assert uc.verify(folder, deep=True).ok
        assert uc.repair(folder, []).ok
    uc.convert(folders, tmp_path / "merged", fsync=False, compare=False)
    with uc.open(tmp_path / "merged") as source:
        assert source.parts == ("model", "optimizer")


def test_masters_of_node_folders_need_their_model(tmp_path: Path) -> None:
    save_trained(tmp_path, dim=0, whole=False)
    folders = [folder_of(tmp_path, node) for node in (0, 1)]
    for path in (path for folder in folders for path in folder.glob("model*")):
        path.unlink()
    for folder in folders:
        (problem,) = uc.verify(folder).problems
        assert problem.startswith("master_weights is stored beside the part model")
    with pytest.raises(uc.IncompleteError, match=r"master_weights:.* is stored beside model:"):
        uc.convert(folders, tmp_path / "lost", fsync=False)

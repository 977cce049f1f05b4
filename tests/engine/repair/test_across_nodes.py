"""Nodes that repair each other's folders over TCP, in one call."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.damage import flip, shorten
from tests.support.engine.cluster.node_damage import save
from tests.support.engine.cluster.simulated_nodes import CloseToOpenStorage, folder_of, on_node
from tests.support.engine.repair.damaged_folders import body, tensors
from tests.support.harness import run_ranks
from unified_ckpt.engine.repair import across_nodes
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm

NODES = [0, 0, 1, 2]  # node 0 has whole copies, the others a half of another copy each


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save(root, NODES, copies=2)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


def repair(root: Path, nodes: Sequence[int] = NODES) -> tuple[uc.RepairReport, ...]:
    def act(comm: Comm) -> tuple[uc.RepairReport, ...]:
        with on_node(comm, nodes) as checkpointer:
            return checkpointer.repair(folder_of(root, nodes[comm.rank]))

    reports = run_ranks(len(nodes), act)
    assert all(report == reports[0] for report in reports), "the same on every rank"
    return reports[0]


def test_each_node_is_repaired_from_the_others(root: Path) -> None:
    folders = [folder_of(root, node) for node in range(3)]
    right = [body(folder) for folder in folders]
    (folders[0] / names.EXTRA).unlink()
    shorten(tensors(folders[1], "model")[0])
    flip(folders[1] / names.EXTRA)
    flip(tensors(folders[2], "model")[0])
    reports = repair(root)
    assert [report.ok for report in reports] == [True] * 3, [report.problems for report in reports]
    assert [len(report.repaired) for report in reports] == [1, 2, 1]
    assert [body(folder) for folder in folders] == right
    assert [report.damage for report in repair(root)] == [()] * 3


def test_failure_of_one_node_does_not_stop_the_others(root: Path) -> None:
    """No copy of what node 1's rank stored, none of node 2's manifest; node 0 is repaired."""
    flip(folder_of(root, 1) / names.RANK_EXTRA)
    (folder_of(root, 2) / names.MANIFEST).unlink()
    (folder_of(root, 0) / "model.safetensors.index.json").unlink()
    reports = repair(root)
    assert [report.ok for report in reports] == [True, False, False]
    assert "no copy of it is intact" in reports[1].problems[0]
    assert "copy the whole folder from a copy" in reports[2].problems[0]
    assert any("not used: " in note and "node-2" in note for note in reports[0].notes)
    assert uc.verify(folder_of(root, 0), deep=True).ok


def test_node_with_another_save_and_node_without_folder(root: Path, tmp_path: Path) -> None:
    save(tmp_path / "stale", NODES, copies=2)
    shutil.rmtree(folder_of(root, 1))
    shutil.copytree(folder_of(tmp_path / "stale", 1), folder_of(root, 1))
    shutil.rmtree(folder_of(root, 2))
    flip(tensors(folder_of(root, 0), "model")[0])
    before = [body(folder_of(root, node)) for node in (0, 1)]
    reports = repair(root)
    assert [report.ok for report in reports] == [False, True, False]
    assert any("not used: " in note and "got save" in note for note in reports[0].notes)
    assert "does not exist on this node" in reports[2].problems[0]
    assert [body(folder_of(root, node)) for node in (0, 1)] == before


@pytest.mark.parametrize("seed", range(3))
def test_shared_folder_is_repaired_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Nodes 0 and 3 see one folder, 1 and 2 have their own: the report is the same for those
    that share, and nobody is refused. Markers are closed before others look for them.
    """
    monkeypatch.setattr(across_nodes, "LocalStorage", CloseToOpenStorage)
    (root / "node-3").symlink_to("node-0")
    folders = [folder_of(root, node) for node in range(4)]
    right = [body(one) for one in folders]
    for file in tensors(folders[0], "model"):
        flip(file)
    (folders[0] / names.EXTRA).unlink()
    reports = repair(root, [3, 1, 0, 2, 0] if seed else [0, 0, 1, 2, 3])
    assert [report.ok for report in reports] == [True] * 4, [report.problems for report in reports]
    assert sum(bool(report.repaired) for report in reports) == 2
    assert len(set(reports)) == 3, "those that share it have one report"
    assert [body(one) for one in folders] == right

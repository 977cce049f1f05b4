"""Folders of nodes that repair each other, in one process: whole tensors and shards."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.node_damage import save
from tests.support.engine.cluster.simulated_nodes import SAVE, folder_of, on_node
from tests.support.engine.compressed import stored_files, trained_state
from tests.support.engine.repair.damaged_folders import body, tensors
from tests.support.format.manifests import edit_manifest
from tests.support.harness import run_ranks
from unified_ckpt.format import header, names
from unified_ckpt.runtime.comm.comm import Comm


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Node 0 holds whole copies; 1 and 2 hold shards of another copy; 3 and 4 as 1 and 2, of
    a third.
    """
    root = tmp_path_factory.mktemp("nodes")
    save(root, [0, 0, 1, 2, 3, 4], copies=3)
    return root


@pytest.fixture
def nodes(saved: Path, tmp_path: Path) -> list[Path]:
    shutil.copytree(saved, tmp_path / "nodes")
    return [folder_of(tmp_path / "nodes", node) for node in range(5)]


def others(nodes: Sequence[Path], node: int) -> list[Path]:
    return [folder for folder in nodes if folder != nodes[node]]


def harm(draw: random.Random, file: Path) -> None:
    """Flip bits of tensors, or cut them off; the header stays."""
    content = bytearray(file.read_bytes())
    start = header.header_nbytes(content[:8], file_size=len(content), file="")
    for _ in range(draw.randint(1, 3)):
        content[draw.randrange(start, len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content[: draw.choice([len(content), draw.randrange(start, len(content))])])


@pytest.mark.parametrize("seed", range(20))
def test_any_tensors_come_from_a_copy_elsewhere(nodes: list[Path], seed: int) -> None:
    """One of three copies is intact: node 0's, or that of nodes 1 and 2, or of 3 and 4."""
    draw, right = random.Random(seed), [body(folder) for folder in nodes]
    intact = draw.choice([{0}, {1, 2}, {3, 4}])
    for node in set(range(5)) - intact:
        if draw.random() < 0.8:
            harm(draw, tensors(nodes[node], "model")[0])
    for node in draw.sample(range(5), 5):
        report = uc.repair(nodes[node], draw.sample(others(nodes, node), 4))
        assert report.ok, (node, report.problems)
        assert body(nodes[node]) == right[node]


def test_headers_come_from_nodes_with_the_same_file(nodes: list[Path]) -> None:
    """Nodes 1 and 3 store the same shards, so one header proves the other; node 0's is alone."""
    right = [body(folder) for folder in nodes]
    for node in (0, 1):
        flip(tensors(nodes[node], "model")[0], 20)
    damaged = body(nodes[0])
    assert uc.repair(nodes[1], others(nodes, 1)).ok
    assert body(nodes[1]) == right[1]
    (problem,) = uc.repair(nodes[0], others(nodes, 0)).problems
    assert "no copy of its header is intact" in problem
    assert body(nodes[0]) == damaged


def test_a_source_that_verifies_nothing_is_compared(nodes: list[Path]) -> None:
    """Its tensors may be damaged: they are compared with the digests of the folder itself."""
    edit_manifest(nodes[0], lambda fields: fields.update(digests=None))
    flip(tensors(nodes[0], "model")[0], 0.2)
    flip(tensors(nodes[1], "model")[0])
    before = body(nodes[1])
    assert not uc.repair(nodes[1], nodes[:1]).ok
    assert body(nodes[1]) == before


def test_no_node_has_the_block(nodes: list[Path]) -> None:
    flip(tensors(nodes[1], "model")[0])
    before = body(nodes[1])
    (problem,) = uc.repair(nodes[1], [nodes[2], nodes[4]]).problems
    assert "add a copy of this folder, number 1 of 5 of save" in problem
    assert "by rank(s) 2, or folders of other nodes that have the same elements" in problem
    assert body(nodes[1]) == before


def test_tensor_that_no_other_node_has(tmp_path: Path) -> None:
    """The nodes are stages of a pipeline."""

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as checkpointer:
            model = {"ab"[comm.rank]: torch.arange(9.0)}
            checkpointer.save(folder_of(tmp_path, comm.rank), model=model, options=SAVE)

    run_ranks(2, act)
    damaged = folder_of(tmp_path, 1)
    flip(tensors(damaged, "model")[0], -1)
    (problem,) = uc.repair(damaged, [folder_of(tmp_path, 0)]).problems
    assert "no copy has block 0 of model:b" in problem


def test_block_that_starts_within_a_row_of_short_runs(tmp_path: Path) -> None:
    """Nodes 0 and 1 hold half of each innermost dim, node 2 all of it."""
    full = torch.arange(2.0 * 700 * 1000).reshape(2, 700, 1000)
    layout = uc.Layout({"dp": 2, "tp": 2}, {"w": {"tp": 2}})
    nodes = [0, 1, 2, 2]

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as checkpointer:
            model = {"w": full.chunk(2, 2)[comm.rank % 2].clone()}
            folder = folder_of(tmp_path, nodes[comm.rank])
            checkpointer.save(folder, model=model, layout=layout, options=SAVE)

    run_ranks(4, act)
    damaged = folder_of(tmp_path, 1)
    right, (file,) = body(damaged), tensors(damaged, "model")
    for offset in (1_100_000, 2_200_000, -1):
        flip(file, offset)
    report = uc.repair(damaged, [folder_of(tmp_path, 2)])
    assert (report.ok, report.repaired) == (True, (file.name,))
    assert body(damaged) == right


def test_node_files_come_only_from_a_copy_of_its_folder(nodes: list[Path], tmp_path: Path) -> None:
    """What its ranks stored. Another node's file of that name is not taken for it."""
    backup = Path(shutil.copytree(nodes[1], tmp_path / "backup"))
    flip(nodes[1] / names.RANK_EXTRA)
    before = body(nodes[1])
    assert "no copy of it is intact" in uc.repair(nodes[1], others(nodes, 1)).problems[0]
    assert body(nodes[1]) == before
    assert uc.repair(nodes[1], [*others(nodes, 1), backup]).ok
    assert body(nodes[1]) == body(backup)


def test_encoded_tensors_and_exceptions_come_from_other_nodes(tmp_path: Path) -> None:
    """Node 0 holds whole tensors, and 1 and 2 shards. Masters are plain there: models of other
    boxes cannot be compared.
    """
    shape, nodes = (64, 130), [0, 0, 1, 2]
    layout = uc.Layout({"rep": 2, "dp": 2}, {"w": {"dp": 0}}, {"w": shape})

    def act(comm: Comm) -> uc.SaveReport:
        state = trained_state({"w": shape})
        for tensors_of_part in state.values():
            for name, tensor in tensors_of_part.items():
                if tensor.shape:
                    tensors_of_part[name] = tensor.chunk(2)[comm.rank % 2].clone()
        options = SAVE.model_copy(update={"compression": "O1"})
        with on_node(comm, nodes) as checkpointer:
            path = folder_of(tmp_path, nodes[comm.rank])
            return checkpointer.save(path, **state, layout=layout, options=options)

    assert {report.plain_tensors for report in run_ranks(4, act)} == {1}
    folders = [folder_of(tmp_path, node) for node in range(3)]
    for folder in folders:
        files = stored_files(folder)
        assert "optimizer.exceptions.safetensors" in files
        for name in files.keys() - {names.DIGESTS}:
            flip(folder / name, -1)
            assert not uc.verify(folder, deep=True).ok, name
            report = uc.repair(folder, [other for other in folders if other != folder])
            assert report.ok, (name, report.problems)
            assert stored_files(folder) == files

"""Saves of two nodes with a folder each, repairs of these folders, and merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.simulated_nodes import fine, on_node
from tests.support.harness import try_ranks
from tests.support.power.contents import SAVE, check_state, checkpoints, layout, state, whole_step
from tests.support.power.operation import Operation, Report
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage

NODES = (0, 1)
FOLDERS = [f"node-{node}/run/latest" for node in NODES]
MERGED = "merged/latest"
OPTIONS = SAVE.model_copy(update={"timeout_seconds": 10.0})
Storages = Callable[[int, str], LocalStorage]  # by rank and folder


def try_save(
    root: Path,
    report: Report,
    *,
    step: int,
    nodes: Sequence[int] = NODES,
    copies: int = 1,
    storages: Storages | None = None,
) -> list[BaseException | None]:
    """Save on ranks on these nodes; report the step from each rank that succeeds."""
    world = len(nodes)

    def act(comm: Comm) -> None:
        storage = None if storages is None else partial(storages, comm.rank)
        with on_node(comm, nodes, storage=storage) as checkpointer:
            checkpointer.save(
                root / FOLDERS[nodes[comm.rank]],
                step=step,
                **state(step, rank=comm.rank, world=world),
                layout=layout(world),
                options=OPTIONS.model_copy(update={"node_copies": copies}),
            )
        report(step)

    return try_ranks(world, act)


def save(root: Path, report: Report) -> None:
    fine(try_save(root, report, step=2))


def save_copies(root: Path, report: Report) -> None:
    """Save with a copy of each byte on another node, which two ranks write."""
    fine(try_save(root, report, step=2, nodes=(0, 0, 1, 1), copies=2))


def save_first(root: Path) -> None:
    fine(try_save(root, lambda _: None, step=1))


def load(root: Path, nodes: Sequence[int] = NODES) -> int:
    """Load on these nodes, check every element, and return the step."""

    def act(comm: Comm) -> int | None:
        targets = state(0, rank=comm.rank, world=len(nodes))
        with on_node(comm, nodes) as checkpointer:
            path = root / FOLDERS[nodes[comm.rank]]
            report = checkpointer.load(path, **targets, layout=layout(len(nodes)))
        assert report.step is not None
        check_state(targets, report.step)
        return report.step

    (step,) = set(fine(try_ranks(len(nodes), act)))
    assert step is not None
    return step


def check_nodes(root: Path, reported: Sequence[int]) -> None:
    """All nodes together have the old save or the new one."""
    checkpoints(root)
    assert load(root) in ((2,) if reported else (1, 2))


def check_copies(root: Path, reported: Sequence[int]) -> None:
    """After the save, each node alone has all of it."""
    check_nodes(root, reported)
    if reported:
        assert [load(root, [node]) for node in NODES] == [2, 2]


def save_and_damage(root: Path) -> None:
    save_first(root)
    flip(root / FOLDERS[0] / "model.safetensors", -1)  # both nodes have `b`
    (root / FOLDERS[1] / "model_shards.safetensors.index.json").unlink()


def repair(root: Path, report: Report | None = None) -> None:
    def act(comm: Comm) -> None:
        with on_node(comm, NODES) as checkpointer:
            reports = checkpointer.repair(root / FOLDERS[comm.rank])
        assert all(each.ok for each in reports)
        if report is not None:
            report(1)

    fine(try_ranks(2, act))


def check_repaired(root: Path, reported: Sequence[int]) -> None:
    """What was repaired is whole; a repair that was interrupted can be repeated."""
    if not reported:
        repair(root)
    assert all(uc.verify(root / folder, deep=True).ok for folder in FOLDERS)


def merge(root: Path, report: Report) -> None:
    uc.convert([root / folder for folder in FOLDERS], root / MERGED)
    report(1)


def check_merged(root: Path, reported: Sequence[int]) -> None:
    checkpoints(root)
    assert whole_step(root / MERGED) == (1 if (root / MERGED).exists() else None)
    assert not reported or (root / MERGED).exists()


NODE_OPERATIONS = {
    "nodes": Operation(save, check_nodes, save_first, share=0.3),
    "node-copies": Operation(save_copies, check_copies, save_first, share=0.3),
    "repair-of-nodes": Operation(repair, check_repaired, save_and_damage, share=0.3),
    "merge": Operation(merge, check_merged, save_first),
}

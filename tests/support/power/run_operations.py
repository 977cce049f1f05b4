"""Runs with a manager: retention, tiers, events, and what a new run resumes from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import unified_ckpt as uc
from tests.support.harness import run_ranks
from tests.support.manager.managers import manager_of
from tests.support.power.contents import SAVE, check_state, checkpoints, layout, state
from tests.support.power.operation import Operation, Report
from unified_ckpt.manager.events.file import read_events
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.runtime.comm.comm import Comm

OPTIONS = SAVE.model_copy(update={"if_exists": "error"})
TIERS: dict[str, Any] = {"interval_steps": 2, "local_interval_steps": 1, "keep_latest": 1}


def make_manager(root: Path, comm: Comm | None = None, **options: Any) -> uc.CheckpointManager:
    """Return a manager of a process, or of a rank on a node of its own."""
    options = {"interval_steps": 1, "keep_latest": 2, **options}
    node = None if comm is None else f"node {comm.rank}"
    if "local_interval_steps" in options:
        options["local_directory"] = str(root / f"local-{0 if comm is None else comm.rank}")
    return manager_of(comm, root / "run", save_options=OPTIONS, node=node, **options)


def restore(manager: uc.CheckpointManager, *, rank: int = 0, world: int = 1) -> int:
    """Restore and check every element; return the step, 0 for a fresh start."""
    targets = state(0, rank=rank, world=world)
    report = manager.restore(**targets, layout=layout(world))
    step = 0 if report is None else report.step
    assert step is not None
    check_state(targets, step)
    return step


def train(root: Path, report: Report, **options: Any) -> None:
    with make_manager(root, **options) as manager:
        for step in range(1, 6):
            saved = manager.save(step, **state(step))
            if isinstance(saved, uc.PendingSave):
                saved.result(30)
            report(step)


def check_run(root: Path, reported: Sequence[int], **options: Any) -> None:
    """A new run resumes from what was reported, or later, and goes on."""
    check_events(root, reported)
    with make_manager(root, **options) as manager:
        step = restore(manager)
        assert step >= max([0, *reported]), (step, reported)
        manager.save(step + 1, **state(step + 1))
        assert restore(manager) == step + 1


def check_events(root: Path, reported: Sequence[int]) -> None:
    """The events have all that was reported, and only what is true."""
    steps = checkpoints(root)
    in_root = max([0, *(step for path, step in steps.items() if path.startswith("run/check"))])
    saves, copies = set[int](), set[int]()
    for event in read_events(str(root / "run")):
        if event.event == "save":
            saves.add(event.step or 0)
        elif event.event == "copy":
            copies.add(event.step or 0)
        elif event.event == "delete" and event.tier == "root":
            assert f"run/{event.path}" not in steps
    assert saves >= set(reported)
    assert max([0, *steps.values()]) >= max([0, *saves])
    assert in_root >= max([0, *copies])


def train_on_nodes(root: Path, report: Report, **options: Any) -> None:
    def act(comm: Comm) -> None:
        with make_manager(root, comm, **options) as manager:
            for step in range(1, 5):
                manager.save(step, **state(step, rank=comm.rank, world=2), layout=layout(2))
                report(step)

    run_ranks(2, act)


def check_run_on_nodes(root: Path, reported: Sequence[int], **options: Any) -> None:
    check_events(root, reported)

    def act(comm: Comm) -> None:
        with make_manager(root, comm, **options) as manager:
            step = restore(manager, rank=comm.rank, world=2)
            assert step >= max([0, *reported]), (step, reported)

    run_ranks(2, act)


def write_first_marker(root: Path) -> None:
    run_marker.write(str(root), marker_of(1))


def write_marker(root: Path, report: Report) -> None:
    run_marker.write(str(root), marker_of(2))
    report(2)


def check_marker(root: Path, reported: Sequence[int]) -> None:
    """A save may be removed from the root once the marker names a later one."""
    marker = run_marker.read(str(root))
    assert marker in ([marker_of(2)] if reported else [marker_of(1), marker_of(2)])


def marker_of(step: int) -> run_marker.RunMarker:
    saves = frozenset(f"{step}-{number}" for number in range(1000))
    return run_marker.RunMarker(root="root", root_saves=saves, foreign_saves=frozenset())


RUN_OPERATIONS = {
    "run": Operation(train, check_run, share=0.3),
    "run-in-background": Operation(partial(train, asynchronous=True), check_run, share=0.3),
    "run-with-trash": Operation(
        partial(train, trash_directory="trash"),
        partial(check_run, trash_directory="trash"),
        share=0.3,
    ),
    "tiers": Operation(partial(train, **TIERS), partial(check_run, **TIERS), share=0.3),
    "tier-marker": Operation(write_marker, check_marker, write_first_marker),
    "tiers-of-nodes": Operation(
        partial(train_on_nodes, **TIERS), partial(check_run_on_nodes, **TIERS), share=0.2
    ),
}

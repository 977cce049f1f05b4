"""Operations that a power cut interrupts, and what must be there afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import fine, on_node
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.manager.managers import manager_of
from tests.support.power.contents import SAVE, check_state, checkpoints, layout, state, whole_step
from unified_ckpt.manager.events.file import read_events
from unified_ckpt.runtime.comm.comm import Comm

Report = Callable[[Any], None]


@dataclass(frozen=True)
class Operation:
    """What happens below a folder.

    `prepare`: what is durable before. `run`: what is recorded. It calls `report` with what it has
    learned to be durable. `check`: fails unless the folder after a power cut has all that was
    `reported` until then, and nothing that only looks whole.
    """

    run: Callable[[Path, Report], None]
    check: Callable[[Path, Sequence[Any]], None]
    prepare: Callable[[Path], None] = lambda _: None


NAME = "run/latest"
USER_FILES = {"notes.txt": b"mine", "logs/run.log": b"mine too" * 2000}


# one folder


def save(root: Path, report: Report, *, step: int = 1, options: uc.SaveOptions = SAVE) -> None:
    uc.save(root / NAME, step=step, **state(step), options=options)
    report(step)


def save_first(root: Path) -> None:
    save(root, lambda _: None)


def check_last(root: Path, reported: Sequence[int]) -> None:
    """The step that was reported last, or a later one, is there under its name."""
    steps = checkpoints(root)
    assert not reported or steps.get(NAME, -1) >= reported[-1], (steps, reported)


def save_first_with_user_files(root: Path) -> None:
    save_first(root)
    for name, body in USER_FILES.items():
        (root / NAME / name).parent.mkdir(exist_ok=True)
        (root / NAME / name).write_bytes(body)


def replace(root: Path, report: Report) -> None:
    report(1)
    save(root, report, step=2)


def check_user_files(root: Path, reported: Sequence[int]) -> None:
    check_last(root, reported)
    for name, body in USER_FILES.items():
        bodies = [path.read_bytes() for path in root.glob(f"run/[!.]*/{name}")]
        assert body in bodies, name


def save_on_ranks(root: Path, report: Report, *, background: bool = False) -> None:
    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            for step in (1, 2):
                arguments = {**state(step, rank=comm.rank, world=2), "layout": layout(2)}
                if background:
                    call = checkpointer.save_async
                    call(root / NAME, step=step, **arguments, options=SAVE).result(30)
                else:
                    checkpointer.save(root / NAME, step=step, **arguments, options=SAVE)
                report(step)

    run_ranks(2, act)


def damage(root: Path) -> None:
    save_first(root)
    uc.save(root / "copy", step=1, **state(1), options=SAVE)


def repair(root: Path, report: Report) -> None:
    uc.repair(root / NAME, [root / "backup"])
    report(1)


def convert(root: Path, report: Report, *, name: str = NAME, **options: Any) -> None:
    uc.convert(root / "source", root / name, **options)
    report(2)


def save_source(root: Path) -> None:
    uc.save(root / "source", step=2, **state(2), options=SAVE)


def save_source_and_first(root: Path) -> None:
    save_source(root)
    save_first(root)


def check_export(root: Path, reported: Sequence[int], *, name: str) -> None:
    """What has the name is whole, also if no digest could tell."""
    path = root / name
    assert whole_step(path) == 2 if path.exists() else not reported


# folders of several nodes


def save_on_nodes(
    root: Path, report: Report, *, step: int = 2, copies: int = 1, storage: Any = None
) -> None:
    options = SAVE.model_copy(update={"node_copies": copies, "timeout_seconds": 10.0})

    def act(comm: Comm) -> None:
        place = None if storage is None else partial(storage, comm.rank)
        with on_node(comm, [0, 1], storage=place) as checkpointer:
            path = root / f"node-{comm.rank}" / NAME
            arguments = {**state(step, rank=comm.rank, world=2), "layout": layout(2)}
            checkpointer.save(path, step=step, **arguments, options=options)
        report(step)

    fine(try_ranks(2, act))


def save_first_on_nodes(root: Path) -> None:
    save_on_nodes(root, lambda _: None, step=1)


def check_nodes(root: Path, reported: Sequence[int]) -> None:
    """All nodes together have the old save or the new one."""
    checkpoints(root)

    def act(comm: Comm) -> int | None:
        targets = state(0, rank=comm.rank, world=2)
        with on_node(comm, [0, 1]) as checkpointer:
            path = root / f"node-{comm.rank}" / NAME
            report = checkpointer.load(path, **targets, layout=layout(2))
        assert report.step is not None
        check_state(targets, report.step)
        return report.step

    (step,) = set(fine(try_ranks(2, act)))
    assert step in ((2,) if reported else (1, 2))


# the checkpoints of a run


def make_manager(root: Path, comm: Comm | None = None, **options: Any) -> uc.CheckpointManager:
    defaults = {"interval_steps": 1, "keep_latest": 2}
    save_options = SAVE.model_copy(update={"if_exists": "error"})
    return manager_of(comm, root / "run", save_options=save_options, **{**defaults, **options})


def train(root: Path, report: Report, **options: Any) -> None:
    with make_manager(root, **options) as manager:
        for step in range(1, 6):
            saved = manager.save(step, **state(step))
            if isinstance(saved, uc.PendingSave):
                saved.result(30)
            report(step)


def check_run(root: Path, reported: Sequence[int], **options: Any) -> None:
    """A new run resumes from what was reported, in the events too, or later; and it goes on."""
    checkpoints(root)
    recorded = [
        event.step or 0 for event in read_events(str(root / "run")) if event.event == "save"
    ]
    with make_manager(root, **{**options, "asynchronous": False}) as manager:
        step = restore(manager)
        assert step >= max([0, *reported, *recorded]), (step, reported, recorded)
        manager.save(step + 1, **state(step + 1))
        assert restore(manager) == step + 1


def restore(manager: uc.CheckpointManager) -> int:
    """Restore and check every element; return the step, 0 for a fresh start."""
    targets = state(0)
    report = manager.restore(**targets)
    step = 0 if report is None else report.step
    assert step is not None
    check_state(targets, step)
    return step


EXPORTS: list[tuple[str, str, dict[str, Any]]] = [
    ("huggingface", "exports/hf", {}),
    ("torch", "exports/x.pt", {}),
    ("dcp", "exports/dcp", {}),
    ("orbax", "exports/orbax", {"parts": ("model",)}),
]
OPERATIONS = {
    "save": Operation(save, check_last),
    "replace": Operation(replace, check_user_files, save_first_with_user_files),
    "ranks": Operation(save_on_ranks, check_last),
    "background": Operation(partial(save_on_ranks, background=True), check_last),
    "convert": Operation(partial(convert, if_exists="replace"), check_last, save_source_and_first),
    "nodes": Operation(save_on_nodes, check_nodes, save_first_on_nodes),
    "copies": Operation(partial(save_on_nodes, copies=2), check_nodes, save_first_on_nodes),
    "run": Operation(train, check_run),
    "run with trash": Operation(
        partial(train, trash_directory="trash"), partial(check_run, trash_directory="trash")
    ),
    "run in background": Operation(partial(train, asynchronous=True), check_run),
} | {
    f"export {to}": Operation(
        partial(convert, name=name, to=to, **more), partial(check_export, name=name), save_source
    )
    for to, name, more in EXPORTS
}

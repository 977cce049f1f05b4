"""Saves and loads of nodes on drawn schedules with drawn faults, and what holds after each."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import unified_ckpt as uc
from tests.support.engine.cluster.node_commits import EACH, PAIR, SHARED, Ranks
from tests.support.engine.cluster.simulated_nodes import NAME, NodeState, on_node
from tests.support.equality import check_equal
from tests.support.harness import run_ranks
from tests.support.schedules import ranks as schedules
from tests.support.schedules.choosers import Faults
from tests.support.schedules.scheduler import Scheduler
from unified_ckpt.runtime.comm.comm import Comm

TIMEOUT = 30.0
FULL = {"w": torch.arange(180 * 90, dtype=torch.float32).reshape(180, 90), "b": torch.arange(5.0)}
STATE = NodeState(FULL, {"w": 0})
RANKS = {"pair": PAIR, "shared": SHARED, "each": EACH}
STEPS = (2, None, 3)  # saved; None: what is there is loaded
LIMIT = 3 * TIMEOUT + 30.0  # of one call
KINDS = ("none", "death", "host", "pause", "cut", "break", "mixed")


@dataclass(frozen=True)
class Drawn:
    """What a seed runs: `steps` saves in one process group, and a load after each."""

    ranks: Ranks
    kind: str
    faults: Faults
    background: bool
    options: uc.SaveOptions
    operations: int

    @staticmethod
    def of(seed: int) -> Drawn:
        draw = random.Random(seed)
        ranks = draw.choice([PAIR, SHARED, EACH, EACH])
        kind = draw.choice(KINDS)
        faults = {
            "none": Faults(),
            "death": Faults(deaths=1),
            "host": Faults(deaths=1),
            "pause": Faults(pauses=1, pause_seconds=draw.choice([0.6, 1.5, 5]) * TIMEOUT),
            "cut": Faults(cuts=1),
            "break": Faults(breaks=draw.choice([1, 3])),
            "mixed": Faults(
                deaths=draw.randrange(2), pauses=2, pause_seconds=2 * TIMEOUT, breaks=1
            ),
        }[kind]
        options = uc.SaveOptions(
            timeout_seconds=TIMEOUT,
            if_exists="replace",
            write_alignment=4096,
            node_copies=draw.choice([1, 2]) if ranks is EACH else 1,
        )
        operations = draw.choice([400, 1500]) * ranks.world // 2
        return Drawn(ranks, kind, faults, draw.random() < 0.4, options, operations)


@dataclass(frozen=True)
class Outcome:
    """What a rank got of a save, or of a load if there is a `loaded` step."""

    result: Any
    began: float
    ended: float

    @property
    def error(self) -> uc.CheckpointError | None:
        return self.result if isinstance(self.result, uc.CheckpointError) else None


def act(
    drawn: Drawn, root: Path, comm: Comm, scheduler: Scheduler, outcomes: list[Outcome]
) -> None:
    """Make the calls of `STEPS` on one rank; go on after errors, as a job may that tries again."""
    path = drawn.ranks.place(root, comm.rank) / NAME
    with on_node(comm, drawn.ranks.nodes) as checkpointer:
        for step in STEPS:
            began = scheduler.now
            try:
                result: Any
                if step is None:
                    result = load(drawn, path, comm.rank, checkpointer)
                else:
                    result = save(drawn, path, comm.rank, checkpointer, step)
            except uc.CheckpointError as error:
                result = error
            outcomes.append(Outcome(result, began, scheduler.now))


def save(
    drawn: Drawn, path: Path, rank: int, checkpointer: uc.Checkpointer, step: int
) -> uc.SaveReport:
    world = drawn.ranks.world
    model = STATE.local(rank, world, step=step)
    arguments: dict[str, Any] = {"layout": STATE.layout(world), "options": drawn.options}
    arguments |= {"model": model, "step": step, "extra": {"step": step}}
    if not drawn.background:
        return checkpointer.save(path, **arguments)
    pending = checkpointer.save_async(path, **arguments)
    for tensor in model.values():
        tensor.zero_()  # the job trains on
    return pending.result()


def load(drawn: Drawn, path: Path, rank: int, checkpointer: uc.Checkpointer) -> uc.LoadReport:
    world = drawn.ranks.world
    model = {name: torch.full_like(t, -1) for name, t in STATE.local(rank, world).items()}
    options = uc.LoadOptions(timeout_seconds=TIMEOUT)
    report = checkpointer.load(path, model=model, layout=STATE.layout(world), options=options)
    assert report.step is not None
    check_equal(model, STATE.local(rank, world, step=report.step))
    return report


def prepare(start: Path) -> None:
    """Save step 1 of each kind of ranks, in a folder of its own."""
    options = uc.SaveOptions(fsync=False)
    for name, ranks in RANKS.items():
        drawn = Drawn(ranks, "none", Faults(), background=False, options=options, operations=0)

        def save_first(comm: Comm, drawn: Drawn = drawn, root: Path = start / name) -> None:
            with on_node(comm, drawn.ranks.nodes) as checkpointer:
                path = drawn.ranks.place(root, comm.rank) / NAME
                save(drawn, path, comm.rank, checkpointer, 1)

        run_ranks(ranks.world, save_first)


def stored_step(root: Path, ranks: Ranks) -> int:
    """Load the checkpoint whole, in one process, and return its step."""
    folders = sorted({ranks.place(root, rank) / NAME for rank in range(ranks.world)})
    model = {name: torch.full_like(tensor, -1) for name, tensor in FULL.items()}
    report = uc.load(folders, model=model)
    assert report.step is not None
    assert report.extra == {"step": report.step}
    check_equal(model, {name: tensor + report.step for name, tensor in FULL.items()})
    return report.step


def run(seed: int, start: Path, root: Path) -> schedules.Ranks:
    """Run a seed and check what holds after it. `start`: step 1 of each kind of ranks."""
    drawn = Drawn.of(seed)
    world = drawn.ranks.world
    (name,) = (name for name, ranks in RANKS.items() if ranks == drawn.ranks)
    shutil.copytree(start / name, root)
    outcomes: list[list[Outcome]] = [[] for _ in range(world)]
    done = schedules.run_seed(
        seed,
        world,
        lambda comm, scheduler: act(drawn, root, comm, scheduler, outcomes[comm.rank]),
        faults=drawn.faults,
        operations=drawn.operations,
        host_dies=drawn.kind == "host",
    )
    check(drawn, done, outcomes, root)
    return done


def check_errors(
    drawn: Drawn, done: schedules.Ranks, number: int, errors: Sequence[uc.CheckpointError]
) -> None:
    """Check that ranks raise one error, which names who died.

    A rank that was late for a call may be in another one than the others, which failed without it.
    """
    if not errors or drawn.faults.pauses or drawn.kind in ("host", "cut"):
        return
    assert len({str(error) for error in errors}) == 1, f"{number}: {errors}"
    assert {*done.dead} <= named_ranks(str(errors[0])), f"{done.dead}: {errors[0]}"


def named_ranks(text: str) -> set[int]:
    """Return the ranks that an error names, as "rank 3" or "rank(s) 0, 2-3"."""
    spans = [
        [int(number) for number in span.split("-")]
        for listed in re.findall(r"ranks?(?:\(s\))? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", text)
        for span in listed.split(", ")
    ]
    return {rank for span in spans for rank in range(span[0], span[-1] + 1)}


def check(
    drawn: Drawn, done: schedules.Ranks, outcomes: Sequence[Sequence[Outcome]], root: Path
) -> None:
    """Check what holds after each schedule.

    - All ranks that live return, with equal reports, or all raise in bounded time.
    - Without faults all succeed. After a death the error names the dead rank.
    - The path has the last checkpoint that was committed, or one that was being saved, whole.
    - The store has no key that nobody deletes.
    """
    for result in done.results:
        if isinstance(result, BaseException):
            raise result
    committed = {1}
    for number, step in enumerate(STEPS):
        each = [outcomes[rank][number] for rank in done.live]
        errors = [outcome.error for outcome in each if outcome.error is not None]
        text = f"step {step}: {[str(outcome.result)[:500] for outcome in each]}"
        if errors:
            if drawn.kind == "none":
                raise errors[0]
            connected = [rank for rank in done.live if rank not in done.store.unreachable]
            failed = [outcomes[rank][number].error is not None for rank in connected]
            assert len(set(failed)) < 2, f"only some ranks failed: {text}"
            committed |= {step} if step else set()
        elif each:
            results = [outcome.result for outcome in each]
            if step:
                assert len({result.id for result in results}) == 1, text
                committed = {step}
            else:
                assert {result.step for result in results} <= committed, text
        check_errors(drawn, done, number, errors)
        if each:
            seconds = max(end.ended for end in each) - max(start.began for start in each)
            limit = LIMIT + drawn.faults.pauses * drawn.faults.pause_seconds
            assert seconds < limit, f"{seconds:g} s: {text}"
    assert stored_step(root, drawn.ranks) in committed
    if not done.dead and not done.store.unreachable:
        assert orphaned_keys(done.store.values) == []


def orphaned_keys(values: Mapping[str, bytes]) -> list[str]:
    """Return keys that no later `Comm` of these ranks deletes, after all have closed theirs."""
    listed, kept = set[str](), set[str]()
    for key, value in values.items():
        prefix, found, _ = key.partition("stale-keys/")
        if found:
            kept.add(key)
            listed |= {
                prefix + name for line in value.decode().split("\n") for name in line.split()
            }
        elif key.endswith("collectives") or "transport/" in key:
            kept.add(key)
    return sorted(values.keys() - listed - kept)

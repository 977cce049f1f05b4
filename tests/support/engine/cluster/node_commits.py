"""Saves of simulated nodes on storages that fail, and the folders they leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import LOAD, NAME, SAVE, NodeState, fine, on_node
from tests.support.harness import FaultPoint, FaultyStorage, FullStorage, try_ranks
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage


@dataclass(frozen=True)
class Ranks:
    """The node of each rank. `shared`: all save to one folder, not to one of each node."""

    nodes: Sequence[int]
    shared: bool = False

    @property
    def world(self) -> int:
        return len(self.nodes)

    def place(self, root: Path, rank: int) -> Path:
        return root / ("shared" if self.shared else f"node-{self.nodes[rank]}")

    def left(self, root: Path) -> dict[str, list[str]]:
        """The names at each place, hidden ones too."""
        places = sorted({self.place(root, rank) for rank in range(self.world)})
        return {
            place.name: sorted(path.name for path in place.iterdir()) if place.exists() else []
            for place in places
        }


PROCESS = Ranks((0,))
PAIR = Ranks((0, 0))
SHARED = Ranks((0, 0, 1, 1), shared=True)
EACH = Ranks((0, 0, 1, 1))

FULL = {
    "w": torch.arange(500 * 90, dtype=torch.float32).reshape(500, 90),
    "o": torch.arange(900.0).reshape(30, 30),
    "b": torch.arange(5.0),
}
QUICK = SAVE.model_copy(update={"timeout_seconds": 10.0, "write_alignment": 4096})
REPLACE = QUICK.model_copy(update={"if_exists": "replace"})
Storages = Callable[[int, str], LocalStorage]  # by rank and folder
STATE = NodeState(FULL, {"w": 0, "o": 1})
LAYOUT = STATE.layout(4)


def contents(step: int, rank: int, world: int = 4) -> dict[str, torch.Tensor]:
    return STATE.local(rank, world, step=step)


def save(
    root: Path,
    step: int,
    *,
    ranks: Ranks = EACH,
    storages: Storages | None = None,
    background: bool = False,
    name: str = NAME,
    **changes: object,
) -> list[uc.SaveReport | BaseException]:
    def act(comm: Comm) -> uc.SaveReport:
        storage = (lambda place: storages(comm.rank, place)) if storages is not None else None
        with on_node(comm, ranks.nodes, storage=storage) as checkpointer:
            call = checkpointer.save_async if background else checkpointer.save
            defaults = {
                "model": contents(step, comm.rank, ranks.world),
                "parts": {"ema": contents(step + 50, comm.rank, ranks.world)},
                "layout": STATE.layout(ranks.world),
                "step": step,
                "extra": {"step": step, "seen": bytes(2000)},
                "rank_extra": (comm.rank, step),
                "options": QUICK,
            }
            saved = call(ranks.place(root, comm.rank) / name, **{**defaults, **changes})
            return saved.result(60) if background else saved

    return try_ranks(ranks.world, act)


def load_all(root: Path, name: str, ranks: Ranks = EACH) -> list[int | BaseException]:
    """Load on all ranks, compare every tensor, and return each rank's step."""

    def act(comm: Comm) -> int:
        state = contents(0, comm.rank, ranks.world)
        model, ema = ({key: torch.full_like(state[key], -1) for key in state} for _ in range(2))
        arguments = {"parts": {"ema": ema}, "layout": STATE.layout(ranks.world), "options": LOAD}
        with on_node(comm, ranks.nodes) as checkpointer:
            place = ranks.place(root, comm.rank) / name
            report = checkpointer.load(place, model=model, **arguments)
        assert report.step is not None
        assert report.extra == {"step": report.step, "seen": bytes(2000)}
        assert report.rank_extra == (comm.rank, report.step)
        for target, step in ((model, report.step), (ema, report.step + 50)):
            right = contents(step, comm.rank, ranks.world)
            assert all(torch.equal(target[key], right[key]) for key in right)
        return report.step

    return try_ranks(ranks.world, act)


def loads(root: Path, *, name: str = NAME, ranks: Ranks = EACH) -> int:
    """Return the step of the checkpoint that loads."""
    (step,) = set(fine(load_all(root, name, ranks)))
    return step


def faulty(
    where: Collection[int], fuse: FaultPoint, kind: type[FaultyStorage] = FaultyStorage
) -> Storages:
    """Storages of these ranks that stop together."""
    return lambda rank, place: kind(place, fuse) if rank in where else LocalStorage(place)


def full_storage(number: int, where: Collection[int]) -> Storages:
    """Full disks: each of these ranks' writes fail from number `number` on."""
    return lambda rank, place: FullStorage(place, number) if rank in where else LocalStorage(place)

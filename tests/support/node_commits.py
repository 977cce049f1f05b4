"""Saves of two simulated nodes on storages that fail, and what they leave."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import unified_ckpt as uc
from tests.support.simulated_nodes import LOAD, NAME, SAVE, fine, folder_of, on_node
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import FaultPoint, FaultyStorage, FullStorage, try_ranks

NODES = [0, 0, 1, 1]
FULL = {
    "w": torch.arange(500 * 90, dtype=torch.float32).reshape(500, 90),
    "o": torch.arange(900.0).reshape(30, 30),
    "b": torch.arange(5.0),
}
LAYOUT = uc.Layout(
    mesh={"dp": 4}, rules={"w": {"dp": 0}, "o": {"dp": 1}}, shapes={"w": (500, 90), "o": (30, 30)}
)
QUICK = SAVE.model_copy(update={"timeout_seconds": 10.0})
REPLACE = QUICK.model_copy(update={"if_exists": "replace"})
Storages = Callable[[int, str], LocalStorage]  # by node and folder


def contents(step: int, rank: int) -> dict[str, torch.Tensor]:
    whole = {name: tensor + step for name, tensor in FULL.items()}
    return {
        "w": whole["w"].chunk(4)[rank].clone(),
        "o": whole["o"].chunk(4, 1)[rank].clone(),
        "b": whole["b"],
    }


def save(
    root: Path,
    step: int,
    *,
    storages: Storages | None = None,
    background: bool = False,
    name: str = NAME,
    **what: object,
) -> list[uc.SaveReport | BaseException]:
    def act(comm: Comm) -> uc.SaveReport:
        node = NODES[comm.rank]
        storage = (lambda place: storages(node, place)) if storages is not None else None
        with on_node(comm, NODES, storage=storage) as made:
            call = made.save_async if background else made.save
            told = {
                "model": contents(step, comm.rank),
                "layout": LAYOUT,
                "step": step,
                "extra": {"step": step},
                "rank_extra": (comm.rank, step),
                "options": QUICK,
            }
            found = call(folder_of(root, node).with_name(name), **{**told, **what})
            return found.result(60) if background else found

    return try_ranks(4, act)


def load_all(root: Path, name: str) -> list[int | BaseException]:
    """The step that each of four ranks loads, all of it."""

    def act(comm: Comm) -> int:
        target = {
            key: torch.full_like(tensor, -1) for key, tensor in contents(0, comm.rank).items()
        }
        with on_node(comm, NODES) as made:
            report = made.load(
                folder_of(root, NODES[comm.rank]).with_name(name),
                model=target,
                layout=LAYOUT,
                options=LOAD,
            )
        assert report.step is not None
        assert report.extra == {"step": report.step}
        assert report.rank_extra == (comm.rank, report.step)
        right = contents(report.step, comm.rank)
        assert all(torch.equal(target[key], right[key]) for key in right)
        return report.step

    return try_ranks(4, act)


def loads(root: Path, *, name: str = NAME) -> int:
    """The step of the checkpoint that is there."""
    (step,) = set(fine(load_all(root, name)))
    return step


def left(root: Path) -> dict[int, list[str]]:
    return {node: sorted(os.listdir(folder_of(root, node).parent)) for node in (0, 1)}


def faulty(where: Sequence[int], fuse: FaultPoint) -> Storages:
    return lambda node, place: FaultyStorage(place, fuse) if node in where else LocalStorage(place)


def full_at(number: int, node: int) -> Storages:
    """The disk of one node's ranks is full from their write `number` on, each counting its own."""
    return lambda at, place: FullStorage(place, number) if at == node else LocalStorage(place)

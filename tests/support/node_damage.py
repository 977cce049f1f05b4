"""Damages folders of simulated nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import unified_ckpt as uc
from tests.support.harness import run_ranks
from tests.support.simulated_nodes import SAVE, folder_of, on_node
from unified_ckpt.runtime.comm.comm import Comm

FULL = {
    "w": torch.arange(900 * 400, dtype=torch.float32).reshape(900, 400),  # two digest blocks
    "v": torch.arange(60.0).reshape(6, 10),
}


def layout(world: int, *, copies: int = 1) -> uc.Layout | None:
    """`w` by rows and `v` by columns over world / copies ranks."""
    mesh = {"rep": copies, "dp": world // copies}
    rules = {"w": {"dp": 0}, "v": {"dp": 1}}
    return (
        uc.Layout(mesh=mesh, rules=rules, shapes={n: tuple(t.shape) for n, t in FULL.items()})
        if world > copies
        else None
    )


def local_state(
    rank: int, world: int, *, copies: int = 1, step: int = 0
) -> dict[str, torch.Tensor]:
    size = world // copies
    return {
        name: (full + step).chunk(size, int(name == "v"))[rank % size].clone()
        for name, full in FULL.items()
    }


def save(
    root: Path, nodes: Sequence[int], *, copies: int = 1, step: int = 0, **arguments: object
) -> list[uc.SaveReport]:
    def act(comm: Comm) -> uc.SaveReport:
        world = comm.world
        with on_node(comm, nodes) as checkpointer:
            return checkpointer.save(
                folder_of(root, nodes[comm.rank]),
                model=local_state(comm.rank, world, copies=copies, step=step),
                layout=layout(world, copies=copies),
                step=step,
                extra={"step": step, "bytes": bytes(9000)},
                rank_extra=f"rank {comm.rank} at {step}",
                **{"options": SAVE, **arguments},
            )

    return run_ranks(len(nodes), act)


def flip(file: Path, *, position: float = 0.9) -> None:
    """Flip one bit. `position`: as a fraction of the file's size."""
    body = bytearray(file.read_bytes())
    body[int(len(body) * position)] ^= 4
    file.write_bytes(body)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def break_header(file: Path) -> None:
    flip(file, position=20 / file.stat().st_size)

"""Folders of simulated nodes to damage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import NodeState

FULL = {
    "w": torch.arange(900 * 400, dtype=torch.float32).reshape(900, 400),  # two digest blocks
    "v": torch.arange(60.0).reshape(6, 10),
}
STATE = NodeState(FULL, {"w": 0, "v": 1})


def save(
    root: Path, nodes: Sequence[int], *, step: int = 0, **arguments: object
) -> list[uc.SaveReport]:
    return STATE.save(
        root,
        nodes,
        step=step,
        extra={"step": step, "bytes": bytes(9000)},
        rank_extra=lambda rank: f"rank {rank} at {step}",
        **arguments,
    )


def load(
    root: Path,
    nodes: Sequence[int],
    *,
    copies: int = 1,
    rank_extra: Callable[[int], object] | None = None,
) -> list[uc.LoadReport | BaseException]:
    outcomes = STATE.load(root, nodes, copies=copies, rank_extra=rank_extra)
    for report in outcomes:
        if isinstance(report, uc.LoadReport):
            assert report.extra == {"step": report.step, "bytes": bytes(9000)}
    return outcomes

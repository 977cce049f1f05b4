"""torchrun script: in the layouts of this world size, load each of the named folders, and compare
bit for bit. Each layout loads several folders, and each folder is loaded.

Writes `load-<world>-<rank>-<tag>.json` under ROOT: one entry per (folder, target layout).
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.processes.layouts import (
    AFTER,
    BEFORE,
    ROWS,
    Built,
    build_with_oracle,
    compare,
    dense_formula,
    scramble,
    train_step,
    world_of,
)
from tests.support.processes.merged import read_merged
from tests.support.processes.worker import started
from tests.support.processes.worker_save import EXTRA

KINDS = {"formula": True, "trained": False}  # and whether the embedding is tied
# A third of the pairs: `test_matrix` proves that folders have the same content, whoever wrote them.
LOAD_EVERY = 3
TRAIN_EVERY = 4  # a quarter of the pairs loads a trained state too, and trains further


def load(folder: Path, source: str, target: Built, rank: int) -> list[str]:
    report = uc.load(folder, model=target.model, optimizer=target.optimizer, layout=target.layout)
    wrong = []
    if report.step != (7 if target.tied else BEFORE):
        wrong.append(f"step is {report.step}")
    if report.missing or report.unexpected:
        wrong.append(f"missing {report.missing}, unexpected {report.unexpected}")
    if not same(report.extra, EXTRA):
        wrong.append(f"extra is {report.extra}")
    # On another mesh: nothing, or the value of one rank that read the same data.
    is_same = source == target.row
    saved_rank = rank if is_same else (report.rank_extra or {"rank": None})["rank"]
    expected_extra = None
    if saved_rank is not None:
        expected_extra = {"rank": saved_rank, "draw": torch.full((saved_rank + 1,), saved_rank)}
    if not same(report.rank_extra, expected_extra):
        wrong.append(f"rank_extra is {report.rank_extra}")
    return wrong


def all_well(wrong: list[str]) -> bool:
    """Whether no rank has a problem; the next steps are collective."""
    count = torch.tensor(len(wrong))
    if dist.is_initialized():
        dist.all_reduce(count)
    return count.item() == 0


def case(
    folder: Path,
    source: str,
    target: Built,
    reference: dict[str, Tensor],
    number: int,
) -> dict[str, object]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    scramble(
        target, forget=number % 2 == 0
    )  # alternately: state is created from the checkpoint, or filled in place
    wrong: list[str] = []
    losses: list[float] = []
    try:
        wrong += load(folder, source, target, rank)
        wrong += compare(target, reference.get)
    except Exception:
        wrong.append(traceback.format_exc())
    if not target.tied and all_well(wrong):
        losses = [train_step(target, step) for step in range(BEFORE, BEFORE + AFTER)]
    kind = "formula" if target.tied else "trained"
    return {
        "kind": kind,
        "source": source,
        "target": target.row,
        "rank": rank,
        "wrong": wrong,
        "losses": losses,
    }


def main() -> None:
    root, tag, folders = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with started() as (rank, world):
        cases: list[dict[str, object]] = []
        formula = dense_formula(tied=True)
        for kind, tied in KINDS.items():
            targets = [build_with_oracle(row, tied=tied) for row in ROWS if world_of(row) == world]
            sources = [folder.split("/")[1] for folder in folders if folder.startswith(kind)]
            every = min(LOAD_EVERY, len(targets)) if tied else TRAIN_EVERY
            for s, source in enumerate(sources):
                folder = root / kind / source
                reference = formula if tied else read_merged(folder)
                cases += [
                    case(folder, source, target, reference, (s + t) // every)
                    for t, target in enumerate(targets)
                    if (s + t + 1) % every == 0
                ]
        (root / f"load-{world}-{rank}-{tag}.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    main()

"""torchrun script: in each layout of the named folders, save a state known by formula, or a trained
one and train on.

Writes under ROOT: `formula/<row>` (tied), `trained/<row>` (untied, after `BEFORE` steps),
`losses-<row>.json`, and
`save-<world>-<rank>-<tag>.json`: everything that this rank found wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch

import unified_ckpt as uc
from tests.support.processes.layouts import (
    AFTER,
    BEFORE,
    Built,
    build,
    build_with_oracle,
    compare,
    formula,
    formula_step,
    scramble,
    set_state,
    settle,
    train_step,
)
from tests.support.processes.merged import read_merged
from tests.support.processes.worker import started

EXTRA = {
    "betas": (0.9, 0.95),
    "milestones": {3: 1},
    "blob": b"\x00\xff",
    "nan": float("inf"),
    "table": torch.arange(5),
}


def save(path: Path, built: Built, rank: int, step: int) -> None:
    report = uc.save(
        path,
        model=built.model,
        optimizer=built.optimizer,
        layout=built.layout,
        step=step,
        extra=EXTRA,
        rank_extra={"rank": rank, "draw": torch.full((rank + 1,), rank)},
        options=uc.SaveOptions(fsync=False, timeout_seconds=60),
    )
    assert report.step == step, report


def save_formula(root: Path, row: str, rank: int) -> list[str]:
    built = build_with_oracle(row, tied=True)
    set_state(built, formula, formula_step)
    save(root / "formula" / row, built, rank, 7)
    return []


def save_trained(root: Path, row: str, rank: int) -> list[str]:
    """Save in mid-training; then train on, and once more from what was saved, in the same layout:
    the losses are the same bits.
    """
    built = build(row, tied=False, fill=formula)
    built.where = build_with_oracle(row, tied=False).where
    before = [train_step(built, step) for step in range(BEFORE)]
    settle(built)
    path = root / "trained" / row
    save(path, built, rank, BEFORE)
    wrong = compare(built, read_merged(path).get)
    after = [train_step(built, step) for step in range(BEFORE, BEFORE + AFTER)]
    scramble(built, forget=True)
    report = uc.load(path, model=built.model, optimizer=built.optimizer, layout=built.layout)
    again = [train_step(built, step) for step in range(report.step, report.step + AFTER)]
    if rank == 0:
        (root / f"losses-{row}.json").write_text(
            json.dumps({"before": before, "after": after, "again": again})
        )
    return wrong


def main() -> None:
    root, tag, folders = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    save_by_kind = {"formula": save_formula, "trained": save_trained}
    with started() as (rank, world):
        wrong: list[str] = []
        for folder in folders:
            kind, row = folder.split("/")
            try:
                wrong += [f"{folder}: {text}" for text in save_by_kind[kind](root, row, rank)]
            except Exception:  # the other layouts may yet be right
                wrong.append(f"{folder}: {traceback.format_exc()}")
        (root / f"save-{world}-{rank}-{tag}.json").write_text(json.dumps(wrong))


if __name__ == "__main__":
    main()

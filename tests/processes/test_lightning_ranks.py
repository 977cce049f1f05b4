"""Lightning under DDP, FSDP2 and FSDP2 with tensor parallelism: stopped and resumed by as many
processes, by fewer and by more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.processes.launch import torchrun

EVERY = {"checkpoints": {"every_n_train_steps": 1, "save_top_k": -1}}
EVEN = {"batch": 2, "dropout": 0.0}  # random numbers of another number of ranks are others
Ranks = list[dict[str, Any]]


def launch(root: Path, world: int, *runs: tuple[str, str, dict[str, Any]]) -> list[Ranks]:
    told = root / f"told-{world}-{len(list(root.iterdir()))}"
    torchrun(
        world,
        "worker_lightning.py",
        told,
        json.dumps([[kind, str(root / out), asked] for kind, out, asked in runs]),
        timeout_seconds=200,
    )
    found: list[Ranks] = torch.load(told)
    return found


def check_same(resumed: Ranks, whole: Ranks, *, batches: int) -> None:
    for rank, straight in zip(resumed, whole, strict=True):
        assert len(rank["losses"]) == batches
        assert rank["losses"] == straight["losses"][-batches:]
        assert rank["seen"] == straight["seen"][-batches:]
    assert all(
        torch.equal(tensor, whole[0]["weights"][name])
        for name, tensor in resumed[0]["weights"].items()
    )


def proofs(path: str) -> dict[tuple[str, str], list[int]]:
    """Digests of all tensors: equal for equal bytes, whatever the layout."""
    from unified_ckpt.engine.folder.reader import open_path

    folder = open_path(path, lock=True)
    names = [(part, name) for part in folder.parts for name in folder.names(part)]
    found = {key: list(digests or ()) for key, digests in folder.block_digests(names).items()}
    folder.close()
    return found


def test_ddp_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """With running statistics that differ between ranks, and file names that each rank would make
    differently.
    """
    named = {"checkpoints": {**EVERY["checkpoints"], "filename": "{step}-{own:.0f}"}}
    whole, *resumed = launch(
        tmp_path,
        2,
        ("ddp", "whole", {"trainer": named}),
        *[
            (
                "ddp",
                f"resumed-{step}",
                {"ckpt_path": str(tmp_path / "whole" / f"step={step}-own=0.ckpt")},
            )
            for step in (1, 2, 3)
        ],
    )
    for step, ranks in enumerate(resumed, 1):
        check_same(ranks, whole, batches=4 - step)
    path = tmp_path / "whole" / "step=3-own=0.ckpt"
    assert uc.verify(path, deep=True).ok
    with uc.open(path) as source:
        assert len(source.rank_extra) == 2


@pytest.mark.slow
def test_fsdp2_goes_on_and_other_ranks_take_over_as_they_do_under_ddp(tmp_path: Path) -> None:
    """Bitwise by as many; by one and by four, equal state, and no sample twice or left out.
    L#19585, L#14485: another number of GPUs.
    """
    whole, resumed, *stopped = launch(
        tmp_path,
        2,
        ("2x1", "dropout", {"trainer": EVERY}),
        ("2x1", "resumed", {"ckpt_path": str(tmp_path / "dropout" / "step=1.ckpt")}),
        ("2x1", "2x1", {"trainer": {**EVERY, "max_steps": 2}, "net": EVEN}),
        ("ddp", "ddp", {"trainer": {**EVERY, "max_steps": 2}, "net": EVEN}),
    )
    check_same(resumed, whole, batches=3)
    seen = {
        sample for ranks in stopped for rank in ranks for batch in rank["seen"] for sample in batch
    }
    assert len(seen) == 8
    for world, kinds in ((1, ("1x1",)), (4, ("4x1", "2x2", "1x4"))):
        runs: list[tuple[str, str, dict[str, Any]]] = []
        for kind in (*kinds, "ddp"):
            saved = {
                "ckpt_path": str(tmp_path / ("ddp" if kind == "ddp" else "2x1") / "step=2.ckpt"),
                "net": EVEN,
            }
            runs.append(
                (
                    kind,
                    "at-once",
                    {
                        **saved,
                        "trainer": {"max_epochs": -1, "max_steps": 2},
                        "save": str(tmp_path / f"{world}-{kind}"),
                    },
                )
            )
            if kind in ("ddp", kinds[0]):
                runs.append((kind, "on", {**saved, "trainer": {"max_epochs": 1}}))
        for (kind, out, asked), ranks in zip(runs, launch(tmp_path, world, *runs), strict=True):
            if out == "at-once":
                assert proofs(asked["save"]) == proofs(asked["ckpt_path"]), kind
            else:
                rest = [sample for rank in ranks for batch in rank["seen"] for sample in batch]
                assert sorted([*seen, *rest]) == list(range(16)), f"{kind} on {world} ranks"


@pytest.mark.slow
def test_fsdp2_with_tensor_parallelism_goes_on_and_a_smaller_mesh_takes_over(
    tmp_path: Path,
) -> None:
    whole, even, resumed = launch(
        tmp_path,
        4,
        ("2x2", "whole-dropout", {"trainer": EVERY}),
        ("2x2", "whole", {"trainer": EVERY, "net": EVEN}),
        ("2x2", "resumed", {"ckpt_path": str(tmp_path / "whole-dropout" / "step=1.ckpt")}),
    )
    check_same(resumed, whole, batches=3)
    again: dict[str, Any] = {"ckpt_path": str(tmp_path / "whole" / "step=2.ckpt"), "net": EVEN}
    alike, tensor = launch(tmp_path, 2, ("2x1", "alike", again), ("1x2", "tensor", again))
    for rank in (0, 1):
        assert alike[rank]["seen"] == even[2 * rank]["seen"][2:]
        assert alike[rank]["losses"] == pytest.approx(even[2 * rank]["losses"][2:], rel=1e-4)
    assert tensor[0]["seen"] == tensor[1]["seen"]
    assert len(tensor[0]["seen"]) == 12, "half of the first epoch, and the second"

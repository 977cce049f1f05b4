"""Lightning under DDP, FSDP2 and FSDP2 with tensor parallelism: stopped, then resumed by as many
processes, fewer and more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.processes.launch import torchrun

pytestmark = pytest.mark.integration

EVERY = {"checkpoints": {"every_n_train_steps": 1, "save_top_k": -1}}
EVEN = {"batch": 2, "dropout": 0.0}  # random numbers depend on the number of ranks
Ranks = list[dict[str, Any]]


def launch(root: Path, world: int, *runs: tuple[str, str, dict[str, Any]]) -> list[Ranks]:
    output = root / f"results-{world}-{len(list(root.iterdir()))}"
    torchrun(
        world,
        "worker_lightning.py",
        output,
        json.dumps([[kind, str(root / out), options] for kind, out, options in runs]),
        timeout_seconds=200,
    )
    return torch.load(output)


def check_same(resumed: Ranks, whole: Ranks, *, batches: int) -> None:
    for rank, straight in zip(resumed, whole, strict=True):
        assert len(rank["losses"]) == batches
        assert rank["losses"] == straight["losses"][-batches:]
        assert rank["seen"] == straight["seen"][-batches:]
    assert all(
        torch.equal(tensor, whole[0]["weights"][name])
        for name, tensor in resumed[0]["weights"].items()
    )


def stored_digests(path: str) -> dict[tuple[str, str], list[int]]:
    """Digests of all tensors: equal for equal bytes, whatever the layout."""
    from unified_ckpt.engine.folder.reader import open_path

    folder = open_path(path, lock=True)
    names = [(part, name) for part in folder.parts for name in folder.names(part)]
    digests_by_name = {
        key: list(digests or ()) for key, digests in folder.block_digests(names).items()
    }
    folder.close()
    return digests_by_name


def test_ddp_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Running statistics differ between ranks, and so would each rank's file names."""
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


def test_order_of_a_loader_with_a_state_is_kept(tmp_path: Path) -> None:
    """Lightning wraps its sampler, which owns a generator, and the wrapper has no state."""
    net = {"loader": "stateful"}
    whole, *resumed = launch(
        tmp_path,
        2,
        ("2x1", "whole", {"trainer": EVERY, "net": net}),
        *[
            ("2x1", str(step), {"ckpt_path": str(tmp_path / f"whole/step={step}.ckpt"), "net": net})
            for step in (1, 2, 3)
        ],
    )
    for step, ranks in enumerate(resumed, 1):
        check_same(ranks, whole, batches=4 - step)


@pytest.mark.incident("Lightning#19585")
@pytest.mark.slow
def test_fsdp2_resumes_on_the_same_and_other_ranks(tmp_path: Path) -> None:
    """Bitwise on as many ranks. On one and four ranks: equal state, and no sample repeated or left
    out.
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
    consumed = {
        sample for ranks in stopped for rank in ranks for batch in rank["seen"] for sample in batch
    }
    assert len(consumed) == 8
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
        for (kind, out, options), ranks in zip(runs, launch(tmp_path, world, *runs), strict=True):
            if out == "at-once":
                assert stored_digests(options["save"]) == stored_digests(options["ckpt_path"]), kind
            else:
                rest = [sample for rank in ranks for batch in rank["seen"] for sample in batch]
                assert sorted([*consumed, *rest]) == list(range(16)), f"{kind} on {world} ranks"


@pytest.mark.slow
def test_fsdp2_and_tp_resume_on_the_same_and_a_smaller_mesh(
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
    data, tensor = launch(tmp_path, 2, ("2x1", "alike", again), ("1x2", "tensor", again))
    for rank in (0, 1):
        assert data[rank]["seen"] == even[2 * rank]["seen"][2:]
        assert data[rank]["losses"] == pytest.approx(even[2 * rank]["losses"][2:], rel=1e-4)
    assert tensor[0]["seen"] == tensor[1]["seen"]
    assert len(tensor[0]["seen"]) == 12, "half of the first epoch, and the second"

"""Lightning and Accelerate on two ranks resume checkpoints of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.equality import check_equal
from tests.support.integrations.plain_loops import FORMATS, Loop
from tests.support.processes.launch import torchrun
from tests.support.torch_training import whole_state

pytestmark = pytest.mark.integration

STOP = 6


def test_every_rank_continues_the_loop_or_raises(tmp_path: Path) -> None:
    """The state is equal bit for bit, losses up to the order of sums."""
    straight, stopped = Loop().run(), Loop().run(STOP)
    expected = whole_state(stopped.model, stopped.optimizer)
    kinds = [kind for kind in FORMATS if kind not in ("accelerate", "stock accelerate")]
    paths = {kind: str(FORMATS[kind](stopped, tmp_path / kind)) for kind in kinds}
    broken = FORMATS["dcp"](stopped, tmp_path / "broken")
    next(broken.glob("*.distcp")).unlink()
    runs = [
        *(("lightning fsdp", paths[kind]) for kind in kinds),
        ("lightning ddp", paths["torch"]),
        *(("accelerate fsdp", paths[kind]) for kind in kinds),
        ("accelerate ddp", paths["unified"]),
        ("lightning fsdp", str(broken)),
        ("accelerate fsdp", str(broken)),
    ]
    output = tmp_path / "results"
    torchrun(2, "worker_foreign.py", output, json.dumps(runs), timeout_seconds=300)
    *resumed, lightning_errors, accelerate_errors = torch.load(output)
    for (trainer, path), (loaded, losses, rates) in zip(runs, resumed, strict=False):
        check_equal(loaded, expected, f"{trainer} from {path}")
        assert rates == straight.rates[STOP:]
        torch.testing.assert_close(losses, straight.losses[STOP:], rtol=1e-4, atol=1e-5)
    for errors in (lightning_errors, accelerate_errors):
        assert len(errors) == 2
        assert all("distcp" in error and "is missing" in error for error in errors)

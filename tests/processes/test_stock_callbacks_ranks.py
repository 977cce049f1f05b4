"""Every stock callback of Lightning, of Hugging Face's Trainer and of Accelerate saves and resumes
on 4 ranks, though its values may differ between ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes.launch import torchrun

KEPT = "Lightning skips an update at a resume"  # known, of StochasticWeightAveraging


@pytest.mark.long
def test_each_rank_gets_its_values_and_only_they_are_warned_of(tmp_path: Path) -> None:
    torchrun(4, "worker_stock_callbacks.py", tmp_path, timeout_seconds=500)
    results = json.loads((tmp_path / "differing.json").read_text())
    for case, (differing, messages) in results.items():
        own = [text for text in messages if KEPT not in text]
        assert bool(own) == bool(differing), (case, own, differing)
    differing = {case: names for case, (names, _) in results.items() if names}
    early = [
        f"""extra.lightning.callbacks["EarlyStopping{{'monitor': '{name}', 'mode': 'min'}}"]"""
        for name in ("loss", "own")
    ]
    own = ["extra.lightning.callbacks.OfRank"]
    accelerate = ["extra.accelerate.custom", "extra.accelerate.scaler.scale"]
    assert differing == {
        "ddp EarlyStopping": early,
        "4x1 EarlyStopping": early,
        "ddp OfRank": own,
        "4x1 OfRank": own,
        "accelerate ddp": accelerate,
        "accelerate fsdp": accelerate,
    }

"""Adapters and the data position under DDP: two processes resume as if not stopped, and one resumes
at the same sample.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

import unified_ckpt as uc
from tests.support.integrations.adapter_models import changing_lora
from tests.support.integrations.trainer_positions import recording_trainer, train
from tests.support.integrations.trainers import model
from tests.support.processes.launch import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]


def test_two_ranks_resume_and_one_continues_the_samples(tmp_path: Path) -> None:
    torchrun(2, "worker_trainer_adapters.py", tmp_path, timeout_seconds=240)
    first, second = (torch.load(tmp_path / f"samples-{rank}.pt") for rank in range(2))
    order = [
        i
        for start in range(0, len(first), 2)
        for samples in (first, second)
        for i in samples[start : start + 2]
    ]
    alone = recording_trainer(tmp_path / "alone", batch=6, net=changing_lora(), save_strategy="no")
    assert train(alone, resume=True) == order[60:], "12 of epoch 1 were taken, in rounds of 2 by 2"
    folder = tmp_path / "run" / "checkpoint-15"
    assert uc.verify(folder, deep=True).ok
    with uc.open(folder) as source:
        names = {name.removeprefix("base_model.model.") for name in source["trainable"]}
    assert {name.partition(".")[0] for name in names} == {"average", "balance", "norm", "table"}
    PeftModel.from_pretrained(model(), folder)

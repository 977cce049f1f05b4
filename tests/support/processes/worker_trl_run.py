"""A rank of TRL's SFTTrainer with a manager: `worker_trl_run.py ROOT CASE…`."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from transformers import Trainer, TrainerCallback

from tests.support.integrations.trls import make
from tests.support.processes.run_cases import run_cases
from tests.support.processes.worker_trainer_run import train


def make_sft(out: Path, callbacks: list[TrainerCallback], arguments: dict[str, Any]) -> Trainer:
    return make("SFT", out, callbacks, **arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    disable_progress_bars()
    run_cases(partial(train, make=make_sft), {})

"""A rank of Hugging Face's Trainer with a manager: `worker_trainer_run.py ROOT CASE…`."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

import unified_ckpt as uc
from tests.support.integrations.trainers import losses, trainer
from tests.support.processes.run_cases import (
    STEPS,
    AfterStep,
    crash_and_resume_tiers,
    run,
    run_cases,
)
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

Make = Callable[[Path, list[TrainerCallback], dict[str, Any]], Trainer]
OPTIONS = uc.ManagerOptions(notice_seconds=0.05, retry_seconds=0.0, keep_every_steps=8)


class At(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, function: AfterStep) -> None:
        self._function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._function(state.global_step)


class Disk:
    """Stands in for a tokenizer: its files and those after it hit a full disk, once each."""

    def __init__(self) -> None:
        self._saves = 0

    def save_pretrained(self, folder: str) -> None:
        self._saves += 1
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        limit = 64 << 10 if self._saves == 3 else unlimited  # less than the model
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
        with open("/dev/full" if self._saves == 1 else os.path.join(folder, "words"), "w") as file:
            file.write("word")


def make_trainer(out: Path, callbacks: list[TrainerCallback], arguments: dict[str, Any]) -> Trainer:
    return trainer(out, *callbacks, native=True, **arguments)


def train(
    root: Path,
    after_step: AfterStep,
    *,
    resume: bool = False,
    options: uc.ManagerOptions = OPTIONS,
    save_on_exception: bool = False,
    disk: Disk | None = None,
    make: Make = make_trainer,
) -> Any:
    options = options.model_copy(update={"save_on_exception": save_on_exception})
    ours = UnifiedCheckpointCallback(
        manager_options=options, save_options=uc.SaveOptions(fsync=False)
    )
    backend = {"ddp_backend": "gloo"} if int(os.environ["WORLD_SIZE"]) > 1 else {}
    arguments = {"max_steps": STEPS, "save_steps": 8, "save_total_limit": 3, **backend}
    fitter = make(root / "run", [ours, At(after_step)], arguments)
    if disk is not None:
        fitter.processing_class = disk
    fitter.train(resume_from_checkpoint=resume)
    if fitter.state.global_step < STEPS:
        return ours.checkpoints, None
    weights = fitter.accelerator.unwrap_model(fitter.model).state_dict()
    return ours.checkpoints, (weights, losses(fitter))


def full(root: Path) -> None:
    run(train, root, lambda step: time.sleep(0.05 if step > 16 else 0), disk=Disk())


def tiers(root: Path) -> None:
    crash_and_resume_tiers(train, root, OPTIONS)


if __name__ == "__main__":
    run_cases(train, {"full": full, "tiers": tiers})

"""A rank of Hugging Face's Trainer with a manager: `worker_trainer_run.py ROOT CASE…`.

The weights and losses of each case that ends go to `ROOT/CASE.pt`, by rank 0.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import unified_ckpt as uc
from tests.support.trainers import losses, trainer
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

STEPS = 24
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1}
OPTIONS = uc.ManagerOptions(notice_seconds=0.05, retry_seconds=0.0, keep_every_steps=8)


class At(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, function: Callable[[int], object]) -> None:
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


def train(
    root: Path,
    *callbacks: TrainerCallback,
    options: uc.ManagerOptions = OPTIONS,
    resume: bool = False,
    **arguments: Any,
) -> UnifiedCheckpointCallback:
    ours = UnifiedCheckpointCallback(
        manager_options=options, save_options=uc.SaveOptions(fsync=False)
    )
    disk = arguments.pop("disk", None)
    backend = {"ddp_backend": "gloo"} if int(os.environ["WORLD_SIZE"]) > 1 else {}
    run = trainer(
        root / "run",
        ours,
        *callbacks,
        native=True,
        max_steps=STEPS,
        **{"save_steps": 8, "save_total_limit": 3, **backend, **arguments},
    )
    run.processing_class = disk
    run.train(resume_from_checkpoint=resume)
    if run.args.process_index == 0 and run.state.global_step == STEPS:
        weights = run.accelerator.unwrap_model(run.model).state_dict()
        torch.save((weights, losses(run)), root / "ended.pt")
    return ours


def notice(number: int, rank: int, step: int) -> Callable[[int], None]:
    """Send a signal to one rank after a step, and wait there so that its notice is polled."""

    def send(current: int) -> None:
        if current == step and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)
        if current >= step:
            time.sleep(0.03)

    return send


def run_case(root: Path, case: str) -> None:
    last = int(os.environ["WORLD_SIZE"]) - 1
    if case == "straight":
        train(root)
    elif case == "resume":
        train(root, resume=True)
    elif case == "full":
        train(root, At(lambda step: time.sleep(0.05 if step > 16 else 0)), disk=Disk())
    elif case in SIGNALS:
        stopped = train(root, At(notice(SIGNALS[case], last, 6))).checkpoints
        assert stopped.should_stop
        (root / f"stop-{os.environ['RANK']}").write_text(str(stopped.steps()[-1].step))
        assert not (root / "ended.pt").exists()
        train(root, resume=True)
    elif case == "tiers":
        local = OPTIONS.model_copy(
            update={"local_directory": str(root / "local"), "local_interval_steps": 2}
        )
        stopped = train(root, At(notice(signal.SIGTERM, 0, 6)), options=local).checkpoints
        assert stopped.should_stop
        train(root, options=local, resume=True)
    elif case == "slow":  # for a signal from outside
        (root / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

        def report(step: int) -> None:
            if step == 10:
                (root / f"begun-{os.environ['RANK']}").touch()
            time.sleep(0.1 if step >= 10 else 0)

        train(root, At(report))


def main() -> None:
    root = Path(sys.argv[1])
    for case in sys.argv[2:]:
        folder, _, name = case.rpartition("/")
        (root / (folder or name)).mkdir(exist_ok=True)
        run_case(root / (folder or name), name)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else gloo may abort the exit


if __name__ == "__main__":
    main()

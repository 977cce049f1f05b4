"""A rank of Lightning's Trainer with a manager: `worker_lightning_run.py ROOT CASE…`.

The weights and losses of each case that ends go to `ROOT/CASE/ended.pt`, by rank 0.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

import unified_ckpt as uc
from tests.support.lightnings import OPTIONS, Net, trainer
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback

SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1}
EVERY = {"every_n_train_steps": 4, "save_top_k": 2, "monitor": "step", "mode": "max"}
RUN_OPTIONS = uc.ManagerOptions(notice_seconds=0.05, retry_seconds=0.0)


class Events(pl.Callback):
    """Calls `function` after each batch."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._function(trainer.global_step)


def train(root: Path, function: Any = lambda _: None, ckpt_path: str | None = None) -> Any:
    """Return the callback, or None for a run that was stopped."""
    torch.manual_seed(0)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    batch = max(4 // world, 2)  # running statistics need two
    net = Net(batch=batch)
    ours = UnifiedCheckpointCallback(manager_options=RUN_OPTIONS, save_options=OPTIONS)
    distributed = (
        {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": world}
        if world > 1
        else {}
    )
    fitter = trainer(
        root / "run",
        native=True,
        checkpoints={**EVERY, "save_last": "link"},
        callbacks=[ours, Events(function)],
        max_epochs=6 * batch * world // 4,
        **distributed,
    )
    with contextlib.suppress(SystemExit):
        fitter.fit(net, ckpt_path=ckpt_path)
        if rank == 0:
            torch.save((net.state_dict(), net.losses), root / "ended.pt")
    return ours


def after(number: int, step: int, rank: int) -> Any:
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
        train(root, ckpt_path="last")
    elif case in SIGNALS:
        assert train(root, after(SIGNALS[case], 6, last)).checkpoints.should_stop
        assert not (root / "ended.pt").exists()
        train(root, ckpt_path="last")
    elif case == "full":
        train(root, fill_disk(root))
    elif case == "slow":
        (root / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

        def report(step: int) -> None:
            if step == 6:
                (root / f"begun-{os.environ['RANK']}").touch()
            time.sleep(0.1 if step >= 6 else 0)

        train(root, report)


def fill_disk(root: Path) -> Any:
    """Let no file grow while step 8 is saved, and record the step that is saved in its place."""
    path, unlimited = root / "run" / "step=8.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(step: int) -> None:
        if step >= 8:
            size = 64 if step < 10 else unlimited
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited))
            # the save must fail before the limit goes
            time.sleep(1.5 if step == 9 else 0.2 if step < 15 else 0)
        if step == 15 and int(os.environ["RANK"]) == 0:
            (root / "repeated").write_text(str(uc.open(path).step))

    return limit


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for case in sys.argv[2:]:
        folder, _, name = case.rpartition("/")
        (root / (folder or name)).mkdir(exist_ok=True)
        run_case(root / (folder or name), name)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

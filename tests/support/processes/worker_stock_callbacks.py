"""A rank that saves and resumes with every stock callback, of Lightning, of Hugging Face's Trainer,
and of Accelerate: `worker_stock_callbacks.py ROOT`.

Rank 0 writes `ROOT/differing.json`: the values that differed between ranks, by case. Each rank
checks what came back to it, and that no save logged a warning that the case does not expect.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks as stock
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer import call
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
)
from transformers.integrations import TensorBoardCallback, WandbCallback

from tests.support.equality import same
from tests.support.integrations.lightnings import OPTIONS, Net
from tests.support.integrations.trainers import StopAt, trainer
from tests.support.processes.worker_accelerate import Job
from tests.support.processes.worker_lightning import strategy
from unified_ckpt.integrations.accelerate import load_state, save_state
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAVES = {"every_n_train_steps": 1, "filename": "{step}"}


class Messages(logging.Handler):
    """Collects the warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Writer(stock.BasePredictionWriter):
    """The least that a writer of predictions defines."""


class OfRank(pl.Callback):
    """Has a value of its own on each rank."""

    state_key = "OfRank"

    def state_dict(self) -> dict[str, Any]:
        return {"rank": RANK, f"only {RANK}": torch.full((2,), RANK)}


class Average(pl.Callback):
    """Averages shards of the weights, as the documentation shows."""

    last: ClassVar[dict[str, torch.Tensor]] = {}  # of the last save

    def __init__(self) -> None:
        self.shards: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.shards.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        checkpoint["ema"] = self.shards
        Average.last = {name: shard.clone() for name, shard in self.shards.items()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        for name, p in pl_module.named_parameters():
            loaded, expected = checkpoint["ema"][name], self.last[name]
            if isinstance(p, DTensor):
                loaded = distribute_tensor(loaded, p.device_mesh, p.placements)
                loaded, expected = loaded.to_local(), expected.to_local()
            assert torch.equal(loaded, expected), name
            self.shards[name] = self.last[name].clone()


class Probe(pl.Callback):
    """Records the states of callbacks of each load: LearningRateFinder loads before or after."""

    def __init__(self) -> None:
        self.loads: list[dict[str, Any]] = []

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.loads.append(dict(checkpoint["callbacks"]))


def checkpoints(root: Path) -> list[pl.Callback]:
    """Ways to save. The metrics `loss` and `own` are not synchronized: they differ by rank."""
    return [
        stock.ModelCheckpoint(root / "best", monitor="loss", save_top_k=2, save_last=True, **SAVES),
        stock.ModelCheckpoint(root / "link", monitor="own", mode="max", save_last="link", **SAVES),
        stock.ModelCheckpoint(root / "time", train_time_interval=timedelta(microseconds=1)),
        stock.ModelCheckpoint(root / "weights", save_weights_only=True, every_n_epochs=1),
        stock.OnExceptionCheckpoint(root),
    ]


# Absent: SpikeDetection, whose state Lightning 2.6 cannot load; BatchSizeFinder, which rejects
# DDP; BackboneFinetuning, under which DDP does not average the gradients of the backbone, so that
# ranks train different ones, and sharded parameters are an error of Lightning.
LIGHTNING: dict[str, Callable[[], list[pl.Callback]]] = {
    "ModelCheckpoint": list,
    "EarlyStopping": lambda: [
        stock.EarlyStopping("loss", patience=99, check_on_train_epoch_end=True),
        stock.EarlyStopping("own", patience=99, check_on_train_epoch_end=True),
        stock.EarlyStopping("val", patience=99),
    ],
    "Timer": lambda: [stock.Timer(timedelta(hours=1), interval="step")],
    "OfRank": lambda: [OfRank()],
    "Average": lambda: [Average()],
    "monitors": lambda: [
        stock.LearningRateMonitor("step"),
        stock.DeviceStatsMonitor(cpu_stats=True),
        stock.ThroughputMonitor(lambda batch: len(batch[0])),
        stock.LambdaCallback(on_train_start=lambda *_: None),
        stock.GradientAccumulationScheduler({1: 2}),
        stock.RichModelSummary(),
        Writer(),
    ],
    "TQDMProgressBar": lambda: [stock.TQDMProgressBar(), stock.ModelSummary()],
    "RichProgressBar": lambda: [stock.RichProgressBar()],
    "StochasticWeightAveraging": lambda: [stock.StochasticWeightAveraging(0.01, 1)],
    "WeightAveraging": lambda: [stock.WeightAveraging()],
    "EMAWeightAveraging": lambda: [stock.EMAWeightAveraging(decay=0.9)],
    "ModelPruning": lambda: [stock.ModelPruning("l1_unstructured", amount=0.5)],
    "LearningRateFinder": lambda: [stock.LearningRateFinder(num_training_steps=4)],
}
# Lightning rejects sharded parameters here, or loses track of them, also without this package.
UNSHARDED = {
    "StochasticWeightAveraging",
    "WeightAveraging",
    "EMAWeightAveraging",
    "ModelPruning",
}


def fit(kind: str, name: str, root: Path, *, resume: str | None = None) -> Any:
    """Train and return the trainer, its probe, and the names of the values that differed."""
    torch.manual_seed(0)
    net = Net(sharded=kind != "ddp", dropout=0.0)
    ours, probe, differing = UnifiedCheckpointCallback(save_options=OPTIONS), Probe(), set[str]()
    ours.on_commit(lambda report: differing.update(report.differing_values))
    shows = "ProgressBar" in name
    lightning_trainer = pl.Trainer(
        default_root_dir=str(root),
        accelerator="cpu",
        strategy=strategy(kind),
        devices=WORLD,
        logger=CSVLogger(root),
        log_every_n_steps=1,
        enable_progress_bar=shows,
        enable_model_summary=shows,
        max_epochs=3 if resume else 2,
        callbacks=[*checkpoints(root), *LIGHTNING[name](), ours, probe],
    )
    lightning_trainer.fit(net, ckpt_path=resume)
    return lightning_trainer, probe, differing


def run_lightning(kind: str, name: str, root: Path) -> list[str]:
    """Save and resume; return the values that differed."""
    fitter, _, differing = fit(kind, name, root)
    path = fitter.strategy.broadcast(str(root / "resume.ckpt"))
    fitter.save_checkpoint(path)
    saved = call._call_callbacks_state_dict(fitter)
    resumed, probe, _ = fit(kind, name, root, resume=path)
    assert resumed.global_step > fitter.global_step
    by_rank: list[Any] = [None] * WORLD
    dist.all_gather_object(by_rank, saved)
    for key, state in saved.items():
        expected = by_rank[0][key] if key.startswith(("Timer", "ModelCheckpoint")) else state
        assert any(same(loaded[key], expected) for loaded in probe.loads), (kind, name, key)
    return sorted(differing)


def run_trainer(root: Path) -> list[str]:
    """Save and resume with all callbacks at once; return the values that differed."""

    def make(*callbacks: Any) -> Any:
        early = EarlyStoppingCallback(early_stopping_patience=99)
        loggers = [TensorBoardCallback(), WandbCallback(), PrinterCallback(), ProgressCallback()]
        arguments = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        arguments |= {"metric_for_best_model": "loss", "ddp_backend": "gloo"}
        return trainer(root, early, *loggers, DefaultFlowCallback(), *callbacks, **arguments)

    first = make(StopAt(4))
    ours = next(c for c in first.callback_handler.callbacks if hasattr(c, "on_commit"))
    differing = set[str]()
    ours.on_commit(lambda report: differing.update(report.differing_values))
    first.train()
    second = make()
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step > first.state.global_step == 4
    return sorted(differing)


class Count:
    """A registered object with a value of each rank."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def accelerate_job(kind: str, value: int) -> tuple[Job, Count]:
    job, count = Job(kind, seed=0), Count(value)
    job.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (value + 1))
    job.accelerator.register_for_checkpointing(count)
    return job, count


def run_accelerate(kind: str, root: Path) -> list[str]:
    """Save and resume with everything that can be registered; return the values that differed."""
    job, _ = accelerate_job(kind, RANK)
    job.run(stop=4)
    report = save_state(job.accelerator, root / "saved", options=OPTIONS)
    resumed, count = accelerate_job(kind, 99)
    load_state(resumed.accelerator, root / "saved")
    assert count.value == RANK
    assert resumed.accelerator.scaler.get_scale() == 2.0 ** (RANK + 1)
    resumed.accelerator.scaler = None
    resumed.run(start=4, stop=6)
    return list(report.differing_values)


def main() -> None:
    root = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    os.environ["WANDB_MODE"] = "disabled"
    messages, results = Messages(), dict[str, Any]()
    logging.getLogger("unified_ckpt").addHandler(messages)
    cases: dict[str, Callable[[Path], list[str]]] = {}
    for kind in ("ddp", "4x1"):
        for name in LIGHTNING:
            if kind == "ddp" or name not in UNSHARDED:
                cases[f"{kind} {name}"] = partial(run_lightning, kind, name)
    cases["trainer"] = run_trainer
    cases |= {f"accelerate {kind}": partial(run_accelerate, kind) for kind in ("ddp", "fsdp")}
    for name, run in cases.items():
        folder = root / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        messages.texts.clear()
        results[name] = [run(folder), [text.partition(": ")[2] for text in messages.texts]]
    if RANK == 0:
        (root / "differing.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

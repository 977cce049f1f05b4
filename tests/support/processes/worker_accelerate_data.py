"""torchrun script: Accelerate under DDP, with batch norm, dropout and each way to read data. A run
that stopped within an epoch resumes bit for bit. The Trainer warns where it cannot.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import unified_ckpt as uc
from tests.support.integrations.trainer_positions import recording_trainer, train
from tests.support.integrations.trainers import StopAt
from tests.support.processes.worker import started
from unified_ckpt.integrations.accelerate import attach, load_state, save_state

EPOCHS = 2
STATEFUL: dict[str, Any] = {"use_stateful_dataloader": True, "use_seedable_sampler": True}
WAYS: dict[str, dict[str, Any]] = {
    "shards": STATEFUL,
    "generator": {"use_stateful_dataloader": True},
    "dispatched": {**STATEFUL, "dispatch_batches": True},
    "split": {**STATEFUL, "dispatch_batches": True, "split_batches": True},
    "stream": {**STATEFUL, "dispatch_batches": True},
}


ROWS: Any = [torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(48)]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Has a state of its own, as those of `datasets` have."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < len(ROWS):
            self.position += 1
            yield ROWS[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Job:
    def __init__(
        self, way: str, seed: int, *, rows: int = len(ROWS), attached: bool = True
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        torch.manual_seed(seed)
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(**WAYS[way])
        )
        if attached:
            attach(self.accelerator)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 8)
        )
        data, shuffled = (Stream(), None) if way == "stream" else (ROWS[:rows], True)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffled)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        torch.manual_seed(seed + 1 + self.accelerator.process_index)
        self.losses: list[float] = []

    def run(self, *, epochs: int = EPOCHS, stop: int | None = None) -> Job:
        for _ in range(epochs):
            for rows in self.loader:
                loss = (self.model(rows) - rows).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                if len(self.losses) == stop:
                    return self
        return self


def check(way: str, root: Path) -> None:
    straight = Job(way, seed=0).run().losses
    per_epoch = len(straight) // EPOCHS
    for stop in (per_epoch,) if way == "generator" else (2, per_epoch, per_epoch + 1):
        folder = root / f"{way}-{stop}"
        stopped = Job(way, seed=0).run(stop=stop)
        save_state(stopped.accelerator, folder, step=stop, options=uc.SaveOptions(fsync=False))
        with uc.open(folder) as source:
            mean = source["model"]["1.running_mean"][...]
        mean_of_rank_0 = stopped.model.module[1].running_mean.clone()
        dist.broadcast(mean_of_rank_0, src=0)
        assert torch.equal(mean, mean_of_rank_0), (way, stop)
        resumed = Job(way, seed=3)  # another order, unless it is restored
        load_state(resumed.accelerator, folder)
        resumed.run(epochs=EPOCHS - stop // per_epoch)
        assert resumed.losses == straight[stop:], (way, stop)


def recorded_warnings() -> list[str]:
    """Return a list that all later warnings are added to."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unified_ckpt").addHandler(handler)
    return messages


def check_uneven(root: Path) -> None:
    """Rank 0 adds its first samples to a last batch of 7. After a resume, these are others."""
    messages = recorded_warnings()
    for rows, warns in ((48, False), (47, True)):
        stopped = Job("dispatched", seed=0, rows=rows).run(stop=2)
        save_state(stopped.accelerator, root / f"rows-{rows}", options=uc.SaveOptions(fsync=False))
        assert any("last batch has too few samples" in text for text in messages) == warns, rows


def check_first_save(root: Path) -> None:
    """A first save within an epoch comes too late to correct that loop, and warns once."""
    messages = recorded_warnings()
    job = Job("split", seed=0, attached=False).run(stop=2)
    for stop in (1, 2):
        save_state(job.accelerator, root / f"late-{stop}", options=uc.SaveOptions(fsync=False))
    assert sum("attach(accelerator) before the loop" in text for text in messages) == 1


def check_trainer(root: Path) -> None:
    """The Trainer would repeat dispatched batches, and warns. Shards read the same samples."""
    shared: dict[str, Any] = {"batch": 4, "ddp_backend": "gloo", "save_strategy": "no"}
    dispatched = {**shared, "accelerator_config": {"dispatch_batches": True}}
    whole = train(recording_trainer(root / "whole", native=True, **dispatched))
    saving = {**dispatched, "save_strategy": "steps", "save_steps": 8}
    train(recording_trainer(root / "run", StopAt(8), **saving))
    assert train(recording_trainer(root / "run", **shared), resume=True) == whole[8 * 4 :]
    messages = recorded_warnings()
    train(recording_trainer(root / "run", StopAt(9), **dispatched), resume=True)
    assert any("'dispatch_batches': False" in text for text in messages) == (dist.get_rank() == 0)
    unseeded = {**shared, "accelerator_config": {"use_seedable_sampler": False}}
    for step, text in ((6, "generator of the sampler starts anew"), (7, "cannot be reproduced")):
        folder = root / f"unseeded-{step}"
        at = {"save_strategy": "steps", "save_steps": step}
        train(recording_trainer(folder, StopAt(step), **unseeded | at))
        train(recording_trainer(folder, StopAt(step + 1), **unseeded), resume=True)
        assert any(text in message for message in messages) == (dist.get_rank() == 0), step


def main() -> None:
    with started():
        check_trainer(Path(sys.argv[1]) / "trainer")
        check_uneven(Path(sys.argv[1]))
        check_first_save(Path(sys.argv[1]))
        for way in sys.argv[2:] or WAYS:
            check(way, Path(sys.argv[1]))


if __name__ == "__main__":
    main()

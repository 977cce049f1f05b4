"""Accelerate's save_state and load_state through the engine, in one process: stopped and resumed, names, hooks, and errors that users make."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import unified_ckpt as uc
from unified_ckpt.integrations.accelerate import attach, load_state, save_state, save_state_async

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
FAST = uc.SaveOptions(fsync=False)


class Sequences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(i))


class Count:
    """An object to register."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config.attention_dropout = 0.1  # so that random states matter
    return LlamaForCausalLM(config)


class Job:
    """A training script: everything prepared, ready to run, to save and to go on."""

    def __init__(self, seed: int = 0, *, stateful: bool = True, workers: int = 0, project: Path | None = None, **naming: Any) -> None:
        torch.manual_seed(seed)
        loading = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=True)
        named = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True, **naming) if project else None
        self.accelerator = Accelerator(cpu=True, dataloader_config=loading, project_config=named, gradient_accumulation_steps=2)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        loader = torch.utils.data.DataLoader(Sequences(), batch_size=4, shuffle=True, num_workers=workers)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)
        self.losses: list[float] = []
        self.epoch = 0

    def batches(self, skip: int) -> Iterator[torch.Tensor]:
        yield from self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader

    def run(self, epochs: int, *, skip: int = 0, stop: int | None = None) -> Job:
        """Trains up to `epochs`; `skip`: so many steps of the first; `stop`: after so many steps in all."""
        while self.epoch < epochs:
            for ids in self.batches(skip):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(input_ids=ids, labels=ids).loss
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.count.seen += len(ids)
                if stop is not None and len(self.losses) == stop:
                    return self
            self.epoch, skip = self.epoch + 1, 0
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        held = dict(self.accelerator.unwrap_model(self.model).state_dict())
        for i, one in self.optimizer.state_dict()["state"].items():
            held |= {f"{i}/{key}": value for key, value in one.items()}
        return held


def same(one: Job, other: Job) -> bool:
    found, wanted = one.tensors(), other.tensors()
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Accelerate keeps its state for the process; each test starts without."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def straight() -> Job:
    """Three epochs of six steps, uninterrupted."""
    return Job().run(3)


@pytest.mark.parametrize("stop", [4, 6, 10], ids=["midway", "at the last batch", "midway in the second"])
def test_stopped_and_resumed_is_uninterrupted(tmp_path: Path, straight: Job, stop: int) -> None:
    stopped = Job().run(3, stop=stop)
    report = save_state(stopped.accelerator, tmp_path / "c", step=stop, options=FAST)
    assert report.step == stop
    assert not [name for name in os.listdir(tmp_path / "c") if name.endswith((".bin", ".pkl", ".pt"))], "nothing is pickled"
    resumed = Job(seed=7)
    assert load_state(resumed.accelerator, tmp_path / "c").step == stop
    assert same(resumed, stopped)
    assert (resumed.count.seen, resumed.accelerator.step) == (4 * stop, stopped.accelerator.step)
    resumed.epoch = stop // 6
    resumed.run(3)
    assert resumed.losses == straight.losses[stop:]
    assert same(resumed, straight)

"""A training script with Accelerate, small enough for many runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration
from transformers import LlamaConfig, LlamaForCausalLM

import unified_ckpt as uc
from tests.support.equality import same as is_same

FAST = uc.SaveOptions(fsync=False)


SEQUENCES: Any = [
    torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(i)) for i in range(24)
]


class Count:
    """A registered object that counts."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    config.attention_dropout = 0.1  # so that random states matter
    return LlamaForCausalLM(config)


class Job:
    """A training script with everything prepared, that can run, save and resume."""

    def __init__(
        self,
        seed: int = 0,
        *,
        stateful: bool = True,
        dispatch: bool = False,
        workers: int = 0,
        project: Path | None = None,
        **naming: Any,
    ) -> None:
        torch.manual_seed(seed)
        loading = DataLoaderConfiguration(
            use_stateful_dataloader=stateful,
            use_seedable_sampler=True,
            dispatch_batches=dispatch,
        )
        named = (
            ProjectConfiguration(
                project_dir=str(project), automatic_checkpoint_naming=True, **naming
            )
            if project
            else None
        )
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=loading, project_config=named, gradient_accumulation_steps=2
        )
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        loader = torch.utils.data.DataLoader(
            SEQUENCES, batch_size=4, shuffle=True, num_workers=workers
        )
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        if workers:
            # without this, the first epoch uses the order of a sampler that Accelerate replaced
            self.loader.load_state_dict({})
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)
        self.losses: list[float] = []
        self.epoch = 0

    def batches(self, skip: int) -> Iterator[torch.Tensor]:
        yield from self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader

    def run(
        self,
        epochs: int,
        *,
        skip: int = 0,
        stop: int | None = None,
        after_step: Callable[[], bool] = lambda: False,
    ) -> Job:
        """Trains until `epochs` are complete, `stop` steps are done or `after_step` is true.

        The first epoch skips its first `skip` steps.
        """
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
                if after_step() or (stop is not None and len(self.losses) == stop):
                    return self
            self.epoch, skip = self.epoch + 1, 0
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        state_tensors = dict(self.accelerator.unwrap_model(self.model).state_dict())
        for i, state in self.optimizer.state_dict()["state"].items():
            state_tensors |= {f"{i}/{key}": value for key, value in state.items()}
        return state_tensors


def same(job: Job, other: Job) -> bool:
    return is_same(job.tensors(), other.tensors())

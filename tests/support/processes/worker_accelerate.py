"""A rank of training jobs with Accelerate: DDP, FSDP, TP and both. Makes checkpoints under a root,
or loads those of other worlds.

`make`: each kind uninterrupted, then stopped and resumed, bitwise;
then each kind from each other kind's checkpoint. `load`: each kind from every checkpoint under the
root. Rank 0 writes the saved state, and the losses that follow without dropout, to
`<root>/<kind>.pt`.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.integrations.tensor_parallel
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.processes.worker import started
from tests.support.torch_training import whole_state
from unified_ckpt.integrations.accelerate import attach, load_state, save_state

STOP, EPOCHS, STEP_SAMPLES = 4, 2, 8  # of 6 steps an epoch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = (
            nn.Linear(16, 64),
            nn.Linear(64, 16, bias=False),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.up(x).relu()))


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS: Any = [
    torch.randint(0, 100, (8,), generator=torch.Generator().manual_seed(i)) for i in range(48)
]


def make_accelerator(kind: str) -> Accelerator:
    """Accelerate allows FSDP and a mesh on several devices only, never on CPUs. One attribute makes
    the gloo processes pose as devices. Its FSDP2 with TP imports a name that transformers 5.23
    lacks; every parameter here is a DTensor already, so it is not used.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by an earlier plugin
    world = int(os.environ["WORLD_SIZE"])
    arguments: dict[str, Any] = {}
    if "fsdp" in kind:
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=1 if "fsdp1" in kind else 2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
            reshard_after_forward="FULL_SHARD" if "fsdp1" in kind else True,
            use_orig_params=kind == "fsdp1_orig",
        )
    if "tp" in kind:
        arguments["parallelism_config"] = ParallelismConfig(tp_size=2, dp_shard_size=world // 2)
        transformers.integrations.tensor_parallel.ReplicateParallel = None
    if kind != "ddp" and world > 1:
        state = PartialState(cpu=True)
        state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")
    loading = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=5
    )
    # by default Accelerate steps a scheduler once per process, so the rate would depend on the
    # world size
    return Accelerator(
        cpu=True, dataloader_config=loading, step_scheduler_with_optimizer=False, **arguments
    )


class Job:
    def __init__(self, kind: str, seed: int) -> None:
        self.accelerator = make_accelerator(kind)
        torch.manual_seed(seed)
        model, ranks = Net(), self.accelerator.num_processes
        if "tp" in kind:
            plan: dict[str, Any] = {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Replicate()),
            }
            for i in range(2):
                plan |= {f"blocks.{i}.up": ColwiseParallel(), f"blocks.{i}.down": RowwiseParallel()}
            parallelize_module(model, self.accelerator.torch_device_mesh["tp"], plan)
            model.tp_size = 2  # Accelerate reads it
            ranks //= 2
        prepared = model
        if kind == "fsdp1":  # the optimizer must have the flat parameters
            prepared = self.accelerator.prepare(model)
        optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        loader = torch.utils.data.DataLoader(TOKENS, batch_size=STEP_SAMPLES // ranks, shuffle=True)
        self.optimizer, self.scheduler, self.loader, *models = self.accelerator.prepare(
            optimizer, scheduler, loader, *([model] if prepared is model else [])
        )
        self.model = models[0] if models else prepared
        torch.manual_seed(
            seed + 1 + self.accelerator.process_index * ranks // self.accelerator.num_processes
        )
        self.losses: list[float] = []

    def run(
        self,
        *,
        start: int = 0,
        stop: int = 6 * EPOCHS,
        after_step: Callable[[], bool] = lambda: False,
    ) -> Job:
        while start + len(self.losses) < stop:
            for ids in self.loader:
                loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.losses.append(self.accelerator.gather(loss.detach().reshape(1)).mean().item())
                if after_step() or start + len(self.losses) == stop:
                    return self
        return self

    def whole(self) -> dict[str, torch.Tensor]:
        return whole_state(self.model, self.optimizer)


def quiet(kind: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The state after a load, and the losses that follow without dropout."""
    job = Job(kind, seed=9)
    load_state(job.accelerator, folder)
    state = job.whole()
    job.model.eval()
    return state, job.run(start=STOP).losses


def make(root: Path, kind: str) -> None:
    straight = Job(kind, seed=0).run()
    stopped = Job(kind, seed=0).run(stop=STOP)
    save_state(stopped.accelerator, root / kind, step=STOP, options=uc.SaveOptions(fsync=False))
    saved = stopped.whole()
    resumed = Job(kind, seed=3)
    load_state(resumed.accelerator, root / kind)
    check_equal(resumed.whole(), saved, f"{kind} after the load")
    resumed.run(start=STOP)
    assert resumed.losses == straight.losses[STOP:], kind
    check_equal(resumed.whole(), straight.whole(), f"{kind} at the end")
    _, losses = quiet(kind, root / kind)
    if dist.get_rank() == 0:
        torch.save((saved, losses), root / f"{kind}.pt")
    dist.barrier()


class Fails:
    """A registered object that the last rank cannot load."""

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, _: dict[str, int]) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no good")


def check_errors_reach_all(root: Path, kind: str) -> None:
    job = Job(kind, seed=1)
    attach(job.accelerator, save_options=uc.SaveOptions(fsync=False))
    job.accelerator.register_for_checkpointing(Fails())
    job.accelerator.save_state(root / "fails")
    for path, text in (
        (root / "fails", "ValueError: no good"),
        (root / "nothing", "got nothing, expected a checkpoint folder"),
    ):
        with pytest.raises(uc.CheckpointError, match=text):
            job.accelerator.load_state(path)


def load(root: Path, kind: str, other: str) -> None:
    saved, expected_losses = torch.load(root / f"{other}.pt")
    state, losses = quiet(kind, root / other)
    check_equal(state, saved, f"{kind} from {other}")
    torch.testing.assert_close(
        torch.tensor(losses),
        torch.tensor(expected_losses),
        rtol=1e-4,
        atol=1e-5,
        msg=lambda text: f"{kind} from {other}: {text}",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--make", nargs="*", default=[])
    parser.add_argument("--load", nargs="*", default=[])
    arguments = parser.parse_args()
    with started() as (_, world):
        warnings.filterwarnings("ignore", module=r"torch.*")
        for kind in arguments.make:
            make(arguments.root, kind)
        if arguments.make and world > 1:
            check_errors_reach_all(arguments.root, arguments.make[0])
        for kind in [*arguments.make, *arguments.load]:
            for file in sorted(arguments.root.glob("*.pt")):
                if file.stem != kind:
                    load(arguments.root, kind, file.stem)


if __name__ == "__main__":
    main()

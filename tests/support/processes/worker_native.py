"""Saves sharded jobs with native frameworks: Accelerate (FSDP2), DCP, Lightning, the Trainer.

Each checkpoint lies in the root, next to `<name>.pt` with the same state, gathered by torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import StateDictType

from tests.support.integrations.lightnings import Net
from tests.support.processes import worker_accelerate, worker_lightning, worker_sharded
from tests.support.processes.worker import started
from tests.support.torch_training import whole_state

RANK = int(os.environ["RANK"])


def main() -> None:
    root = Path(sys.argv[1])
    with started():
        accelerate(root)
        lightning(root)
        trainer(root)


def leave(root: Path, name: str, whole: Mapping[str, Any]) -> None:
    if RANK == 0:
        torch.save(dict(whole), root / f"{name}.pt")
    dist.barrier()


def accelerate(root: Path) -> None:
    job = worker_accelerate.Job("fsdp", seed=0).run(stop=2)
    accelerator, plugin = job.accelerator, job.accelerator.state.fsdp_plugin
    accelerator.save_state(str(root / "sharded"))
    leave(root, "sharded", job.whole())
    save_fsdp_model(plugin, accelerator, job.model, str(root / "ranks"), use_dcp=False)
    save_fsdp_optimizer(
        plugin, accelerator, job.optimizer, job.model, str(root / "ranks"), use_dcp=False
    )
    leave(root, "ranks", job.whole())
    plugin.set_state_dict_type(StateDictType.FULL_STATE_DICT)
    accelerator.save_state(str(root / "full"))
    leave(root, "full", job.whole())
    weights = get_model_state_dict(job.model)
    files = {name: 1 + number % 2 for number, name in enumerate(weights)}
    dcp.save(
        weights,
        storage_writer=HuggingFaceStorageWriter(
            str(root / "hfdcp"), save_distributed=True, fqn_to_index_mapping=files
        ),
    )
    leave(root, "hfdcp", {name: tensor for name, tensor in job.whole().items() if "/" not in name})


def lightning(root: Path) -> None:
    torch.manual_seed(0)
    lightning_trainer = worker_lightning.trainer(
        root, strategy=worker_lightning.strategy("2x1"), devices=2, native=True, max_epochs=1
    )
    net = Net(sharded=True)
    lightning_trainer.fit(net)
    lightning_trainer.save_checkpoint(root / "lightning.ckpt")
    leave(root, "lightning", whole_state(net, *lightning_trainer.optimizers))


def trainer(root: Path) -> None:
    if RANK == 0:
        worker_sharded.model().save_pretrained(root / "start")
    dist.barrier()
    hf_trainer = worker_sharded.trainer(
        root / "run", "accelerate", worker_sharded.StopAt(2), native=True
    )
    hf_trainer.train()
    leave(root, "trainer", whole_state(hf_trainer.model, hf_trainer.optimizer))


if __name__ == "__main__":
    main()

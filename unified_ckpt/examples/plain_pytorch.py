"""A plain training loop that resumes on any number of processes, under DDP, FSDP2 or neither.

    python plain_pytorch.py run --until 10
    torchrun --standalone --nproc-per-node 2 plain_pytorch.py run --until 20 --fsdp

A small Llama learns the bytes of a text, by default of this file; transformers opens its
checkpoints. Every step prints the samples of each rank. Across both runs, each sample appears once
per epoch. Ctrl-C and SIGTERM save and stop. plain_pytorch.sbatch is a Slurm job of it.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import unified_ckpt as uc

GLOBAL_BATCH = 8  # of all ranks together, so that a step means the same on any number of them


class Windows(Dataset[Any]):
    """The text in windows of 64 tokens, each with its number. A token is a byte."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.tensor(list(text)).unfold(0, 64, 64)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.tokens[index]


def build(config: LlamaConfig, world: int, device: torch.device, fsdp: bool) -> tuple[Any, Any]:
    """Return the model, which is the same on every rank, and the average of its weights."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(device)
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    if world > 1 and fsdp:
        mesh = init_device_mesh(device.type, (world,))
        for llama in (model, average.module):
            for layer in llama.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(llama, mesh=mesh)
        return model, average
    return (DistributedDataParallel(model) if world > 1 else model), average


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, nn.Module]:
    """Train this rank until step `--until`. Return the model and the average of its weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--until", type=int, required=True, help="the last step of this run")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters; else DDP")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--local-directory", help="a folder on a disk of this node, which gets every step"
    )
    given = parser.parse_args(arguments)

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        attention_dropout=given.dropout,
        architectures=["LlamaForCausalLM"],
    )
    model, average = build(config, world, device, given.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    dataset = Windows(given.text.read_bytes())
    sampler = uc.ElasticSampler(dataset, seed=1)
    loader = DataLoader(
        dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler, num_workers=given.workers
    )
    torch.manual_seed(rank)  # other dropout on each rank

    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "parts": {"ema": average},
        "extra": {"scheduler": scheduler, "sampler": sampler},
        "rank_extra": {"random": uc.RandomStates()},
    }
    attach = config.save_pretrained  # adds config.json, for from_pretrained
    options = uc.ManagerOptions(
        interval_steps=5,
        keep_latest=2,
        local_directory=given.local_directory,
        local_interval_steps=1 if given.local_directory else None,
    )
    with uc.CheckpointManager(given.run, options=options) as manager:
        report = manager.restore(**state)  # None: start fresh
        step = (report.step or 0) if report else 0
        while step < given.until and not manager.should_stop:
            for indices, tokens in sampler.batches(loader):  # the rest of the epoch
                step += 1
                loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                average.update_parameters(
                    model.module if isinstance(model, DistributedDataParallel) else model
                )
                mean = loss.detach()
                if world > 1:
                    dist.all_reduce(mean)
                print(
                    f"step {step} rank {rank} loss {float(mean) / world!r} samples "
                    f"{indices.tolist()}",
                    flush=True,
                )
                manager.save(step, **state, attach=attach)  # only when due
                if step == given.until or manager.should_stop:
                    break
        manager.finish(step, **state, attach=attach)
    if world > 1:
        dist.destroy_process_group()
    return model, average


if __name__ == "__main__":
    main()

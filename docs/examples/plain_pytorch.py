"""A plain training loop that resumes on any number of processes, under DDP, FSDP2 or neither.

    python plain_pytorch.py run --until 10
    torchrun --standalone --nproc-per-node 2 plain_pytorch.py run --until 20 --fsdp

Every step prints the samples of each rank. Across both runs, each sample appears once per epoch.
Ctrl-C and SIGTERM save and stop.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import unified_ckpt as uc

GLOBAL_BATCH = 8  # of all ranks together, so that a step means the same on any number of them


class Sums(Dataset):
    def __len__(self):
        return 52

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return index, x, x.sum()


def build(dropout, world, device, fsdp):
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 1)).to(
        device
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if world > 1 and fsdp:
        mesh = init_device_mesh(device.type, (world,))
        fully_shard(model, mesh=mesh)
        fully_shard(average.module, mesh=mesh)
    elif world > 1:
        model = DistributedDataParallel(model)
    return model, average


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--until", type=int, required=True, help="the last step of this run")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters; else DDP")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=2)
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

    model, average = build(given.dropout, world, device, given.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    dataset = Sums()
    sampler = uc.ElasticSampler(dataset, seed=1)
    loader = DataLoader(
        dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler, num_workers=given.workers
    )
    torch.manual_seed(rank)  # other dropout on each rank

    state = {
        "model": model,
        "optimizer": optimizer,
        "parts": {"ema": average},
        "extra": {"scheduler": scheduler, "sampler": sampler},
        "rank_extra": {"random": uc.RandomStates()},
    }
    with uc.CheckpointManager(
        given.run, options=uc.ManagerOptions(interval_steps=5, keep_latest=2)
    ) as manager:
        report = manager.restore(**state)  # None: start fresh
        step = report.step if report else 0
        while step < given.until and not manager.should_stop:
            for indices, x, y in sampler.batches(loader):  # the rest of the epoch
                step += 1
                loss = (model(x.to(device)).squeeze(1) - y.to(device)).square().mean()
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
                manager.save(step, **state)  # only when due
                if step == given.until or manager.should_stop:
                    break
        manager.finish(step, **state)
    if world > 1:
        dist.destroy_process_group()
    return model, average


if __name__ == "__main__":
    main()

"""torchrun script: trains under FSDP2 x TP, saves, and continues with a larger vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.processes.worker import started
from tests.support.runtime.torch_state.optimizers import FusedAdam
from tests.support.torch_training import next_token_loss, train, whole_state

SMALL, LARGE = 13, 18  # neither is divisible by 4
PADDED = uc.LoadOptions(
    source=uc.SourceOptions(rename=[{"match": ["emb.weight", "head.weight"], "pad": 0}])
)


class Model(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(vocabulary)
        self.emb = nn.Embedding(vocabulary, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(self.emb(ids))))


def sharded(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    plan = {
        "emb": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    for module in (model.emb, model.head, model):
        fully_shard(module, mesh=mesh["fsdp"])
    return model


def grow(root: Path, dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer]) -> None:
    """New rows are the model's own, in its masters too, and zeros in other state."""
    small, larger = (sharded(Model(vocabulary).to(dtype)) for vocabulary in (SMALL, LARGE))
    first, optimizer = (make(model.parameters(), lr=0.05) for model in (small, larger))
    train(small, first, partial(next_token_loss, vocabulary=SMALL), 0, 3)
    uc.save(root / "c", model=small, optimizer=first)
    saved, expected = whole_state(small, first), {}
    fresh = whole_state(larger)
    for key, stored in saved.items():
        name, _, state = key.partition("/")
        new = fresh[name] if state in ("", "master_param") else torch.zeros_like(fresh[name])
        grown = [stored, new[len(stored) :].to(stored.dtype)] if stored.dim() else [stored[None]]
        expected[key] = torch.cat(grown).view(new.shape if stored.dim() else ())
    assert [placement.dim for placement in larger.emb.weight.placements] == [0, 0]
    report = uc.load(root / "c", model=larger, optimizer=optimizer, options=PADDED)
    check_equal(whole_state(larger, optimizer), expected)
    assert [note.count("(13, 6) -> (18, 6)") for note in report.notes] == [8]
    read = torch.tensor([report.bytes_read, report.verified_bytes])
    dist.all_reduce(read)
    assert read.tolist() == [sum(tensor.nbytes for tensor in saved.values())] * 2
    train(larger, optimizer, partial(next_token_loss, vocabulary=LARGE), 3, 1)
    uc.save(root / "d", model=larger, optimizer=optimizer)
    assert not uc.load(root / "d", model=larger, optimizer=optimizer, options=PADDED).notes


def main(root: Path) -> None:
    grow(root / "moments", torch.float64, partial(torch.optim.AdamW, amsgrad=True))
    grow(root / "masters", torch.bfloat16, partial(FusedAdam, master_weights=True))


if __name__ == "__main__":
    with started():
        main(Path(sys.argv[1]))

"""torchrun script: trains under FSDP2 x TP, saves, and goes on with a larger vocabulary; each rank
holds that against a run of its own.

The oracle trains the same model whole, and grows its parameters and its optimizer's state by hand.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unified_ckpt as uc
from tests.support.optimizers import FusedAdam
from tests.support.processes.worker import started

SMALL, LARGE = 13, 18  # neither divides by 2 twice
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
        self.double()

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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int, vocabulary: int
) -> list[float]:
    losses = []
    for step in range(first, first + count):
        ids = torch.randint(0, vocabulary, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {
            f"{name}/{key}": whole(value) for key, value in optimizer.state[parameter].items()
        }
    return found


def grow_by_hand(
    state: dict[str, torch.Tensor], model: Model, optimizer: torch.optim.Optimizer
) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter[: len(state[name])] = state[name]
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                optimizer.state[parameter][key] = torch.zeros_like(parameter)
                optimizer.state[parameter][key][: len(state[name])] = state[f"{name}/{key}"]
            optimizer.state[parameter]["step"] = state[f"{name}/step"].clone()


def check(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    same: Callable[[torch.Tensor, torch.Tensor], bool],
) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not same(found[name], tensor)] == []


def masters_grow(root: Path) -> None:
    """New rows of masters, which a fresh optimizer creates at its first step, equal the model's."""
    small, larger = (sharded(Model(vocabulary).bfloat16()) for vocabulary in (SMALL, LARGE))
    first, optimizer = (
        FusedAdam(model.parameters(), lr=0.05, master_weights=True) for model in (small, larger)
    )
    train(small, first, 0, 2, SMALL)
    uc.save(root / "m", model=small, optimizer=first)
    saved, expected = (
        state_of(small, first),
        {name: whole(parameter.detach()).clone() for name, parameter in larger.named_parameters()},
    )
    for name in list(expected):
        zeros = torch.zeros_like(expected[name], dtype=torch.float32)
        fresh = {
            "exp_avg": zeros.clone(),
            "exp_avg_sq": zeros,
            "master_param": expected[name].float(),
        }
        expected |= {f"{name}/{key}": value for key, value in fresh.items()}
    for name, tensor in expected.items():
        tensor[: len(saved[name])] = saved[name]
    uc.load(root / "m", model=larger, optimizer=optimizer, options=PADDED)
    check(state_of(larger, optimizer), expected, torch.equal)
    train(larger, optimizer, 2, 1, LARGE)


def main() -> None:
    root = Path(sys.argv[1])
    small = sharded(Model(SMALL))
    first = adamw(small)
    train(small, first, 0, 3, SMALL)
    uc.save(root / "c", model=small, optimizer=first)
    saved = state_of(small, first)

    larger, oracle = sharded(Model(LARGE)), Model(LARGE)
    optimizer, theirs = adamw(larger), adamw(oracle)
    grow_by_hand(copy.deepcopy(saved), oracle, theirs)
    assert [placement.dim for placement in larger.emb.weight.placements] == [0, 0]
    report = uc.load(root / "c", model=larger, optimizer=optimizer, options=PADDED)
    check(state_of(larger, optimizer), state_of(oracle, theirs), torch.equal)
    assert [note.count("(13, 6) -> (18, 6)") for note in report.notes] == [8]
    read = torch.tensor([report.bytes_read, report.verified_bytes])
    dist.all_reduce(read)
    stored = sum(tensor.nbytes for tensor in saved.values())
    assert read.tolist() == [stored, stored]

    losses = train(larger, optimizer, 3, 3, LARGE)
    torch.testing.assert_close(losses, train(oracle, theirs, 3, 3, LARGE), rtol=1e-12, atol=0)
    check(
        state_of(larger, optimizer),
        state_of(oracle, theirs),
        lambda a, b: torch.allclose(a, b, rtol=1e-9, atol=1e-15),
    )
    masters_grow(root)
    uc.save(root / "d", model=larger, optimizer=optimizer)
    again = uc.load(root / "d", model=larger, optimizer=optimizer, options=PADDED)
    assert not again.notes


if __name__ == "__main__":
    with started():
        main()

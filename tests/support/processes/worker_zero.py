"""Optimizers of torch that divide their state among ranks, or average parameters over them."""

from __future__ import annotations

import copy
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unified_ckpt as uc

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its import
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

FAST = uc.SaveOptions(fsync=False)


class Job:
    """A model under DDP. `kind`: "plain", or how ZeroRedundancyOptimizer works."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 2))
        self.model = DistributedDataParallel(net, bucket_cap_mb=1e-4)
        self.overlaps = kind == "overlap"
        groups: Any = [{"params": [*net[0].parameters()]}, {"params": [*net[2:].parameters()]}]
        if kind == "plain":
            self.optimizer: Any = torch.optim.AdamW(groups, lr=0.01)
        else:
            self.optimizer = ZeroRedundancyOptimizer(
                self.model.parameters() if self.overlaps else groups,
                torch.optim.AdamW,
                parameters_as_bucket_view=kind == "buckets",
                overlap_with_ddp=self.overlaps,
                lr=0.01,
            )
        if self.overlaps:
            hook = ddp_zero_hook.hook_with_zero_step(allreduce_hook, self.model, self.optimizer)
            self.model.register_comm_hook(None, hook)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model.zero_grad()
        self.model(torch.ones(2, 5) * (dist.get_rank() + 1)).sum().backward()
        if not self.overlaps:
            self.optimizer.step()

    def own_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state that this rank keeps, by name."""
        names = {id(param): name for name, param in self.model.module.named_parameters()}
        state = getattr(self.optimizer, "optim", self.optimizer).state
        return {names[id(param)]: copy.deepcopy(each) for param, each in state.items()}


def check_same(first: Job, second: Job) -> None:
    states = first.own_state(), second.own_state()
    assert states[0].keys() == states[1].keys()
    for name, state in states[0].items():
        assert all(torch.equal(value, states[1][name][key]) for key, value in state.items())
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def check_divided(root: Path) -> None:
    """Each rank stores its state and loads it: with and without state, from and into AdamW."""
    for kind in ("parameters", "buckets"):
        job, path = Job(kind), root / kind
        for _ in range(2):
            job.step()
        uc.save(path, **job.state, options=FAST)
        with uc.open(path) as source:
            assert len(source["optimizer"]) == 3 * 6
        for other in ("parameters", "buckets"):
            for steps in (0, 1):
                again = Job(other, seed=1)
                for _ in range(steps):
                    again.step()
                again.optimizer.param_groups[1]["lr"] = 7.0
                uc.load(path, **again.state)
                check_same(job, again)
                assert again.optimizer.optim.param_groups[1]["lr"] == 0.01
        job.step()
        again.step()
        check_same(job, again)
        plain = Job("plain", seed=1)
        uc.load(path, **plain.state)
        uc.save(root / f"plain-{kind}", **plain.state, options=FAST)
        uc.load(root / f"plain-{kind}", **again.state)
        plain.step()
        again.step()
        for pair in zip(plain.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(*pair)


def check_overlap(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters are divided after some steps. Torch refuses gloo, with which DDP's first
    collectives could hang; here every bucket is its own.
    """
    without_check = types.SimpleNamespace(**{**vars(dist), "get_backend": lambda _: "any"})
    monkeypatch.setattr(ddp_zero_hook, "dist", without_check)
    job, path = Job("overlap"), root / "overlap"
    with pytest.raises(uc.LayoutError, match=r"overlap_with_ddp=True before the first steps"):
        uc.load(root / "plain-buckets", **job.state)
    for _ in range(5):
        job.step()
    uc.save(path, **job.state, options=FAST)
    again, plain = Job("overlap", seed=1), Job("plain", seed=1)
    for _ in range(4):
        again.step()
    uc.load(path, **again.state)
    check_same(job, again)
    uc.load(path, **plain.state)
    for each in (job, again, plain):
        each.step()
    check_same(job, again)
    for one, other in zip(plain.model.parameters(), job.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def check_averaging(root: Path) -> None:
    """The count of steps, by which parameters are averaged, is an entry of its `state_dict()`."""
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizers = list[Any]()
    for steps in (3, 0):
        averager = PeriodicModelAverager(period=2, warmup_steps=0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizers.append(PostLocalSGDOptimizer(inner, averager))
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizers[-1].step()
    uc.save(root / "averaging", model=model, optimizer=optimizers[0], options=FAST)
    uc.load(root / "averaging", model=model, optimizer=optimizers[1])
    assert optimizers[1].averager.step == optimizers[0].averager.step == 3
    assert len(optimizers[1].state) == 2


def main(root: Path) -> None:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as monkeypatch:
        warnings.simplefilter("ignore", DeprecationWarning)
        check_divided(root)
        check_overlap(root, monkeypatch)
        check_averaging(root)

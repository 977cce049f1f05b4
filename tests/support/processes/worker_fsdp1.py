"""torchrun script: random models under FSDP1 in random ways, saved, loaded and trained on.

The oracle is `summon_full_params`, and optimizer state that is set to functions of the parameters.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

import unified_ckpt as uc
from tests.support.processes.worker import started
from unified_ckpt.engine.save.request import capture

FSDP1_NAMES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
FAST = uc.SaveOptions(fsync=False)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.gain * self.down(self.up(x).relu())


class Net(nn.Module):
    """`head` shares the weight of `embed`. `other` is ignored by FSDP1 in some cases."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width = draw.randint(1, 7)
        self.embed, self.head = (nn.Linear(self.width, self.width, bias=b) for b in (True, False))
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(
            Block(self.width, draw.randint(1, 9), bias=draw.random() < 0.5) for _ in range(2)
        )
        self.other = nn.Linear(self.width, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.other(self.head(x)).square().sum()


class Job:
    """A model of `shape_seed`, wrapped as `wrap_seed` draws. `seed`: of the weights."""

    def __init__(
        self,
        shape_seed: int,
        wrap_seed: int | None,
        *,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        net: Any = Net(random.Random(shape_seed))
        self.width, self.model, draw = net.width, net, random.Random(wrap_seed)
        if wrap_seed is not None:
            self.options = {
                "use_orig_params": draw.random() < 0.5,
                "sharding_strategy": draw.choice(STRATEGIES),
                "device_id": torch.device("cpu"),
                **(options or {}),
            }
            wrap: Any = partial(FullyShardedDataParallel, **self.options)
            for i in range(draw.randint(0, 2)):
                block = checkpoint_wrapper(net.blocks[i]) if draw.random() < 0.3 else net.blocks[i]
                if draw.random() < 0.5:
                    net.blocks[i].up = wrap(net.blocks[i].up)
                net.blocks[i] = wrap(block)
            ignored = [net.other] if draw.random() < 0.3 else []
            self.model = wrap(net, ignored_modules=ignored)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: Any = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> Any:
        """Train a step on equal data, so that ignored and unwrapped parameters stay replicas."""
        self.optimizer.zero_grad()
        loss = self.model(torch.arange(2.0 * self.width).view(2, -1) / 7)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def full(self) -> dict[str, torch.Tensor]:
        """The parameters, whole, by torch."""
        if self.model.__class__ is Net:
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            full = {}
            for raw, param in self.model.named_parameters():
                for name in FSDP1_NAMES:
                    raw = raw.replace(name, "")
                full[raw] = param.detach().clone()
        return full

    def mark(self) -> None:
        """Set the moments to functions of their parameters."""
        for param, state in self.optimizer.state.items():
            state["exp_avg"].copy_(param.detach() * 2)
            state["exp_avg_sq"].copy_(param.detach() ** 2)

    def check_marked(self, steps: int) -> None:
        for param, state in self.optimizer.state.items():
            assert torch.equal(state["exp_avg"], param.detach() * 2)
            assert torch.equal(state["exp_avg_sq"], param.detach() ** 2)
            assert state["step"] == steps
            assert state["exp_avg"].shape == param.shape

    def clear(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.zero_()
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()  # as in the padding of a flat parameter, which no load changes


def check_stored(path: Path, full: dict[str, torch.Tensor], *, steps: int) -> None:
    with uc.open(path) as source:
        model = {name: source["model"][name][...] for name in source["model"]}
        state = {name: source["optimizer"][name][...] for name in source["optimizer"]}
    buffers = {f"blocks.{i}.seen" for i in range(2)}
    assert model.keys() == full.keys() | buffers
    expected = dict[str, torch.Tensor]()
    for name, param in full.items():
        assert torch.equal(model[name], param), name
        expected |= {f"{name}/exp_avg": param * 2, f"{name}/exp_avg_sq": param**2}
        expected[f"{name}/step"] = torch.tensor(float(steps))
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def round_trip(path: Path, shape_seed: int, wraps: list[int | None]) -> None:
    """Save in the first wrapping; load in each, with and without state, and train on."""
    job = Job(shape_seed, wraps[0])
    for _ in range(2):
        job.step()
    job.mark()
    full = job.full()
    uc.save(path, **job.state, options=FAST)
    check_stored(path, full, steps=2)
    for wrap_seed in wraps:
        other = Job(shape_seed, wrap_seed, seed=1)
        for has_state in (False, True):
            if has_state:
                other.step()
                other.clear()
            report = uc.load(path, **other.state)
            assert report.missing == report.unexpected == report.wrong == ()
            assert_equal(other.full(), full)
            other.check_marked(2)
        assert other.optimizer.state
        torch.testing.assert_close(other.step(), Job.step(resumed(path, shape_seed)))
    straight, again = job, Job(shape_seed, wraps[0], seed=2)
    uc.load(path, **again.state)
    for _ in range(2):
        assert torch.equal(straight.step(), again.step())
    assert_equal(again.full(), straight.full())


def resumed(path: Path, shape_seed: int) -> Job:
    job = Job(shape_seed, None, seed=3)
    uc.load(path, **job.state)
    return job


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def of_kind(**options: Any) -> Job:
    job = Job(3, 5, options={"sharding_strategy": ShardingStrategy.FULL_SHARD, **options})
    job.step()
    return job


def kinds() -> Iterator[dict[str, Any]]:
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for use_orig_params in (True, False):
        yield {"mixed_precision": half, "use_orig_params": use_orig_params}
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for use_orig_params in (True, False):
            yield {
                "device_mesh": mesh,
                "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
                "use_orig_params": use_orig_params,
            }


def check_kinds(root: Path) -> None:
    """Mixed precision and replicas: full precision is stored, and continues."""
    for number, options in enumerate(kinds()):
        job, path = of_kind(**options), root / f"kind{number}"
        job.mark()
        uc.save(path, **job.state, options=FAST)
        check_stored(path, job.full(), steps=1)
        again = of_kind(**options)
        uc.load(path, **again.state)
        again.check_marked(1)
        assert torch.equal(job.step(), again.step())
        assert_equal(again.full(), job.full())


def check_gathered(root: Path) -> None:
    """A forward pass without backward leaves parameters gathered, which a load would not change."""
    for use_orig_params in (True, False):
        job, path = of_kind(use_orig_params=use_orig_params), root / f"gathered{use_orig_params}"
        x = torch.ones(2, job.width)
        expected = job.model(x).detach()
        uc.save(path, model=job.model, options=FAST)
        job.step()
        job.model(x)
        uc.load(path, model=job.model)
        assert torch.equal(job.model(x), expected)


def check_background(root: Path) -> None:
    """A background save is of the time of its call; a captured step is known to be unchanged."""
    for use_orig_params in (True, False):
        job = of_kind(use_orig_params=use_orig_params)
        job.mark()
        full, captured = job.full(), capture(job.state)
        path = root / f"background{use_orig_params}"
        pending = uc.save_async(path, **job.state, options=FAST, lazy=use_orig_params)
        job.model(torch.ones(2, job.width)).backward()
        captured.check_unchanged()
        job.optimizer.step()
        with pytest.raises(uc.CheckpointError, match=r"has changed since the end of the step"):
            captured.check_unchanged()
        pending.result()
        check_stored(path, full, steps=1)


def check_refused(root: Path) -> None:
    flat, orig = (of_kind(use_orig_params=each) for each in (False, True))

    def refused(text: str, **state: Any) -> None:
        with pytest.raises(uc.LayoutError, match=text):
            uc.save(root / "refused", **state, options=FAST)

    with FullyShardedDataParallel.summon_full_params(flat.model):
        refused("inside of summon_full_params.*leave the context first", model=flat.model)
    for job in (flat, orig):
        refused("got a parameter that FSDP1 flattens.*pass that which", model=job.model.module)
    hook = orig.model.module.other.register_state_dict_post_hook(lambda *_: None)
    refused(r"other.*got a state_dict hook of .*worker_fsdp1.*remove the hook", model=orig.model)
    hook.remove()
    transposed = nn.Linear(4, 4)
    transposed.weight.data = transposed.weight.data.t()
    wrapped = FullyShardedDataParallel(transposed, device_id=torch.device("cpu"))
    refused("weight: got a parameter that FSDP1 flattens in another order", model=wrapped)
    for number, param in enumerate(orig.model.parameters()):
        for tensor in (orig.optimizer.state.get(param) or {"step": torch.ones(())}).values():
            tensor.fill_(number)
    uc.save(root / "steps", **orig.state, options=FAST)
    with pytest.raises(uc.MismatchError, match=r"one parameter with one state.*use_orig_params"):
        uc.load(root / "steps", **flat.state)


def main(root: Path) -> None:
    """The cases of the default suite."""
    round_trip(root / "nested", 1, [1, 2, None])
    check_kinds(root)
    check_gathered(root)
    check_background(root)
    check_refused(root)


if __name__ == "__main__":
    with started():
        folder = Path(sys.argv[1])
        check_kinds(folder)
        for case in range(int(sys.argv[2])):
            draw = random.Random(case)
            wraps: list[int | None] = [draw.randint(0, 1000) for _ in range(3)]
            round_trip(folder / str(case), case, draw.sample([*wraps, None], 4))

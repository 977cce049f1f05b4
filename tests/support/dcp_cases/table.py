"""What PyTorch's own tests of `torch.distributed.checkpoint` check, as a table of cases.

A case takes the module under test: DCP itself, or `unified_ckpt.dcp`. It builds state, saves it,
loads it into another layout and compares with a tensor that only the name and numpy determine.
Cases read nothing of the package but that module.
"""

from __future__ import annotations

import itertools
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

DCP, OURS = "torch.distributed.checkpoint", "unified_ckpt.dcp"
WORLD, TIMEOUT = 4, timedelta(seconds=30)


@dataclass(frozen=True)
class Run:
    """The module under test, in one rank of a process group."""

    dcp: ModuleType
    rank: int
    world: int
    root: Path
    _folders: Iterator[int] = field(default_factory=itertools.count)

    @property
    def is_ours(self) -> bool:
        return self.dcp.__name__ == OURS

    def folder(self) -> Path:
        """Return a new path, the same on all ranks that call this equally often."""
        return self.root / f"{next(self._folders)}"

    def round_trip(self, saved: Any, loaded: Any) -> None:
        """Fill a state, save it, load it into another, and compare."""
        fill(saved)
        folder = self.folder()
        self.dcp.save(saved, checkpoint_id=folder)
        self.dcp.load(loaded, checkpoint_id=folder)
        check(loaded)


@dataclass(frozen=True)
class Case:
    """A row: a function, the tests of PyTorch that check it, and where it cannot run."""

    function: Callable[[Run], None]
    seen_in: str  # files below test/distributed/checkpoint
    thin: bool  # a part of the default suite
    not_dcp: str  # why DCP itself cannot
    not_ours: str  # why ours cannot

    @property
    def name(self) -> str:
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    def is_in(self, selection: str) -> bool:
        return selection == "all" or (self.thin if selection == "thin" else selection in self.name)


CASES: list[Case] = []


def case(
    seen_in: str, *, thin: bool = False, not_dcp: str = "", not_ours: str = ""
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a function to the table."""

    def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
        CASES.append(Case(function, seen_in, thin, not_dcp, not_ours))
        return function

    return add


def run_cases(run: Run, selection: str) -> dict[str, str]:
    """Run the cases of a selection that the module can run. Return the problem of each, or ''.

    A selection is `all`, `thin`, or how a name begins.

    After a case that failed on any rank, all ranks form a new group: the old one may hang.
    """
    problems = {}
    store = dist.distributed_c10d._get_default_store()
    for row in CASES:
        if (row.not_ours if run.is_ours else row.not_dcp) or not row.is_in(selection):
            continue
        torch.manual_seed(0)
        problem, start = "", time.monotonic()
        try:
            row.function(replace(run, root=run.root / row.name, _folders=itertools.count()))
        except BaseException:  # DCP's own exception is no Exception
            problem = traceback.format_exc()
        problems[row.name] = problem
        if run.rank == 0:
            print(f"{run.dcp.__name__} {row.name} {time.monotonic() - start:.2f} s", flush=True)
        keys = [f"{run.dcp.__name__} {row.name} {rank}" for rank in range(run.world)]
        store.set(keys[run.rank], problem)
        if any(list(map(store.get, keys))):  # each waits for its rank
            dist.destroy_process_group()
            fresh = dist.PrefixStore(keys[0], store)
            dist.init_process_group(
                "gloo", store=fresh, rank=run.rank, world_size=run.world, timeout=TIMEOUT
            )
    return problems


# the oracle


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a whole tensor, from its name alone. All parameters have done as many steps."""
    seed = "step" if name.endswith(".step") else name
    generator = np.random.default_rng(zlib.crc32(seed.encode()))
    numbers = torch.from_numpy(generator.integers(0, 100, size=prod(shape)).astype("f8"))
    return numbers.reshape(shape).to(dtype)


def shards(name: str, tensor: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the local tensors of a rank, and what they must be, as torch cuts the whole tensor."""
    expected = whole(name, tuple(tensor.size()), tensor.dtype)
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            yield shard.tensor, expected[tuple(slice(a, a + n) for a, n in place)]
    elif isinstance(tensor, DTensor):
        cut = distribute_tensor(expected, tensor.device_mesh, tensor.placements, src_data_rank=None)
        yield tensor.to_local(), cut.to_local()
    else:
        yield tensor.detach(), expected


def tensors(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of nested dicts and lists, by their dotted names."""
    if isinstance(state, torch.Tensor | ShardedTensor):
        yield path, state
    elif isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from tensors(value, f"{path}.{key}".lstrip("."))


def fill(state: Any) -> Any:
    """Give each tensor of a state its values."""
    for name, tensor in tensors(state):
        for local, expected in shards(name, tensor):
            local.copy_(expected)
    return state


def clear(state: Any) -> Any:
    """Give each tensor of a state other values."""
    for name, tensor in tensors(state):
        for local, _ in shards(name, tensor):
            local.zero_()
    return state


def check(state: Any) -> None:
    """Compare each tensor of a state with its values."""
    for name, tensor in tensors(state):
        for local, expected in shards(name, tensor):
            assert local.dtype == expected.dtype, name
            assert torch.equal(local, expected), f"{name}: got {local}, expected {expected}"
    assert [*tensors(state)], "nothing to compare"


@contextmanager
def raises(text: str = "", *kinds: type[BaseException]) -> Iterator[list[Any]]:
    """Expect DCP's exception, or one of `kinds`, with a text. Yields a list that gets it."""
    caught: list[Any] = []
    expected = kinds or (CheckpointException,)
    try:
        yield caught
    except BaseException as error:  # DCP's own exception is no Exception
        if not isinstance(error, expected) or text.lower() not in str(error).lower():
            raise
        caught.append(error)
    else:
        raise AssertionError(f"expected an error with {text!r}, got none")

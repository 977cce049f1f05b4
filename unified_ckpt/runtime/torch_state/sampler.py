"""Samples data independently of the number of ranks: one order, and a count of samples consumed.

How samples could be lost or repeated, or a rank could hang:
- Workers prefetch samples: only batches that the training loop has received are counted.
- Another number of ranks or batch size divides the rest differently: a rank's share is a stride
  over the rest.
- Ranks get unequal numbers of batches: all shares are equally long.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from unified_ckpt.errors import CheckpointError, LayoutError, MismatchError
from unified_ckpt.runtime.comm.comm import from_torch

_Batch = TypeVar("_Batch")
_CHECKED_INDICES = 4096  # the start of an order: another shuffle differs there


@dataclass(frozen=True, slots=True)
class _Position:
    """A position in the data. `seen`: samples of the epoch consumed by all ranks together."""

    seed: int
    shuffle: bool
    epoch: int = 0
    seen: int = 0


_PreviousPosition = tuple[_Position, object]


@dataclass(frozen=True, slots=True)
class _Order:
    """All samples in the order of an epoch. `checksum`: equal for equal orders."""

    indices: Sequence[int]
    checksum: int


class ElasticSampler(Sampler[int]):
    """A `DistributedSampler` that resumes within an epoch, with any number of ranks and batch size.

    Iterate over `batches(loader)`, which counts consumed samples, and put the sampler into `extra`.
    The batch size must be the same on all ranks. Arguments and order are those of
    `DistributedSampler`.

    All ranks share one order of the samples: from the current position, rank r of W takes every
    W-th, and all get equally many. Each sample comes once per epoch, however often it is resumed.
    At the end of an epoch, fewer than W samples may be left. `drop_last` drops them; otherwise
    samples from the start fill up. Uses 8 bytes per sample on each rank.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        comm = from_torch(None)
        self._rank = comm.rank if rank is None else rank
        self._world = comm.world if num_replicas is None else num_replicas
        self._world_from_torch = num_replicas is None
        if not 0 <= self._rank < self._world:
            raise LayoutError(
                f"ElasticSampler: got rank {self._rank} with num_replicas {self._world}, "
                "expected 0 <= rank < num_replicas"
            )
        self._length, self._drop_last = len(dataset), drop_last
        self._position = _Position(seed, shuffle)
        self._loop: object = None  # identifies the running loop over `batches`
        self._previous: _PreviousPosition | None = None  # before the last `load_state_dict`
        self._orders: dict[tuple[int, int, bool], _Order] = {}  # holds the latest order only

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._position.epoch

    @property
    def seen(self) -> int:
        """Samples of this epoch that all ranks together have consumed."""
        return self._position.seen

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch, or stay if it is the current one."""
        if epoch != self.epoch:
            self._set_position(replace(self._position, epoch=epoch, seen=0))

    def __len__(self) -> int:
        """Return how many samples this rank still gets in this epoch."""
        remaining = self._length - self.seen
        return remaining // self._world if self._drop_last else -(-remaining // self._world)

    def __iter__(self) -> Iterator[int]:
        self._previous, previous = None, self._previous
        return _IndexIterator(self, previous)

    def batches(self, loader: DataLoader[_Batch]) -> Iterator[_Batch]:
        """Yield the loader's batches up to the end of the epoch, and count each one as consumed.

        Then the next epoch begins. The loader must use this sampler. It may have workers, drop its
        last batch, and be torchdata's `StatefulDataLoader`. A loop that ends early continues there
        the next time. Workers are seeded from the position, not from torch's random state.
        """
        size = self._batch_size(loader)
        if self._world_from_torch and self._world != from_torch(None).world:
            raise LayoutError(
                f"ElasticSampler: was created with {self._world} rank(s), now there are "
                f"{from_torch(None).world}; call init_process_group first, or pass num_replicas "
                "and rank"
            )
        self._loop = loop = object()
        position = self._position
        seed = f"{position.seed}/{position.epoch}/{position.seen}/{self._rank}/{self._world}"
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(zlib.crc32(seed.encode()))
                batches = iter(loader)
            for batch in batches:
                seen = self.seen + self._world * min(size, len(self))
                self._position = replace(self._position, seen=min(seen, self._length))
                yield batch
                if self._loop is not loop:
                    raise CheckpointError(
                        "ElasticSampler: its position was changed during a loop, which would yield "
                        "batches of the old one; start a new loop over `batches`"
                    )
            self._position = replace(self._position, epoch=self.epoch + 1, seen=0)
        finally:
            if self._loop is loop:
                self._loop = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, equal on all ranks."""
        checksum = self._order(self._position).checksum
        return {**asdict(self._position), "length": self._length, "check": checksum}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move to a saved position, with its seed and order.

        MismatchError for another dataset or order.
        """
        if state_dict["length"] != self._length:
            raise MismatchError(
                f"ElasticSampler: got a dataset of {self._length} samples, expected "
                f"{state_dict['length']} as saved; to use another dataset, leave the sampler out "
                "of `extra` and call set_epoch"
            )
        position = _Position(*(state_dict[name] for name in ("seed", "shuffle", "epoch", "seen")))
        if self._order(position).checksum != state_dict["check"]:
            raise MismatchError(
                "ElasticSampler: this torch version shuffles in another order; "
                "use the version that saved"
            )
        previous = self._position, self._loop
        self._set_position(position)
        self._previous = previous

    def load_from_ranks(self, saved: Sequence[Mapping[str, Any]], *, rank: int, world: int) -> None:  # noqa: ARG002
        """Load a sampler from `rank_extra`: all ranks saved the same state."""
        self.load_state_dict(saved[0])

    def _set_position(self, position: _Position) -> None:
        self._position, self._loop, self._previous = position, None, None

    def _batch_size(self, loader: DataLoader[Any]) -> int:
        """Return one rank's samples per full batch. LayoutError if they cannot be counted."""
        batch_sampler = loader.batch_sampler
        sampler: Any = loader if batch_sampler is None else batch_sampler
        size = 1 if batch_sampler is None else getattr(batch_sampler, "batch_size", None)
        if getattr(sampler, "sampler", None) is not self:
            raise LayoutError("ElasticSampler: the loader has another sampler; pass it this one")
        if not isinstance(size, int):
            raise LayoutError(
                f"ElasticSampler: the loader's {type(batch_sampler).__name__} has no batch_size; "
                "use batches of one size"
            )
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise LayoutError(
                "ElasticSampler: the loader yields batches out of order, so they cannot be "
                "counted; pass in_order=True"
            )
        return size

    def _order(self, position: _Position) -> _Order:
        key = position.seed, position.epoch, position.shuffle
        if key not in self._orders:
            indices: Any = range(self._length)
            if position.shuffle:
                generator = torch.Generator().manual_seed(position.seed + position.epoch)
                indices = torch.randperm(self._length, generator=generator).numpy()
                indices = memoryview(indices)  # the fastest way to Python ints
            checksum = zlib.crc32(repr(list(indices[:_CHECKED_INDICES])).encode())
            self._orders = {key: _Order(indices, checksum)}
        return self._orders[key]


class _IndexIterator(Iterator[int]):
    """Yields one rank's remaining indices of an epoch.

    `StatefulDataLoader` saves and restores it together with the sampler. It reads the sampler's
    state when it prefetches, ahead of the loop, so the sampler returns to `previous`, its position
    before the loader restored it.
    """

    def __init__(self, sampler: ElasticSampler, previous: _PreviousPosition | None) -> None:
        self._sampler, self._previous = sampler, previous
        # Epoch, and indices of it drawn by all ranks; None: starts at the sampler's position.
        self._progress: tuple[int, int] | None = None

    def __next__(self) -> int:
        sampler = self._sampler
        if sampler._loop is None:
            raise CheckpointError(
                "ElasticSampler: a loader draws from it uncounted; use sampler.batches(loader)"
            )
        epoch, drawn = self._progress = self._progress or (sampler.epoch, sampler.seen)
        if drawn + (sampler._world - 1 if sampler._drop_last else 0) >= sampler._length:
            raise StopIteration
        self._progress = epoch, drawn + sampler._world
        return sampler._order(sampler._position).indices[(drawn + sampler._rank) % sampler._length]

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many indices all ranks have drawn."""
        epoch, drawn = self._progress or (self._sampler.epoch, self._sampler.seen)
        return {"epoch": epoch, "drawn": drawn}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Move to a saved position."""
        sampler, progress = self._sampler, (state_dict["epoch"], state_dict["drawn"])
        if self._previous is not None:
            sampler._position, sampler._loop = self._previous
        if (progress[0], min(progress[1], sampler._length)) > (sampler.epoch, sampler.seen):
            raise CheckpointError(
                "ElasticSampler: the loader's state was loaded, the sampler's was not; put the "
                "sampler into `extra` for save and load"
            )
        if progress[0] == sampler.epoch:  # else the loader's epoch has ended, and it starts anew
            self._progress = progress


def start_loader(loader: object) -> None:
    """Start a `StatefulDataLoader` that has loaded a state, before random states are restored.

    It draws random numbers when it starts. Do nothing to other objects, nor to the loader of an
    `ElasticSampler`, which starts it itself.
    """
    bases = [base for base in type(loader).__mro__ if base.__module__.startswith("torchdata.")]
    if not any(base.__name__ == "StatefulDataLoader" for base in bases):
        return
    stateful: Any = loader
    if not isinstance(getattr(stateful.batch_sampler, "sampler", stateful.sampler), ElasticSampler):
        stateful.state_dict()  # creates the iterator that the next loop uses

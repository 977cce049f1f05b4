"""A place in the data that does not depend on the ranks: one order of all samples, and how many of
it all ranks together have seen.

How samples could be lost or repeated: workers fetch ahead of the training, and what was fetched is
taken for seen; another number of ranks or another batch size cuts the rest otherwise; ranks get
unequal numbers of batches, and one waits for ever. So the count comes from what the training loop
was handed, a rank's share is a stride over what is left, and all shares are equally long.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from unified_ckpt.errors import CheckpointError, LayoutError, MismatchError
from unified_ckpt.runtime.comm.comm import from_torch

_Batch = TypeVar("_Batch")
_CHECKED_INDICES = (
    4096  # of an order's first places: a torch that shuffles otherwise differs in them
)


@dataclass(frozen=True, slots=True)
class _Position:
    """`seen`: samples of the epoch that the ranks have been handed, all together."""

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
    """`DistributedSampler` that resumes in the midst of an epoch, on any number of ranks, with any
    batch size that all ranks have.

    Loop over `batches(loader)`, which counts what it hands out, and put the sampler into `extra`.
    All ranks go through one order of the samples, rank r of W taking every W-th from where they
    stand, and all get equally many. So however often an epoch is resumed, each sample comes once,
    but at its end, where fewer than W are left: with `drop_last` these do not come, else as many
    from the start of the order come again. The arguments, and the order, are those of
    `DistributedSampler`; 8 bytes a sample on each rank.
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
                f"ElasticSampler: rank is {self._rank}, num_replicas {self._world}; needed a rank from 0 below num_replicas"
            )
        self._length, self._drop_last = len(dataset), drop_last
        self._position = _Position(seed, shuffle)
        self._loop: object = None  # through a loader, the one that counts
        self._previous: _PreviousPosition | None = None  # the last `load_state_dict`
        self._orders: dict[tuple[int, int, bool], _Order] = {}  # the last one

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def seen(self) -> int:
        """Samples of this epoch that all ranks together have been handed."""
        return self._position.seen

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; stays in the midst of it if that is the one under way."""
        if epoch != self.epoch:
            self._set_position(replace(self._position, epoch=epoch, seen=0))

    def __len__(self) -> int:
        """Samples that this rank still gets in this epoch."""
        remaining = self._length - self.seen
        return remaining // self._world if self._drop_last else -(-remaining // self._world)

    def __iter__(self) -> Iterator[int]:
        self._previous, previous = None, self._previous
        return _IndexIterator(self, previous)

    def batches(self, loader: DataLoader[_Batch]) -> Iterator[_Batch]:
        """The loader's batches from here to the end of the epoch, each counted as seen when it is
        handed out; then the next epoch begins.

        The loader has this sampler; it may have workers, be torchdata's `StatefulDataLoader`, and
        drop its last batch, which then is not seen in this epoch. Left early, the loop goes on
        there the next time. The seeds of workers come from the place in the data: a loop that
        begins anew takes nothing from torch's random state.
        """
        size = self._batch_size(loader)
        if self._world_from_torch and self._world != from_torch(None).world:
            raise LayoutError(
                f"ElasticSampler: there were {self._world} rank(s) when it was made, now {from_torch(None).world}; "
                "needed init_process_group before it, or num_replicas and rank"
            )
        self._loop = loop = object()
        try:
            with _seeded(zlib.crc32(f"{self._position}/{self._rank}/{self._world}".encode())):
                batches = iter(loader)
            for batch in batches:
                seen = self.seen + self._world * min(size, len(self))
                self._position = replace(self._position, seen=min(seen, self._length))
                yield batch
                if self._loop is not loop:
                    raise CheckpointError(
                        "ElasticSampler: its place was set in the midst of a loop, whose next batches are those of the old one; "
                        "needed a new loop over `batches`"
                    )
            self._position = replace(self._position, epoch=self.epoch + 1, seen=0)
        finally:
            if self._loop is loop:
                self._loop = None

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: the same on all ranks, whatever their number."""
        position = self._position
        fields = {
            "seed": position.seed,
            "shuffle": position.shuffle,
            "epoch": position.epoch,
            "seen": position.seen,
        }
        return {**fields, "length": self._length, "check": self._order(position).checksum}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes there, with the seed and the order of then. MismatchError where the dataset or the
        order is another one.
        """
        if state_dict["length"] != self._length:
            raise MismatchError(
                f"ElasticSampler: saved in a dataset of {state_dict['length']} samples, this one has {self._length}; needed the same one, "
                "or an epoch from its start: leave the sampler out of `extra`, and set_epoch"
            )
        position = _Position(*(state_dict[name] for name in ("seed", "shuffle", "epoch", "seen")))
        if self._order(position).checksum != state_dict["check"]:
            raise MismatchError(
                "ElasticSampler: this torch shuffles in another order than the one that saved; needed that version"
            )
        previous = self._position, self._loop
        self._set_position(position)
        self._previous = previous

    # any number alike
    def load_from_ranks(self, saved: Sequence[Mapping[str, Any]], *, rank: int, world: int) -> None:  # noqa: ARG002
        """For a sampler in `rank_extra`: all ranks have said the same."""
        self.load_state_dict(saved[0])

    def _set_position(self, position: _Position) -> None:
        self._position, self._loop, self._previous = position, None, None

    def _batch_size(self, loader: DataLoader[Any]) -> int:
        """Samples of one rank in a whole batch. LayoutError where they cannot be counted."""
        batch_sampler = loader.batch_sampler
        size = 1 if batch_sampler is None else getattr(batch_sampler, "batch_size", None)
        if (
            loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
        ) is not self:
            raise LayoutError(
                "ElasticSampler: the loader draws from another sampler; needed DataLoader(…, sampler=this one)"
            )
        if not isinstance(size, int):
            raise LayoutError(
                f"ElasticSampler: the loader's {type(batch_sampler).__name__} has no batch_size; needed batches of one size"
            )
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise LayoutError(
                "ElasticSampler: the loader hands batches out of order, so seen ones cannot be counted; needed in_order=True"
            )
        return size

    def _order(self, position: _Position) -> _Order:
        key = position.seed, position.epoch, position.shuffle
        if key not in self._orders:
            indices: Any = range(self._length)
            if position.shuffle:
                generator = torch.Generator().manual_seed(position.seed + position.epoch)
                indices = torch.randperm(self._length, generator=generator).numpy()
                indices = memoryview(indices)  # gives Python's ints, and quickly
            self._orders = {
                key: _Order(indices, zlib.crc32(repr(list(indices[:_CHECKED_INDICES])).encode()))
            }
        return self._orders[key]


class _IndexIterator(Iterator[int]):
    """One rank's way through the rest of an epoch.

    `StatefulDataLoader` saves it together with the sampler, and sets both; but what it has of the
    sampler is from when it fetched, ahead of the loop. So the sampler goes back to `before`, where
    it was when the loader set it.
    """

    def __init__(self, sampler: ElasticSampler, previous: _PreviousPosition | None) -> None:
        self._sampler, self._previous = sampler, previous
        self._progress: tuple[int, int] | None = (
            None  # epoch, drawn of it by all ranks; None until it begins, where the sampler is then
        )

    def __next__(self) -> int:
        sampler = self._sampler
        if sampler._loop is None:
            raise CheckpointError(
                "ElasticSampler: a loader fetches from it, uncounted; needed a loop over sampler.batches(loader)"
            )
        epoch, drawn = self._progress = self._progress or (sampler.epoch, sampler.seen)
        if drawn + (sampler._world - 1 if sampler._drop_last else 0) >= sampler._length:
            raise StopIteration
        self._progress = epoch, drawn + sampler._world
        return sampler._order(sampler._position).indices[(drawn + sampler._rank) % sampler._length]

    def state_dict(self) -> dict[str, int]:
        epoch, drawn = self._progress or (self._sampler.epoch, self._sampler.seen)
        return {"epoch": epoch, "drawn": drawn}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        sampler, progress = self._sampler, (state_dict["epoch"], state_dict["drawn"])
        if self._previous is not None:
            sampler._position, sampler._loop = self._previous
        if (progress[0], min(progress[1], sampler._length)) > (sampler.epoch, sampler.seen):
            raise CheckpointError(
                "ElasticSampler: the loader's state was loaded, the sampler's was not; needed the sampler in `extra`, at the save and here"
            )
        if progress[0] == sampler.epoch:  # else of an epoch that is over: the loader begins anew
            self._progress = progress


def start_loader(loader: object) -> None:
    """Lets a `StatefulDataLoader` that was given a state go there now: it draws random numbers when
    it starts, which would be drawn after the random states are set. Does nothing to any other
    object, nor to the loader of an `ElasticSampler`, which starts it by itself.
    """
    if not any(
        base.__name__ == "StatefulDataLoader" and base.__module__.startswith("torchdata.")
        for base in type(loader).__mro__
    ):
        return
    stateful: Any = loader
    if not isinstance(getattr(stateful.batch_sampler, "sampler", stateful.sampler), ElasticSampler):
        stateful.state_dict()  # makes the iterator that the next loop takes


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draws from torch's CPU generator inside change nothing outside."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)

"""Each sample comes once per epoch over any resumes, in equally many batches per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import unified_ckpt as uc

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning"
)  # torchdata calls it


def loader_of(
    sampler: uc.ElasticSampler,
    length: int,
    *,
    batch: int = 3,
    kind: type = DataLoader,
    **options: object,
) -> DataLoader:
    return kind(range(length), batch_size=batch, sampler=sampler, collate_fn=list, **options)


class Job:
    """The ranks of one world, run in turn, each with a sampler and a loader."""

    def __init__(
        self,
        length: int,
        world: int,
        batch: int,
        saved: dict[str, object] | None,
        **options: object,
    ) -> None:
        drop_batch = options.pop("drop_batch", False)
        self.samplers = [
            uc.ElasticSampler(range(length), world, rank, **options) for rank in range(world)
        ]
        for sampler in self.samplers if saved is not None else ():
            sampler.load_state_dict(saved)
        self.loaders = [
            loader_of(sample, length, batch=batch, drop_last=drop_batch) for sample in self.samplers
        ]

    def steps(self, count: int | None = None) -> list[int]:
        """Returns the samples of all ranks in some steps, or in the rest of the epoch."""
        walks = [
            list(islice(sample.batches(loader), count))
            for sample, loader in zip(self.samplers, self.loaders, strict=True)
        ]
        assert len({tuple(map(len, walk)) for walk in walks}) == 1
        return [index for walk in walks for batch in walk for index in batch]

    def state(self) -> dict[str, object]:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]


worlds = st.integers(1, 6)
batches = st.integers(1, 5)


@given(
    length=st.integers(0, 60),
    lives=st.lists(st.tuples(worlds, batches, st.integers(0, 4)), max_size=4),
    last=st.tuples(worlds, batches),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_each_sample_comes_once_over_any_worlds(
    length: int,
    lives: list[tuple[int, int, int]],
    last: tuple[int, int],
    shuffle: bool,
    drop_last: bool,
    epoch: int,
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 5}
    fresh = uc.ElasticSampler(range(length), 1, 0, **options)
    fresh.set_epoch(epoch)
    saved, counts_by_sample = fresh.state_dict(), Counter[int]()
    order = list(fresh._order(fresh._position).indices)
    assert sorted(order) == list(range(length))
    for world, batch, count in lives:
        job = Job(length, world, batch, saved, **options)
        counts_by_sample.update(job.steps(count))
        saved = job.state()
        if saved["epoch"] != epoch:
            break
        assert set(counts_by_sample) == set(order[: saved["seen"]]), (
            "what was handed out, no more and no less"
        )
    else:
        world, batch = last
        counts_by_sample.update(Job(length, world, batch, saved, **options).steps())
    most = max([world for world, _, _ in lives] + [last[0]])
    if drop_last:
        assert set(counts_by_sample.values()) <= {1}
        remaining = [index for index in order if not counts_by_sample[index]]
        assert len(remaining) < most
        assert remaining == order[length - len(remaining) :], "the end of the order"
    elif length:
        assert set(counts_by_sample) == set(range(length)), "none is left out"
        assert sum(counts_by_sample.values()) - length < most
        assert [index for index in order if counts_by_sample[index] > 1] == order[
            : len([1 for index in order if counts_by_sample[index] > 1])
        ], "its start"


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("length", "world"), [(24, 4), (23, 4), (3, 5), (1, 1), (7, 2)])
def test_epoch_equals_that_of_distributed_sampler(
    length: int, world: int, shuffle: bool, drop_last: bool
) -> None:
    for rank in range(world):
        torch_sampler = DistributedSampler(
            range(length), world, rank, shuffle=shuffle, seed=3, drop_last=drop_last
        )
        elastic = uc.ElasticSampler(
            range(length), world, rank, shuffle=shuffle, seed=3, drop_last=drop_last
        )
        for epoch in range(3):
            torch_sampler.set_epoch(epoch)
            assert (elastic.epoch, len(elastic)) == (epoch, len(torch_sampler))
            assert [
                index for batch in elastic.batches(loader_of(elastic, length)) for index in batch
            ] == list(torch_sampler)


def test_dropped_last_batch_is_not_consumed() -> None:
    job = Job(22, 2, 3, None, drop_batch=True)
    samples = job.steps()
    assert len(samples) == len(set(samples)) == 18
    assert (job.samplers[0].epoch, job.samplers[0].seen) == (1, 0)


# two ranks consume 41 samples, one of them twice; workers prefetch
NUMBERS = range(41)


def test_resume_skips_consumed_data_quickly() -> None:
    """A resume fetches no consumed sample."""
    fetched: list[int] = []

    class Counted:
        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

        def __len__(self) -> int:
            return 41

    sampler = uc.ElasticSampler(Counted(), 1, 0)
    first = list(
        islice(sampler.batches(DataLoader(Counted(), 4, sampler=sampler, collate_fn=list)), 9)
    )
    resumed = uc.ElasticSampler(Counted(), 1, 0)
    resumed.load_state_dict(sampler.state_dict())
    fetched.clear()
    assert (
        len(list(resumed.batches(DataLoader(Counted(), 4, sampler=resumed, collate_fn=list)))) == 2
    )
    assert len(fetched) == 5
    assert not set(fetched) & {index for batch in first for index in batch}


PREFETCHING: dict[str, object] = {"num_workers": 2, "prefetch_factor": 3}
PERSISTENT: dict[str, object] = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DataLoader, {}),
        (DataLoader, PERSISTENT),
        pytest.param(DataLoader, PREFETCHING, marks=pytest.mark.slow),
        (StatefulDataLoader, {}),
        (StatefulDataLoader, PREFETCHING),
        pytest.param(StatefulDataLoader, PERSISTENT, marks=pytest.mark.slow),
    ],
)
def test_prefetched_samples_are_not_consumed(kind: type, options: dict[str, object]) -> None:
    sampler = uc.ElasticSampler(NUMBERS, 2, 0, seed=1)
    loader = kind(NUMBERS, batch_size=3, sampler=sampler, collate_fn=list, **options)
    whole = uc.ElasticSampler(NUMBERS, 2, 0, seed=1)
    expected = [index for batch in whole.batches(loader_of(whole, 41)) for index in batch]
    first = list(islice(sampler.batches(loader), 2))
    assert sampler.seen == 12
    saved = sampler.state_dict()
    rest = list(sampler.batches(loader))  # the same loader continues after the loop's last batch
    assert [index for batch in first + rest for index in batch] == expected
    assert sampler.epoch == 1
    resumed = uc.ElasticSampler(NUMBERS, 2, 0)
    resumed.load_state_dict(saved)
    assert (
        list(
            resumed.batches(
                kind(NUMBERS, batch_size=3, sampler=resumed, collate_fn=list, **options)
            )
        )
        == rest
    )


WORKERS: dict[str, object] = {"num_workers": 2}
SNAPSHOTS = {**WORKERS, "snapshot_every_n_steps": 3}


@pytest.mark.parametrize(
    ("options", "consumed"),
    [
        *(({}, consumed) for consumed in (0, 2, 7, None)),
        *((WORKERS, consumed) for consumed in (0, 2)),
        (SNAPSHOTS, 2),
        *(
            pytest.param(options, consumed, marks=pytest.mark.slow)
            for options, numbers in [(WORKERS, (7, None)), (SNAPSHOTS, (0, 7, None))]
            for consumed in numbers
        ),
    ],
)
def test_stateful_loader_and_sampler_can_both_be_saved(
    options: dict[str, object], consumed: int | None
) -> None:
    def created() -> tuple[uc.ElasticSampler, StatefulDataLoader]:
        sampler = uc.ElasticSampler(NUMBERS, 2, 1, seed=1)
        return sampler, StatefulDataLoader(
            NUMBERS, batch_size=3, sampler=sampler, collate_fn=list, **options
        )

    sampler, loader = created()
    walk = sampler.batches(loader)
    assert len(list(islice(walk, consumed))) == (7 if consumed is None else consumed)
    if consumed == 0 and options:
        with pytest.raises(uc.CheckpointError, match="a loader draws from it uncounted; use"):
            loader.state_dict()  # starts the workers
        return
    saved = sampler.state_dict(), loader.state_dict()
    expected = list(sampler.batches(loader) if consumed is None else walk)
    again, resumed = created()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert again.state_dict() == saved[0]
    assert list(again.batches(resumed)) == expected
    assert again.state_dict() == sampler.state_dict()
    if (
        consumed and "snapshot_every_n_steps" not in options
    ):  # else the loader itself jumps from step 0 to 2
        alone, resumed = created()
        resumed.load_state_dict(saved[1])
        with pytest.raises(
            uc.CheckpointError, match="the loader's state was loaded, the sampler's was not"
        ):
            next(alone.batches(resumed))


def test_epochs_advance_alone_and_by_set_epoch() -> None:
    sampler = uc.ElasticSampler(range(10), 2, 0)
    loader = loader_of(sampler, 10, batch=2)
    walks = []
    for epoch in range(sampler.epoch, 3):
        sampler.set_epoch(epoch)  # has no effect
        walks.append(list(sampler.batches(loader)))
    assert sampler.epoch == 3
    assert walks[0] != walks[1] != walks[2]
    next(sampler.batches(loader))
    sampler.set_epoch(3)
    assert sampler.seen == 4, "it is the epoch under way"
    assert len(sampler) == 3
    sampler.set_epoch(0)
    assert list(sampler.batches(loader)) == walks[0]


def walk_of(sampler: uc.ElasticSampler) -> Iterator[list[int]]:
    return sampler.batches(loader_of(sampler, 20))


def test_loop_ends_when_the_position_changes() -> None:
    sampler = uc.ElasticSampler(range(20), 1, 0)
    start = sampler.state_dict()
    for change in (
        lambda: sampler.load_state_dict(start),
        lambda: sampler.set_epoch(9),
        lambda: next(walk_of(sampler)),
    ):
        walk = walk_of(sampler)
        next(walk)
        change()
        with pytest.raises(uc.CheckpointError, match="its position was changed during a loop"):
            next(walk)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_uncounted_loop_is_refused(options: dict[str, object]) -> None:
    """It would be saved as the start of the epoch, and the epoch would repeat."""
    sampler = uc.ElasticSampler(range(20), 1, 0)
    loader = loader_of(sampler, 20, **options)
    for _ in range(2):
        with pytest.raises(uc.CheckpointError, match=r"uncounted; use sampler\.batches\(loader\)"):
            next(iter(loader))
        next(sampler.batches(loader))  # left early


def test_uncountable_loaders_are_refused() -> None:
    sampler, resumed = (uc.ElasticSampler(range(20), 1, 0) for _ in range(2))
    with pytest.raises(uc.LayoutError, match="the loader has another sampler"):
        next(sampler.batches(loader_of(resumed, 20)))
    with pytest.raises(uc.LayoutError, match="yields batches out of order"):
        next(sampler.batches(loader_of(sampler, 20, num_workers=1, in_order=False)))

    class Uneven(BatchSampler):
        def __init__(self) -> None:
            self.sampler = sampler

    with pytest.raises(uc.LayoutError, match="the loader's Uneven has no batch_size"):
        next(sampler.batches(DataLoader(range(20), batch_sampler=Uneven())))
    by = BatchSampler(sampler, 4, drop_last=False)
    assert [len(batch) for batch in sampler.batches(DataLoader(range(20), batch_sampler=by))] == [
        4
    ] * 5
    assert len(list(sampler.batches(DataLoader(range(20), batch_size=None, sampler=sampler)))) == 20


def test_other_dataset_or_order_is_refused() -> None:
    saved = uc.ElasticSampler(range(20), 2, 1).state_dict()
    with pytest.raises(uc.MismatchError, match="got a dataset of 21 samples, expected 20 as saved"):
        uc.ElasticSampler(range(21), 2, 1).load_state_dict(saved)
    with pytest.raises(uc.MismatchError, match="shuffles in another order"):
        uc.ElasticSampler(range(20), 2, 1).load_state_dict({**saved, "check": 1})
    with pytest.raises(
        uc.LayoutError, match="got rank 2 with num_replicas 2, expected 0 <= rank < num_replicas"
    ):
        uc.ElasticSampler(range(20), 2, 2)


def test_sampler_created_before_the_group_is_refused() -> None:
    """Each rank would consume all of the data."""
    sampler = uc.ElasticSampler(range(20))
    dist.init_process_group(
        "fake", store=FakeStore(), rank=1, world_size=2
    )  # torch's sampler, for one rank alone
    try:
        with pytest.raises(
            uc.LayoutError,
            match=r"was created with 1 rank\(s\), now there are 2; call init_process_group first",
        ):
            next(sampler.batches(loader_of(sampler, 20)))
        assert len(uc.ElasticSampler(range(20))) == 10
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("workers", [0, 2])
def test_restarted_loop_draws_no_random_numbers(workers: int) -> None:
    """torch's loaders draw a seed when they start, so a resumed run would draw once more."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sampler = uc.ElasticSampler(range(20), 1, 0)
    next(sampler.batches(loader_of(sampler, 20, num_workers=workers)))
    assert torch.equal(torch.get_rng_state(), before)


class Noisy:
    """Samples that a worker changes at random."""

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))

    def __len__(self) -> int:
        return 20


def test_worker_seeds_differ_by_epoch_and_rank() -> None:
    indices = []
    for rank in range(2):
        torch.manual_seed(0)  # as scripts do on every rank
        sampler = uc.ElasticSampler(Noisy(), 2, rank)
        loader = DataLoader(Noisy(), batch_size=10, sampler=sampler, num_workers=1)
        indices += [
            tuple(next(sampler.batches(loader)).tolist())
            for sampler.epoch_to in (0, 1)
            if not sampler.set_epoch(sampler.epoch_to)
        ]
    assert len(set(indices)) == 4

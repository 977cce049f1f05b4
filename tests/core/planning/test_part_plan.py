from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.oracles import (
    Array,
    World,
    global_slabs,
    held_in_slab,
    local_part,
    local_slabs,
    make_decl,
    worlds,
)
from unified_ckpt.core.planning.exchange import RankIO, Tile, TileRange
from unified_ckpt.core.planning.part_grid import (
    GroupParts,
    PartedFile,
    StoredBytes,
    choose_part_nbytes,
)
from unified_ckpt.core.planning.part_owners import assign_owners
from unified_ckpt.core.planning.part_plan import plan_parts
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim

Bytes = NDArray[np.uint8]
KIB = 1024
PART_NBYTES = st.sampled_from([1 * KIB, 4 * KIB, 64 * KIB, 512 * KIB])
HEADER_NBYTES = st.sampled_from([8, 136, 5_000, 70_000])


def rows_of(array: Array) -> Bytes:
    """An array as rows of bytes."""
    return np.frombuffer(array.tobytes(), np.uint8).reshape(prod(array.shape[:-1]), -1)


def codes(rows: Bytes) -> Bytes:
    """An encoding for tests: half as many bytes, each of which depends on the whole row."""
    return (rows[:, : max(rows.shape[1] // 2, 1)] ^ scales(rows)[:, :1]).astype(np.uint8)


def scales(rows: Bytes) -> Bytes:
    """The other stored tensor: three bytes for a row."""
    total = rows.sum(1, dtype=np.int64)
    return np.stack([total & 255, total >> 8 & 255, rows[:, -1]], 1).astype(np.uint8)


def models(rows: Bytes) -> Bytes:
    """The model's bytes beside a tensor of four bytes an element."""
    return rows.reshape(len(rows), -1, 4)[:, :, 2:].reshape(len(rows), -1)


Encode = Callable[[Bytes], Bytes]


@dataclass(frozen=True)
class Case:
    """A group, the bytes that its files must have, and what stores each stored tensor."""

    world: World
    group: GroupParts
    files: list[Bytes]
    encoders: list[Encode | None]


def make_case(world: World, *, part_nbytes: int, header_nbytes: int, file_count: int) -> Case:
    stored, contents = list[StoredBytes](), list[Bytes]()
    encoders = list[Encode | None]()
    for index, (decl, array) in enumerate(zip(world.decls, world.arrays(), strict=True)):
        if not decl.encoding:
            stored.append(StoredBytes(index))
            contents.append(np.frombuffer(array.tobytes(), np.uint8))
            encoders.append(None)
            continue
        rows = rows_of(array)
        for encode in (codes, scales) if array.itemsize != 4 else (codes, scales, models):
            body = encode(rows)
            units = (2, 4, True) if encode is models else (body.shape[1], rows.shape[1], False)
            stored.append(StoredBytes(index, *units))
            contents.append(body.reshape(-1))
            encoders.append(encode)
    files, bodies = [], []
    for number in range(file_count):
        indices = tuple(range(number, len(stored), file_count))
        ends = np.cumsum([header_nbytes, *(len(contents[index]) for index in indices)]).tolist()
        files.append(PartedFile(header_nbytes, ends[-1], indices, tuple(ends[:-1])))
        header = np.full(header_nbytes, number, np.uint8)
        bodies.append(np.concatenate([header, *(contents[index] for index in indices)]))
    group = GroupParts(world.decls, stored, files, world.holders, part_nbytes)
    return Case(world, group, bodies, encoders)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return make_case(
        draw(worlds(max_decls=4, encoded=True)),
        part_nbytes=draw(PART_NBYTES),
        header_nbytes=draw(HEADER_NBYTES),
        file_count=draw(st.integers(1, 2)),
    )


def plan_all(case: Case) -> tuple[list[int], dict[int, RankIO]]:
    owners = assign_owners(case.group)
    plans = {rank: plan_parts(case.group, owners, rank) for rank in case.group.holders}
    return [case.group.holders[owner] for owner in owners], plans


class Files:
    """Files that ranks write. Each byte is written once, by the owner of its part, in order."""

    def __init__(self, case: Case, owners: Sequence[int]) -> None:
        self.case, self.owners = case, owners
        self.bodies = [np.zeros(len(body), np.uint8) for body in case.files]
        self.counts = [np.zeros(len(body), int) for body in case.files]
        self.last: dict[tuple[int, str], tuple[int, int]] = {}
        place = [
            (index, start, number)
            for number, file in enumerate(case.group.files)
            for index, start in zip(file.stored_indices, file.starts, strict=True)
        ]
        self.place = {index: (number, start) for index, start, number in place}

    def write(self, rank: int, kind: str, stored_index: int, start: int, body: Bytes) -> None:
        number, first = self.place[stored_index]
        start += first
        self.bodies[number][start : start + len(body)] = body
        self.counts[number][start : start + len(body)] += 1
        parts = range(
            start // self.case.group.part_nbytes,
            (start + len(body) - 1) // self.case.group.part_nbytes + 1,
        )
        first_part = self.case.group.first_parts[number]
        assert len(parts) == 1
        assert self.owners[first_part + parts[0]] == rank
        assert self.last.get((rank, kind), (-1, -1)) < (number, start), "parts are in order"
        self.last[rank, kind] = number, start

    def assert_complete(self) -> None:
        for number, file in enumerate(self.case.group.files):
            assert (self.counts[number][: file.header_nbytes] == 0).all()
            assert (self.counts[number][file.header_nbytes :] == 1).all()
            expected = self.case.files[number][file.header_nbytes :]
            np.testing.assert_array_equal(self.bodies[number][file.header_nbytes :], expected)


def encoded(case: Case, stored_index: int, slabs: Array, start: int) -> tuple[int, Bytes]:
    """What stores whole slabs from byte `start` of their tensor on: first byte, bytes."""
    raw, encode = np.frombuffer(slabs.tobytes(), np.uint8), case.encoders[stored_index]
    if encode is None:
        return start, raw
    stored = case.group.stored[stored_index]
    assert start % stored.source_nbytes == 0
    row_nbytes = 4 if encode is models else stored.source_nbytes
    first = start // stored.source_nbytes * stored.unit_nbytes
    return first, encode(raw.reshape(-1, row_nbytes)).reshape(-1)


def written(case: Case, plans: Mapping[int, RankIO], owners: Sequence[int]) -> Files:
    """Carry out the plans of all ranks, with the local tensors that the shardings define."""
    arrays, files = case.world.arrays(), Files(case, owners)
    decls = case.world.decls
    local = {
        (n, rank): local_part(array, decl.sharding, rank)
        for rank in plans
        for n, (decl, array) in enumerate(zip(decls, arrays, strict=True))
    }
    stored_of = {stored.decl_index: n for n, stored in enumerate(case.group.stored)}
    for rank, rank_io in plans.items():
        for tile_range in (r for tile in rank_io.io_tiles for r in tile.ranges):
            n, clip = tile_range.decl_index, tile_range.clip
            assert clip is not None
            assert clip.is_model == (case.encoders[clip.stored_index] is models)
            slabs = np.zeros_like(global_slabs(arrays[n], tile_range))
            counts = np.zeros(slabs.shape, dtype=int)
            for member in tile_range.members:
                in_slab = held_in_slab(decls[n], member, tile_range)
                slabs[in_slab] = local_slabs(local[n, member], tile_range)
                counts[in_slab] += 1
            assert (counts == 1).all(), "each element of a slab has one sender"
            first, body = encoded(case, clip.stored_index, slabs, tile_range.start)
            low, high = max(first, clip.start), min(first + len(body), clip.stop)
            assert low < high
            files.write(rank, "tile", clip.stored_index, low, body[low - first : high - first])
        for extent in rank_io.extents:
            raw = np.frombuffer(local[extent.decl_index, rank].tobytes(), np.uint8)
            body = raw[extent.local_offset : extent.local_offset + extent.stop - extent.start]
            files.write(rank, "extent", stored_of[extent.decl_index], extent.start, body)
    return files


@given(cases())
@settings(max_examples=60, deadline=None)
def test_owners_write_every_byte_of_their_parts_once(case: Case) -> None:
    owners, plans = plan_all(case)
    written(case, plans, owners).assert_complete()


def filled(tile: Tile, rank: int) -> list[TileRange]:
    """The ranges that a rank fills."""
    return [tile_range for tile_range in tile.ranges if rank in tile_range.members]


@given(cases())
@settings(max_examples=40, deadline=None)
def test_members_know_all_tiles_that_they_fill(case: Case) -> None:
    _, plans = plan_all(case)
    tiles = {
        (tile.io_rank, tile.number): tile for rank_io in plans.values() for tile in rank_io.io_tiles
    }
    for rank, rank_io in plans.items():
        assert {(t.io_rank, t.number): filled(t, rank) for t in rank_io.member_tiles} == {
            key: filled(tile, rank) for key, tile in tiles.items() if rank in tile.members
        }
        numbers = [tile.number for tile in rank_io.io_tiles]
        assert numbers == sorted(set(numbers))
        assert [t.number for t in rank_io.member_tiles] == sorted(
            t.number for t in rank_io.member_tiles
        )
        for tile in rank_io.io_tiles:
            end = 0
            for tile_range in tile.ranges:
                assert tile_range.tile_offset >= end
                end = tile_range.tile_offset + tile_range.stop - tile_range.start
            assert end <= rank_io.tile_nbytes


@given(cases())
@settings(max_examples=60, deadline=None)
def test_each_tensor_comes_from_one_replica(case: Case) -> None:
    _, plans = plan_all(case)
    sources: dict[int, set[int]] = {}
    for rank, rank_io in plans.items():
        given_by = [(extent.decl_index, rank) for extent in rank_io.extents]
        given_by += [
            (tile_range.decl_index, member)
            for tile in rank_io.io_tiles
            for tile_range in tile.ranges
            for member in tile_range.members
        ]
        for decl_index, member in given_by:
            sharding = case.world.decls[decl_index].sharding
            origin = sharding.replica_origin(sharding.position(member))
            sources.setdefault(decl_index, set()).add(origin)
    assert all(len(origins) == 1 for origins in sources.values())


class SlotRank:
    """One rank of the two-slot protocol: fills tiles of others, and empties its own."""

    def __init__(self, rank: int, rank_io: RankIO) -> None:
        self.rank = rank
        own = {tile.number: tile for tile in rank_io.io_tiles}
        fills: dict[int, list[Tile]] = {}
        for tile in rank_io.member_tiles:
            fills.setdefault(tile.number, []).append(tile)
        self.events = [
            event
            for number in sorted(own.keys() | fills.keys())
            for event in (
                *(("fill", tile) for tile in fills.get(number, ())),
                *([("write", own[number])] if number in own else []),
            )
        ]
        self.numbers = [tile.number for tile in rank_io.io_tiles]
        self.moved, self.filled = 0, dict[int, int]()


def run_slots(plans: Mapping[int, RankIO], order: Sequence[int]) -> None:
    """Run the ranks to their end. Members fill a tile, then its owner writes it. Two tiles share a
    slot if their places differ by two: the second one waits until the first one is written.
    """
    ranks = {rank: SlotRank(rank, rank_io) for rank, rank_io in plans.items()}
    moves = True
    while moves:
        moves = False
        for rank in order:
            state = ranks[rank]
            while state.events:
                kind, tile = state.events[0]
                owner = ranks[tile.io_rank]
                index = owner.numbers.index(tile.number)
                if kind == "fill":
                    if owner.moved < index - 1:
                        break
                    if owner.moved == index - 1 and (
                        owner.numbers[index] - owner.numbers[index - 1] > 1
                    ):
                        break  # the next part begins once the last one is written
                    owner.filled[tile.number] = owner.filled.get(tile.number, 0) + 1
                else:
                    if owner.filled.get(tile.number, 0) < len(tile.members):
                        break
                    state.moved += 1
                state.events.pop(0)
                moves = True
    assert not any(state.events for state in ranks.values()), "the ranks wait for each other"


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_two_slots_never_deadlock(case: Case, random: object) -> None:
    _, plans = plan_all(case)
    order = list(plans)
    random.shuffle(order)  # type: ignore[attr-defined]
    run_slots(plans, order)


# balance


def shares(case: Case) -> NDArray[np.int64]:
    owners = assign_owners(case.group)
    sizes = [stop - start for _, start, stop in map(case.group.part_range, range(len(owners)))]
    return np.bincount(owners, sizes, minlength=len(case.group.holders))


def sharded_by_rows(count: int) -> list[TensorDecl]:
    return [make_decl((512, 96 + n), ShardDim(0, count, 1), fqn=f"{n:03}") for n in range(60)]


def sharded_twice() -> Iterator[TensorDecl]:
    for n in range(60):
        dims = ShardDim(n % 2, 4, 1), ShardDim(0, 4, 4)
        yield make_decl((256, 128 + 4 * n), *dims, fqn=f"{n:03}")


def replicated(count: int) -> list[TensorDecl]:
    return [make_decl((256, 100 + n), fqn=f"{n:03}") for n in range(count)]


@pytest.mark.parametrize(
    ("decls", "world"),
    [
        (sharded_by_rows(16), 16),
        (list(sharded_twice()), 16),
        (replicated(60), 16),
        ([make_decl((16, 100_000), ShardDim(0, 2, 1), fqn="w")], 16),
    ],
    ids=["rows", "two-dims", "replicas", "one-tensor"],
)
def test_ranks_upload_alike_from_16_parts_each(decls: list[TensorDecl], world: int) -> None:
    total = sum(decl.spec.nbytes for decl in decls)
    part_nbytes = 1 << (total // (16 * world)).bit_length() - 1
    case = make_case(
        World(decls, tuple(range(world))), part_nbytes=part_nbytes, header_nbytes=8, file_count=2
    )
    loads = shares(case)
    assert loads.max() <= 1.2 * loads.mean(), loads


def test_long_shards_are_uploaded_from_their_ranks_memory() -> None:
    decls = [make_decl((64, 64 * KIB), ShardDim(0, 4, 1), fqn=f"{n}") for n in range(3)]
    case = make_case(
        World(decls, (0, 1, 2, 3)), part_nbytes=1 << 20, header_nbytes=136, file_count=1
    )
    _, plans = plan_all(case)
    clips = {
        tile_range.clip
        for rank_io in plans.values()
        for tile in rank_io.io_tiles
        for tile_range in tile.ranges
    }
    in_tiles = sum(clip.stop - clip.start for clip in clips if clip is not None)
    assert in_tiles <= 12 * (1 << 20), "only parts with a border of shards"
    total = sum(e.stop - e.start for rank_io in plans.values() for e in rank_io.extents)
    assert total + in_tiles == sum(decl.spec.nbytes for decl in decls)


def test_many_small_tensors_share_tiles() -> None:
    decls = [make_decl((100,), fqn=f"{n:04}") for n in range(2_000)]
    case = make_case(World(decls, (0, 1)), part_nbytes=64 * KIB, header_nbytes=8, file_count=1)
    _, plans = plan_all(case)
    assert not any(rank_io.extents for rank_io in plans.values())


# the size of parts


@pytest.mark.parametrize(
    ("file_sizes", "expected"),
    [
        ([], 8 << 20),
        ([1], 8 << 20),
        ([5_000_000_000] * 23, 8 << 20),
        ([5_000_000_000] * 300, 16 << 20),
        ([4_000_000_000] * 1430, 64 << 20),
        ([90_000_000_000], 16 << 20),
        ([5_000_000_000] * 10_000, 64 << 20),
    ],
)
def test_parts_grow_with_files_up_to_64_mib(file_sizes: list[int], expected: int) -> None:
    part_nbytes = choose_part_nbytes(file_sizes, smallest=8 << 20)
    assert part_nbytes == expected
    if part_nbytes < 64 << 20:
        assert sum(-(-size // part_nbytes) for size in file_sizes) <= 100_000
        assert max(-(-size // part_nbytes) for size in [*file_sizes, 0]) <= 10_000


def test_a_header_of_several_parts_has_one_owner() -> None:
    decls = [make_decl((100, 1000), ShardDim(0, 4, 1), fqn=f"{n}") for n in range(3)]
    case = make_case(
        World(decls, (0, 1, 2, 3)), part_nbytes=16 * KIB, header_nbytes=70_000, file_count=1
    )
    owners, plans = plan_all(case)
    assert len(set(owners[:5])) == 1
    written(case, plans, owners).assert_complete()

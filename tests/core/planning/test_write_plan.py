from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracles import World, assert_assigned_once, assigned_ranges, make_decl, worlds
from unified_ckpt.core.planning import exchange
from unified_ckpt.core.planning.exchange import TILE_NBYTES, RankIO, Tile
from unified_ckpt.core.planning.io_assignment import AssignedRange, IOAssignment
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.planning.write_plan import (
    FileContents,
    StoredTensor,
    plan_files,
    plan_writes,
)
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim


def plain(decls: list[TensorDecl]) -> list[StoredTensor]:
    """What stores each tensor as it is."""
    return [StoredTensor(n, *decl.key, decl.spec) for n, decl in enumerate(decls)]


def files_of(
    decls: list[TensorDecl], holders: tuple[int, ...], max_file_bytes: int
) -> list[FileContents]:
    limits = {decl.part: max_file_bytes for decl in decls}
    return plan_files(plain(decls), holders=holders, limits=limits)


def plans(
    rows: list[TensorDecl],
    holders: tuple[int, ...],
    files: list[FileContents],
    headers: Mapping[int, int] | None = None,
) -> dict[int, RankIO]:
    nbytes = headers or dict.fromkeys(range(len(files)), 1000)
    return {
        r: plan_writes(
            rows, plain(rows), holders=holders, files=files, header_nbytes=nbytes, rank=r
        )
        for r in holders
    }


# files


@given(worlds(max_decls=8), st.integers(1, 400_000))
def test_each_tensor_is_in_one_file_of_its_part(world: World, bound: int) -> None:
    files = files_of(world.decls, world.holders, bound)
    assert sorted(n for file in files for n in file.stored_indices) == list(range(len(world.decls)))
    for file in files:
        assert {world.decls[n].part for n in file.stored_indices} == {file.part}
        assert (
            sum(world.decls[n].spec.nbytes for n in file.stored_indices) <= bound
            or len(file.stored_indices) == 1
        )
        assert file.header_rank in world.holders
    for part in {file.part for file in files}:
        ours = [file for file in files if file.part == part]
        assert [file.number for file in ours] == list(range(len(ours)))
        assert [n for file in ours for n in file.stored_indices] == [
            n for n, rank_io in enumerate(world.decls) if rank_io.part == part
        ]
    writers = Counter(file.header_rank for file in files)
    assert max(writers.values()) - min((writers[r] for r in world.holders), default=0) <= 1


# load per rank


@given(worlds(max_decls=6, encoded=True), st.sampled_from([50_000, 1 << 30]))
@settings(max_examples=30)
def test_every_byte_is_written_once(world: World, bound: int) -> None:
    files = files_of(world.decls, world.holders, bound)
    plans_by_rank = plans(world.decls, world.holders, files)
    assert_assigned_once(world.decls, plans_by_rank)
    writer = {n: file.header_rank for file in files for n in file.stored_indices}
    for n, pieces in enumerate(assigned_ranges(world.decls, plans_by_rank)):
        if world.decls[n].spec.nbytes < SMALL_NBYTES:
            assert {mover for _, _, mover in pieces} <= {writer[n]}, (
                "small tensors go with their file's header"
            )
        if world.decls[n].encoding:
            spec = world.decls[n].spec
            row_nbytes = spec.nbytes // prod(spec.shape[:-1])
            assert {border % row_nbytes for a, b, _ in pieces for border in (a, b)} == {0}


def test_writers_of_headers_write_fewer_other_bytes() -> None:
    """Replicas are balanced by whole tensors."""
    rows = [make_decl((128, 128), fqn=f"{n:02}") for n in range(64)]
    files = [FileContents("model", 0, tuple(range(64)), 1)]
    plans_by_rank = plans(rows, (0, 1, 2, 3), files, {0: 1 << 20})
    counts = {
        r: sum(e.stop - e.start for e in rank_io.extents) for r, rank_io in plans_by_rank.items()
    }
    assert counts[1] < min(counts[r] for r in (0, 2, 3))
    assert max(counts.values()) - (counts[1] + (1 << 20)) <= rows[0].spec.nbytes


def test_small_tensors_count_as_load_too() -> None:
    rows = [
        *(make_decl((128, 128), fqn=f"a{i:02}") for i in range(64)),
        *(make_decl((10_000,), fqn=f"b{i:02}") for i in range(20)),
    ]
    files = files_of(rows, (0, 1), 1 << 30)
    plans_by_rank = plans(rows, (0, 1), files)
    loads = [
        sum(b - a for pieces in assigned_ranges(rows, {r: rank_io}) for a, b, _ in pieces)
        for r, rank_io in plans_by_rank.items()
    ]
    assert abs(loads[0] + 1000 - loads[1]) <= rows[0].spec.nbytes


def test_a_tile_is_whole_pages_and_holds_the_longest_slab() -> None:
    assert (
        plan_writes(
            [make_decl((4,))],
            plain([make_decl((4,))]),
            holders=(0,),
            files=[FileContents("model", 0, (0,), 0)],
            header_nbytes={0: 8},
            rank=0,
        ).tile_nbytes
        == TILE_NBYTES
    )
    long = make_decl((2, 3_000_000, 2), ShardDim(1, 2, 1), ShardDim(2, 2, 2))
    files = [FileContents("model", 0, (0,), 0)]
    tile_nbytes = plan_writes(
        [long], plain([long]), holders=(0, 1, 2, 3), files=files, header_nbytes={0: 8}, rank=0
    ).tile_nbytes
    assert tile_nbytes % 4096 == 0
    assert tile_nbytes >= TILE_NBYTES


# cost: counts, never seconds


def llama_405b(fsdp: int, tp: int) -> list[TensorDecl]:
    """Return all tensors of the model and of AdamW's two moments."""
    hidden, ffn, kv, vocab = 16384, 53248, 1024, 128256
    inner = (ShardDim(0, fsdp, tp, name="fsdp"),)
    column, row_parallel = [
        (ShardDim(dim, tp, 1, name="tp"), *inner) if tp > 1 else inner for dim in (0, 1)
    ]
    shapes = {"embed": (vocab, hidden, column), "head": (vocab, hidden, column)}
    for i in range(126):
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("gate", ffn), ("up", ffn)):
            shapes[f"{i:03}.{name}"] = (rows, hidden, column)
        shapes[f"{i:03}.o"], shapes[f"{i:03}.down"] = (
            (hidden, hidden, row_parallel),
            (hidden, ffn, row_parallel),
        )
    decls = []
    for fqn, (rows, columns, shard_dims) in shapes.items():
        decls.append(make_decl((rows, columns), *shard_dims, dtype="BF16", fqn=fqn))
        decls += [
            make_decl((rows, columns), *shard_dims, fqn=f"{fqn}/{state}", part="optimizer")
            for state in ("exp_avg", "exp_avg_sq")
        ]
    norms = [f"{i:03}.norm{j}" for i in range(126) for j in (1, 2)]
    decls += [make_decl((hidden,), *inner, dtype="BF16", fqn=fqn) for fqn in norms]
    return sorted(decls, key=lambda r: r.key)


def size(rank_io: RankIO) -> int:
    """Return the number of extents and tile ranges that the plan lists."""
    return len(rank_io.extents) + sum(
        len(tile.ranges) for tile in (*rank_io.io_tiles, *rank_io.member_tiles)
    )


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_ranks_plan_has_the_same_size_in_any_world(tp: int) -> None:
    sizes = {}
    for world in (64, 512, 4096):
        rows, holders = llama_405b(world // tp, tp), tuple(range(world))
        files = files_of(rows, holders, 5_000_000_000)
        headers = dict.fromkeys(range(len(files)), 1000)
        sizes[world] = size(
            plan_writes(
                rows,
                plain(rows),
                holders=holders,
                files=files,
                header_nbytes=headers,
                rank=world // 2 + 1,
            )
        )
    row_count = len(llama_405b(8, tp))
    assert max(sizes.values()) <= sizes[64] <= 20 * row_count, sizes
    assert sizes[4096] <= 3 * row_count


def test_planning_visits_each_declaration_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, real = 0, IOAssignment.assigned_to

    def counting(self: IOAssignment, rank: int, *, exchanged_only: bool) -> Iterator[AssignedRange]:
        nonlocal counted
        for rank_io in real(self, rank, exchanged_only=exchanged_only):
            counted += 1
            yield rank_io

    monkeypatch.setattr(IOAssignment, "assigned_to", counting)
    rows, holders = llama_405b(512, 1), tuple(range(512))
    files = files_of(rows, holders, 5_000_000_000)
    plan_writes(
        rows,
        plain(rows),
        holders=holders,
        files=files,
        header_nbytes=dict.fromkeys(range(len(files)), 1000),
        rank=3,
    )
    assert counted <= 4 * len(rows)


def test_partners_of_a_rank_have_slabs_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is one slab, which all ranks share. A rank plans the writers of slabs only."""
    planned, real = set[int](), exchange.plan_tiles

    def recording(plan: exchange.Exchange, io_rank: int) -> Iterator[Tile]:
        planned.add(io_rank)
        return real(plan, io_rank)

    monkeypatch.setattr(exchange, "plan_tiles", recording)
    world, count = 512, 20
    sharded = ShardDim(0, world, 1)
    decls = [
        make_decl((16384,), sharded, fqn=f"{i:02}")._replace(encoding="log-4") for i in range(count)
    ]
    holders = tuple(range(world))
    files = files_of(decls, holders, 1 << 40)
    for rank in (0, 3, 500):
        planned.clear()
        plan_writes(
            decls, plain(decls), holders=holders, files=files, header_nbytes={0: 1000}, rank=rank
        )
        assert len(planned - {rank}) <= count

"""ShardedTensors of different specs, tensors that become sharded, and CheckpointableTensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Rows
from torch.distributed.tensor import distribute_tensor

from tests.support.dcp_cases.table import Run, case, check, clear, fill, raises, whole

CPU, PLANNER = "test_file_system_checkpoint_cpu", "test_planner"
DCP_CANNOT = (
    "" if hasattr(checkpoint, "CheckpointableTensor") else "torch has no CheckpointableTensor"
)


def chunks(ranks: Sequence[int], dim: int = 0) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])


def boxes(*rows: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    """Offsets, sizes and rank of each shard."""
    return EnumerableShardingSpec(
        [ShardMetadata(list(a), list(n), placement=f"rank:{rank}/cpu") for a, n, rank in rows]
    )


def row_boxes(columns: int, *rows: tuple[int, int]) -> EnumerableShardingSpec:
    """Rows and rank of each shard, one after the other."""
    starts = [sum(n for n, _ in rows[:i]) for i in range(len(rows))]
    cuts = zip(starts, rows, strict=True)
    return boxes(*(([start, 0], [n, columns], rank) for start, (n, rank) in cuts))


SPECS_10_20 = {
    "two ranks": chunks([0, 1]),
    "four ranks": chunks([0, 1, 2, 3]),
    "another order": chunks([3, 1, 0, 2]),
    "ranks that return": chunks([0, 1, 1, 0]),
    "one rank": chunks([2]),
    "columns": chunks([0, 1, 2, 3], dim=1),
    "columns that return": chunks([1, 0, 0, 1], dim=1),
    "uneven and alternating": row_boxes(20, (2, 0), (1, 1), (3, 0), (3, 1), (1, 0)),
    "rank 1 first": row_boxes(20, (8, 1), (2, 0)),
    "blocks": boxes(
        *(([0, 0], [3, 8], 0), ([0, 8], [3, 12], 1), ([3, 0], [7, 15], 3), ([3, 15], [7, 5], 2))
    ),
    "blocks of one rank": boxes(
        *(([0, 0], [10, 1], 1), ([0, 1], [5, 19], 0), ([5, 1], [5, 19], 1))
    ),
}
SPECS_32 = {
    "two ranks": chunks([0, 1]),
    "ranks that return": chunks([0, 1, 1, 0]),
    "rank 1 first": boxes(([0], [8], 1), ([8], [24], 0)),
    "ten": boxes(([0], [10], 0), ([10], [22], 1)),
}


def sharded(spec: Any, *shape: int, dtype: torch.dtype = torch.float32) -> ShardedTensor:
    return sharded_tensor.zeros(spec, *shape, dtype=dtype)


def row_major(world: int, rows: int) -> EnumerableShardingSpec:
    return boxes(*(([rank * rows], [rows], rank) for rank in range(world)))


@case("test_file_system_checkpoint, " + CPU)
def one_spec(run: Run) -> None:
    for spec in (chunks([0, 1]), chunks(range(run.world))):
        run.round_trip({"st": sharded(spec, 10, 20)}, {"st": sharded(spec, 10, 20)})


@case(f"{CPU} (different shard plans)")
def each_spec_to_each_spec(run: Run) -> None:
    """One save of all specs; each load gives each name another spec."""
    names = list(SPECS_10_20)
    folder = run.folder()
    saved = {name: sharded(spec, 10, 20) for name, spec in SPECS_10_20.items()}
    run.dcp.save(fill(saved), checkpoint_id=folder)
    for turn in range(len(names)):
        specs = {name: SPECS_10_20[names[i - turn]] for i, name in enumerate(names)}
        target = {name: sharded(spec, 10, 20) for name, spec in specs.items()}
        run.dcp.load(target, checkpoint_id=folder)
        check(target)


@case(f"{CPU} (rows to columns)")
def rows_to_columns(run: Run) -> None:
    rows, columns = (chunks(range(run.world), dim) for dim in range(2))
    run.round_trip({"st": sharded(rows, 10, 20)}, {"st": sharded(columns, 10, 20)})
    run.round_trip({"st": sharded(columns, 9, 7)}, {"st": sharded(rows, 9, 7)})


@case(f"{CPU} (sharded to tensor)", thin=True)
def tensors_and_sharded_tensors(run: Run) -> None:
    """A name is sharded on one side and whole on the other."""
    saved = {f"s{name}": sharded(spec, 32) for name, spec in SPECS_32.items()}
    saved |= {f"t{name}": torch.zeros(32) for name in SPECS_32}
    loaded: dict[str, Any] = {f"s{name}": torch.zeros(32) for name in SPECS_32}
    loaded |= {f"t{name}": sharded(spec, 32) for name, spec in SPECS_32.items()}
    run.round_trip(saved, loaded)


@case(f"{CPU} (sharded to tensor)")
def values_and_sharded_tensors(run: Run) -> None:
    """The same below a key of its own, where ours stores small tensors as values."""
    mesh = init_device_mesh("cpu", (run.world,))
    others = {"dtensor": distribute_tensor(torch.zeros(10, 20), mesh, [Rows(1)])}
    others |= {name: sharded(spec, 10, 20) for name, spec in SPECS_10_20.items()}
    plain = {
        "model": {"w": torch.zeros(1)},
        "other": {name: torch.zeros(10, 20) for name in others},
    }
    run.round_trip(plain, {"other": others})
    run.round_trip({"other": others}, clear(plain["other"]) and {"other": plain["other"]})


@case("test_fsdp_tp_checkpoint_conversion")
def sharded_tensors_and_dtensors(run: Run) -> None:
    mesh = init_device_mesh("cpu", (run.world,))

    def dtensors() -> dict[str, Any]:
        cut = (
            distribute_tensor(torch.zeros(10, 20), mesh, [Rows(i % 2)])
            for i in range(len(SPECS_10_20))
        )
        return dict(zip(SPECS_10_20, cut, strict=True))

    def sharded_tensors() -> dict[str, Any]:
        return {name: sharded(spec, 10, 20) for name, spec in SPECS_10_20.items()}

    run.round_trip(sharded_tensors(), dtensors())
    run.round_trip(dtensors(), sharded_tensors())


@case(f"{PLANNER} (resharding)")
def other_numbers_of_ranks(run: Run) -> None:
    """Four ranks of 30 elements, three of 40, two of 60."""
    specs = {world: row_major(world, 120 // world) for world in range(1, run.world + 1)}
    for saved, loaded in product(specs, specs):
        run.round_trip({"st": sharded(specs[saved], 120)}, {"st": sharded(specs[loaded], 120)})


@case(f"{PLANNER} (several shards of a rank)")
def several_shards_of_a_rank(run: Run) -> None:
    def state(per_rank: int) -> dict[str, Any]:
        count = 48 // (run.world * per_rank)
        places = [(i * count, i // per_rank) for i in range(run.world * per_rank)]
        metadata = [ShardMetadata([at], [count], f"rank:{rank}/cpu") for at, rank in places]
        local = [
            Shard.from_tensor_and_offsets(torch.zeros(count), [at], rank)
            for at, rank in places
            if rank == run.rank
        ]
        whole_metadata = sharded_tensor.ShardedTensorMetadata(
            metadata, torch.Size([48]), sharded_tensor.TensorProperties(torch.float32)
        )
        make = ShardedTensor._init_from_local_shards_and_global_metadata
        return {"st": make(local, whole_metadata)}

    run.round_trip(state(1), state(3))
    run.round_trip(state(3), state(2))


@case(f"{CPU}, test_checkpoint")
def sharded_tensors_among_others(run: Run) -> None:
    """Dtypes, replicated tensors and values beside them, in nested state."""

    def state(spec: Any, number: int) -> dict[str, Any]:
        dtypes = (torch.bfloat16, torch.int64, torch.float64)
        return {
            "tables": {str(d)[6:]: sharded(spec, 12, 3, dtype=d) for d in dtypes},
            "replicated": torch.zeros(10),
            "list": [sharded(spec, 9, 2), torch.zeros(2), number],
            "bytes": [number, 2, 3],
        }

    saved = state(SPECS_10_20["ranks that return"], 1)
    folder = run.folder()
    run.dcp.save(fill(saved), checkpoint_id=folder)
    loaded = state(chunks([2, 0]), 0)
    run.dcp.load(loaded, checkpoint_id=folder)
    check(loaded)
    assert (loaded["list"][2], loaded["bytes"]) == (1, [1, 2, 3])


@case(f"{CPU} (background)")
def background_saves_of_sharded_tensors(run: Run) -> None:
    folder, spec = run.folder(), SPECS_10_20["uneven and alternating"]
    state = {"st": sharded(spec, 10, 20)}
    future = run.dcp.async_save(fill(state), storage_writer=FileSystemWriter(folder))
    clear(state)  # what was saved is what was there
    future.result(60)
    run.dcp.load(state, checkpoint_id=folder)
    check(state)


# tensors that declare their boxes

Piece = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # global, local offsets, sizes


def checkpointable(buffer: torch.Tensor, shape: tuple[int, ...], *pieces: Piece) -> torch.Tensor:
    """Give a plain tensor the attributes of the protocol."""
    names = ("global_offsets", "local_offsets", "local_sizes")
    buffer.global_shape = shape
    for number, name in enumerate(names):
        setattr(buffer, name, tuple(piece[number] for piece in pieces))
    return buffer


def pieces_of(tensor: torch.Tensor) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    return [
        (
            tuple(slice(a, a + n) for a, n in zip(at, size, strict=True)),
            tuple(slice(a, a + n) for a, n in zip(local, size, strict=True)),
        )
        for at, local, size in zip(
            *(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes), strict=True
        )
    ]


def fill_pieces(name: str, tensor: torch.Tensor) -> torch.Tensor:
    for place, local in pieces_of(tensor):
        tensor[local] = whole(name, tensor.global_shape, tensor.dtype)[place]
    return tensor


def check_pieces(name: str, tensor: torch.Tensor, padding: float) -> None:
    expected = torch.full_like(tensor, padding)
    for place, local in pieces_of(tensor):
        expected[local] = whole(name, tensor.global_shape, tensor.dtype)[place]
    assert torch.equal(tensor, expected), f"{name}: got {tensor}, expected {expected}"


def interleaved(rank: int, world: int) -> torch.Tensor:
    """Two pieces in a buffer with padding between them, and in another order."""
    pieces = [((4 * rank,), (6,), (4,)), ((4 * (world + rank),), (1,), (4,))]
    return checkpointable(torch.full((11,), -7.0), (8 * world,), *pieces)


def flat(rank: int, world: int) -> torch.Tensor:
    """A range of elements of a table: part of a row, whole rows, part of a row."""
    rows, columns = 5 * world, 7
    start, stop = (
        (rank + i) * (rows * columns) // world + (3 if rank + i not in {0, world} else 0)
        for i in range(2)
    )
    pieces, at = [], start
    while at < stop:
        row, column = divmod(at, columns)
        count = min(columns - column, stop - at)
        whole_rows = (stop - at) // columns if column == 0 else 0
        size = (whole_rows, columns) if whole_rows else (1, count)
        pieces.append(((row, column), size))
        at += size[0] * size[1]
    height = sum(size[0] for _, size in pieces)
    tops = [sum(size[0] for _, size in pieces[:i]) for i in range(len(pieces))]
    placed = [
        (place, (top, place[1]), size) for (place, size), top in zip(pieces, tops, strict=True)
    ]
    return checkpointable(torch.full((height, columns), -7.0), (rows, columns), *placed)


def halves(rank: int, world: int, part: int = 0) -> torch.Tensor:
    """Rank 0 has the first rows, the last rank the others; those between have nothing."""
    rows = 3 * world
    first = {0: (0, rows - 2), world - 1: (rows - 2, rows)}.get(rank)
    if first is None:
        return checkpointable(torch.full((0, 2), -7.0), (rows, 2))
    size = (first[1] - first[0], 2)
    return checkpointable(torch.full(size, -7.0), (rows, 2), ((first[0], 0), (0, 0), size))


@case(f"{PLANNER} (2.14: CheckpointableTensor)", not_dcp=DCP_CANNOT)
def tensors_with_boxes_of_their_own(run: Run) -> None:
    for make in (interleaved, flat, halves):
        folder, name = run.folder(), make.__name__
        tensor = fill_pieces(name, make(run.rank, run.world))
        run.dcp.save({name: tensor}, checkpoint_id=folder)
        other = make(run.world - 1 - run.rank, run.world)
        run.dcp.load({name: other}, checkpoint_id=folder)
        check_pieces(name, other, -7.0)
        table = {name: torch.zeros(tensor.global_shape)}
        run.dcp.load(table, checkpoint_id=folder)
        check(table)


@case(f"{PLANNER} (2.14: CheckpointableTensor)", not_dcp=DCP_CANNOT)
def whole_tensors_into_boxes(run: Run) -> None:
    mesh = init_device_mesh("cpu", (run.world,))
    for make in (interleaved, flat, halves):
        folder, name, target = run.folder(), make.__name__, make(run.rank, run.world)
        shape = target.global_shape
        run.dcp.save(fill({name: torch.zeros(shape)}), checkpoint_id=folder)
        run.dcp.load({name: target}, checkpoint_id=folder)
        check_pieces(name, target, -7.0)
        cut = {name: distribute_tensor(torch.zeros(shape), mesh, [Rows(0)])}
        run.dcp.save(fill(cut), checkpoint_id=folder)
        target.fill_(3.0)
        run.dcp.load({name: target}, checkpoint_id=folder)
        check_pieces(name, target, 3.0)


@case(f"{PLANNER} (overlapping chunks)")
def boxes_that_overlap(run: Run) -> None:
    """Saved twice, or by nobody: an error on all ranks, and no folder that loads."""
    if run.is_ours:
        for pieces in (((0,), (0,), (6,)), ((run.rank * 3,), (0,), (2,))):
            tensor = checkpointable(torch.zeros(6), (3 * run.world,), pieces)
            folder = run.folder()
            with raises("w"):
                run.dcp.save({"w": tensor}, checkpoint_id=folder)
            assert not folder.exists()
    dist.barrier()

"""Exchanges the tiles of one group in a save: members fill them, and I/O ranks write them.

A member that goes on training fills them from copies of its slabs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from math import prod
from operator import itemgetter

import torch

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.intervals import Interval, unite
from unified_ckpt.core.planning.exchange import Tile, TileRange
from unified_ckpt.core.sharding.boxes import full_box, runs
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.encode.encoder import GroupWritten, PlainEncoder, encoder_of
from unified_ckpt.engine.plan.group_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.file_writer import ContiguousWrite, FileWriter, RankWriter
from unified_ckpt.runtime.exchange.run_batch import RunBatch, copy_runs_to_tile
from unified_ckpt.runtime.exchange.shared_memory import SLOTS, TileSpan
from unified_ckpt.runtime.exchange.tile_buffers import TileBufferSet
from unified_ckpt.runtime.torch_state.tensors import (
    LocalTensor,
    as_bytes,
    as_contiguous,
    boxes_in_slab,
    copy_slabs_to_tile,
    torch_dtype,
)


def write_tiles(
    group: GroupPlan,
    tensors: Sequence[LocalTensor],
    writer: RankWriter,
    buffers: TileBufferSet,
    *,
    exchange_id: int,
) -> GroupWritten:
    """Copy this rank's bytes to every tile they belong to, and write the tiles of this I/O rank.

    `tensors` are those of `group.decls`. At most two tiles per I/O rank are in flight.
    """
    rank, wait = buffers.rank, buffers.wait
    written, model_start = GroupWritten(), group.rank_io.tile_nbytes
    tiles_to_write = {tile.number: tile for tile in group.rank_io.io_tiles}
    next_numbers = dict(pairwise(tiles_to_write))  # numbers may have gaps
    in_flight: deque[tuple[int, Future[None]]] = deque()  # tiles being written, by number

    def write(number: int) -> None:
        memory, tile = local_buffer.tile(number), tiles_to_write[number]
        written.extend(write_tile(memory, tile, group, writer.files))
        local_buffer.advance(next_numbers.get(number, number + 1))

    contiguous: dict[TensorDecl, LocalTensor] = {}
    if tiles_to_write:
        local_buffer = buffers.open_local(exchange_id)
        local_buffer.advance(min(tiles_to_write))
    tiles_to_fill = group_by_value((tile, tile.number) for tile in group.rank_io.member_tiles)
    for number in sorted(tiles_to_fill.keys() | tiles_to_write.keys()):
        writer.on_progress()
        while in_flight and (in_flight[0][0] <= number - SLOTS or in_flight[0][1].done()):
            in_flight.popleft()[1].result()
        for tile in tiles_to_fill.get(number, ()):
            if tile.io_rank != rank:
                wait.until_progress(tile.io_rank, exchange_id=exchange_id, tiles=number - SLOTS + 1)
            buffer = buffers.by_rank[tile.io_rank]
            planes = list(plane_ranges(tile, tensors, rank=rank, model_start=model_start))
            fill_tile(buffer.tile(number), planes, contiguous, rank=rank)
            spans = tile_spans(chain.from_iterable(planes), rank=rank)
            buffer.finish_tile(number, rank=rank, exchange_id=exchange_id, spans=spans)
        if number in tiles_to_write:
            tile = tiles_to_write[number]
            others = [member for member in tile.members if member != rank]
            wait.until_done(local_buffer, others, number + 1)
            in_flight.append((number, writer.io_thread.submit(partial(write, number))))
    for _, future in in_flight:
        future.result()
    return written


PlaneRanges = list[tuple[TileRange, LocalTensor]]


def plane_ranges(
    tile: Tile, tensors: Sequence[LocalTensor], *, rank: int, model_start: int
) -> Iterator[PlaneRanges]:
    """Yield, by plane, the ranges of a tile that this rank fills.

    The model's elements beside those of a master at byte n of the tile are at `model_start` + n/2.
    """
    ranges = [
        (tile_range, tensors[tile_range.decl_index])
        for tile_range in tile.ranges
        if rank in tile_range.members
    ]
    yield [item for item in ranges if item[0].clip is None or not item[0].clip.is_model]
    yield [
        (
            tile_range._replace(
                start=tile_range.start // 2,
                stop=tile_range.stop // 2,
                tile_offset=model_start + tile_range.tile_offset // 2,
            ),
            tensor.model,
        )
        for tile_range, tensor in ranges
        if tensor.model is not None
    ]


def fill_tile(
    memory: torch.Tensor,
    planes: Iterable[PlaneRanges],
    contiguous: dict[TensorDecl, LocalTensor],
    *,
    rank: int,
) -> None:
    """Copy this rank's bytes to a tile; `planes`: as `plane_ranges` yields them.

    `contiguous` caches row-major copies of tensors that are not.
    """
    for ranges in planes:
        run_batch = RunBatch(memory, copy_runs_to_tile, rank=rank)
        for tile_range, tensor in ranges:
            if run_batch.add(tile_range, tensor):
                continue
            if not tensor.local.is_contiguous():
                if tensor.decl not in contiguous:
                    contiguous[tensor.decl] = LocalTensor(tensor.decl, as_contiguous(tensor.local))
                tensor = contiguous[tensor.decl]
            offset, outer_ndim = tile_range.tile_offset, tile_range.outer_ndim
            copy_slabs_to_tile(
                memory[offset : offset + tile_range.stop - tile_range.start],
                tensor,
                boxes_in_slab(tensor, rank, outer_ndim),
                outer_ndim=outer_ndim,
                first_slab=tile_range.first_local_slab,
                count=tile_range.slab_count,
            )
        run_batch.flush()


def tile_spans(ranges: Iterable[tuple[TileRange, LocalTensor]], *, rank: int) -> Iterator[TileSpan]:
    """Return the byte spans of a tile that `fill_tile` fills on this rank."""
    for tile_range, tensor in ranges:
        outer_ndim = tile_range.outer_ndim
        spec, offset, slab_count = tensor.decl.spec, tile_range.tile_offset, tile_range.slab_count
        slab_nbytes = (tile_range.stop - tile_range.start) // slab_count
        element_nbytes, slab_shape = itemsize(spec.dtype), spec.shape[outer_ndim:]
        for box, _ in boxes_in_slab(tensor, rank, outer_ndim):
            slab_runs = runs(box, slab_shape, local=full_box(box.shape), local_shape=box.shape)
            for first, _, count in slab_runs:
                if count * element_nbytes == slab_nbytes:
                    yield offset, slab_nbytes * slab_count, 0, 1
                else:
                    start = offset + first * element_nbytes
                    yield start, count * element_nbytes, slab_nbytes, slab_count


def write_tile(
    memory: torch.Tensor, tile: Tile, group: GroupPlan, file_writer: FileWriter
) -> GroupWritten:
    """Encode, digest and write a full tile.

    What is adjacent in a file shares a call, and what is adjacent in the tile, too, a buffer.
    """
    written, view, model_start = GroupWritten(), as_bytes(memory), group.rank_io.tile_nbytes
    pieces: list[tuple[str, int, int, memoryview]] = []  # file, offset, byte of the tile or -1
    for tile_range in tile.ranges:
        encoder = encoder_of(group, tile_range.decl_index)
        offset, nbytes = tile_range.tile_offset, tile_range.stop - tile_range.start
        starts = offset, model_start + offset // 2
        planes = [
            view[start : start + size]
            for start, size in zip(starts, encoder.plane_sizes(nbytes), strict=False)
        ]
        items, outliers = encoder.encode(tile_range.start, planes, tile_range.clip)
        written.outliers += outliers
        for index, start, stored in items:
            crcs = digests.block_crcs(stored, start=start)
            written.crcs += [(index, block_crc) for block_crc in crcs]
            file = group.file_of(index)
            is_plain = isinstance(encoder, PlainEncoder)
            tile_start = offset + start - tile_range.start if is_plain else -1
            pieces.append((file.name, file.offsets[index] + start, tile_start, stored))
    writes: list[ContiguousWrite] = []
    file_name, file_end, first, end = "", 0, -1, -1  # of the last write, and of its last buffer
    for name, start, tile_start, stored in sorted(pieces, key=itemgetter(0, 1)):
        if (name, start) != (file_name, file_end):
            writes.append(ContiguousWrite(name, start, [stored]))
            first = tile_start
        elif tile_start == end != -1:
            writes[-1].buffers[-1] = view[first : tile_start + len(stored)]
        else:
            writes[-1].buffers.append(stored)
            first = tile_start
        file_name, file_end = name, start + len(stored)
        end = tile_start + len(stored) if tile_start >= 0 else -1
    for write in writes:
        file_writer.write(write)
    return written


@dataclass(frozen=True, slots=True)
class SlabCopy:
    """A copy of those slabs of one local tensor that go to tiles, in the stored dtype.

    `spans` are the copied slabs, ascending and disjoint. They lie one after the other from byte
    `offset` of the snapshot's memory, as `shape`: [slabs, *local shape from `outer_ndim`]. Those of
    the model follow the slabs of an encoded master. `dtypes`: of each plane.
    """

    outer_ndim: int
    spans: Sequence[Interval]
    offset: int
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return prod(self.shape) * sum(dtype.itemsize for dtype in self.dtypes)

    def data(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the planes in the snapshot's memory: [slabs, *local shape from `outer_ndim`]."""
        sizes = [prod(self.shape) * dtype.itemsize for dtype in self.dtypes]
        copied = memory[self.offset : self.offset + self.nbytes]
        return [
            plane.view(dtype).view(self.shape)
            for plane, dtype in zip(torch.split(copied, sizes), self.dtypes, strict=True)
        ]

    def slab_index(self, slab: int) -> int:
        """Return the index in `data` of a slab of the tensor."""
        index = bisect_right(self.spans, (slab, 1 << 62)) - 1
        return sum(stop - first for first, stop in self.spans[:index]) + slab - self.spans[index][0]


def slab_copies(
    group: GroupPlan, tensors: Sequence[LocalTensor], *, rank: int
) -> dict[int, SlabCopy]:
    """Return what this rank gives to tiles, by index in the group, all at byte 0."""
    spans_by_decl: dict[tuple[int, int], list[Interval]] = {}  # by index and outer_ndim
    for tile_range in (
        tile_range for tile in group.rank_io.member_tiles for tile_range in tile.ranges
    ):
        if rank in tile_range.members:
            first, count = tile_range.first_local_slab, tile_range.slab_count
            decl_key = tile_range.decl_index, tile_range.outer_ndim
            spans_by_decl.setdefault(decl_key, []).append((first, first + count))
    slabs: dict[int, SlabCopy] = {}
    for (decl_index, outer_ndim), spans in sorted(spans_by_decl.items()):
        merged, tensor = unite(spans), tensors[decl_index]
        shape = sum(stop - first for first, stop in merged), *tensor.local.shape[outer_ndim:]
        dtypes = tuple(torch_dtype(plane.decl.spec.dtype) for plane in tensor.planes)
        slabs[decl_index] = SlabCopy(outer_ndim, merged, 0, shape, dtypes)
    return slabs

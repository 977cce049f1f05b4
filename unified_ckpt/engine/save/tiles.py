"""Exchanges the tiles of one group in a save: members fill them, and I/O ranks write them.

A member that goes on training fills them from copies of its slabs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from unified_ckpt.core.intervals import Interval, merge_adjacent
from unified_ckpt.core.planning.exchange import Tile
from unified_ckpt.core.sharding.boxes import full_box, runs
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.encode.exceptions import Exceptions
from unified_ckpt.engine.encode.stored_bytes import stored_bytes
from unified_ckpt.engine.plan.chunks import BlockCrcs
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.file_writer import ContiguousWrite, QueuedWriter
from unified_ckpt.runtime.exchange.run_batch import RunBatch, tiles_by_number
from unified_ckpt.runtime.exchange.shared_memory import SLOTS, TileSpan
from unified_ckpt.runtime.exchange.tile_buffers import TileBufferSet
from unified_ckpt.runtime.torch_state.tensors import (
    LocalTensor,
    as_bytes,
    as_contiguous,
    boxes_in_slab,
    copy_runs_to_tile,
    copy_slabs_to_tile,
    torch_dtype,
)


def write_tiles(
    group: GroupPlan,
    tensors: Sequence[LocalTensor],
    writer: QueuedWriter,
    buffers: TileBufferSet,
    exceptions: Exceptions,
    *,
    exchange_id: int,
) -> BlockCrcs:
    """Copy this rank's bytes to every tile they belong to, and write the tiles of this I/O rank.

    `tensors` are those of `group.decls`. At most two tiles per I/O rank are in flight.
    """
    rank, local_buffer, wait = buffers.rank, buffers.local, buffers.wait
    block_crcs: BlockCrcs = []
    tiles_to_write = {tile.number: tile for tile in group.rank_io.io_tiles}
    contiguous: dict[int, LocalTensor] = {}
    if local_buffer is not None and tiles_to_write:
        local_buffer.open_for(exchange_id)
    tiles_to_fill = tiles_by_number(group.rank_io.member_tiles)
    for number in sorted(tiles_to_fill.keys() | tiles_to_write.keys()):
        for tile in tiles_to_fill.get(number, ()):
            if tile.io_rank != rank:
                wait.until_progress(tile.io_rank, exchange_id=exchange_id, tiles=number - SLOTS + 1)
            buffer = buffers.by_rank[tile.io_rank]
            fill_tile(buffer.tile(number), tile, tensors, contiguous, rank=rank)
            spans = tile_spans(tile, tensors, rank=rank)
            buffer.finish_tile(number, rank=rank, exchange_id=exchange_id, spans=spans)
        if number in tiles_to_write and local_buffer is not None:
            tile = tiles_to_write[number]
            others = [member for member in tile.members if member != rank]
            wait.until_done(local_buffer, others, number + 1)
            memory = local_buffer.tile(number)
            block_crcs.extend(write_tile(memory, tile, group, writer, exceptions))
            writer.drain()
            local_buffer.advance(number + 1)
    return block_crcs


def fill_tile(
    memory: torch.Tensor,
    tile: Tile,
    tensors: Sequence[LocalTensor],
    contiguous: dict[int, LocalTensor],
    *,
    rank: int,
) -> None:
    """Copy this rank's bytes to a tile.

    `contiguous` caches row-major copies of tensors that are not, by index in the group.
    """
    run_batch = RunBatch(memory, copy_runs_to_tile, rank=rank)
    for tile_range in tile.ranges:
        if rank not in tile_range.members:
            continue
        index, outer_ndim = tile_range.decl_index, tile_range.outer_ndim
        tensor = tensors[index]
        if run_batch.add(tile_range, tensor):
            continue
        if not tensor.local.is_contiguous():
            if index not in contiguous:
                contiguous[index] = LocalTensor(tensor.decl, as_contiguous(tensor.local))
            tensor = contiguous[index]
        offset = tile_range.tile_offset
        copy_slabs_to_tile(
            memory[offset : offset + tile_range.stop - tile_range.start],
            tensor,
            boxes_in_slab(tensor, rank, outer_ndim),
            outer_ndim=outer_ndim,
            first_slab=tile_range.first_local_slab,
            count=tile_range.slab_count,
        )
    run_batch.flush()


def tile_spans(tile: Tile, tensors: Sequence[LocalTensor], *, rank: int) -> Iterator[TileSpan]:
    """Return the byte spans of a tile that `fill_tile` fills on this rank."""
    for tile_range in tile.ranges:
        if rank not in tile_range.members:
            continue
        tensor, outer_ndim = tensors[tile_range.decl_index], tile_range.outer_ndim
        spec, offset, slab_count = tensor.decl.spec, tile_range.tile_offset, tile_range.slab_count
        slab_nbytes = (tile_range.stop - tile_range.start) // slab_count
        element_nbytes, slab_shape = itemsize(spec.dtype), spec.shape[outer_ndim:]
        for box, _ in boxes_in_slab(tensor, rank, outer_ndim):
            slab_runs = runs(box, slab_shape, local=full_box(box.shape), local_shape=box.shape)
            for first, _, count in slab_runs:
                if count * element_nbytes == slab_nbytes:
                    yield offset, slab_nbytes * slab_count, 0, 1
                elif count:
                    start = offset + first * element_nbytes
                    yield start, count * element_nbytes, slab_nbytes, slab_count


def write_tile(
    memory: torch.Tensor,
    tile: Tile,
    group: GroupPlan,
    writer: QueuedWriter,
    exceptions: Exceptions,
) -> BlockCrcs:
    """Digest a full tile and queue its writes; ranges adjacent in a file share a call."""
    block_crcs: BlockCrcs = []
    view = as_bytes(memory)
    writes: list[ContiguousWrite] = []
    encoded: list[tuple[str, int, memoryview]] = []
    # Of the last write: its file, its end there, and the tile bytes of its last buffer.
    file_name, file_end, buffer_start, buffer_stop = "", 0, 0, 0
    for tile_range in tile.ranges:
        decl_index, start = tile_range.decl_index, tile_range.tile_offset
        stop = start + tile_range.stop - tile_range.start
        file = group.files[group.file_by_decl[decl_index]]
        if group.decls[decl_index].encoding:
            for index, offset, stored in stored_bytes(
                group, decl_index, tile_range.start, view[start:stop], exceptions
            ):
                crcs = digests.block_crcs(stored, start=offset)
                block_crcs += [(index, block_crc) for block_crc in crcs]
                encoded.append((file.name, file.offsets[index] + offset, stored))
            continue
        index = group.stored.starts[decl_index]
        crcs = digests.block_crcs(view[start:stop], start=tile_range.start)
        block_crcs += [(index, block_crc) for block_crc in crcs]
        file_offset = file.offsets[index] + tile_range.start
        if (file.name, file_offset) != (file_name, file_end):
            writes.append((file.name, file_offset, [view[start:stop]]))
            buffer_start = start
        elif start != buffer_stop:
            writes[-1][2].append(view[start:stop])
            buffer_start = start
        else:
            writes[-1][2][-1] = view[buffer_start:stop]
        file_name, file_end, buffer_stop = file.name, file_offset + stop - start, stop
    writer.write([*writes, *_joined(encoded)])
    return block_crcs


def _joined(pieces: list[tuple[str, int, memoryview]]) -> list[ContiguousWrite]:
    """Return the writes of (file, offset, bytes); adjacent ones are one."""
    writes: list[ContiguousWrite] = []
    end = ("", 0)
    for file, offset, piece in sorted(pieces, key=lambda piece: piece[:2]):
        if (file, offset) == end:
            writes[-1][2].append(piece)
        else:
            writes.append((file, offset, [piece]))
        end = file, offset + len(piece)
    return writes


@dataclass(frozen=True, slots=True)
class SlabCopy:
    """A copy of those slabs of one local tensor that go to tiles, in the stored dtype.

    `spans` are the copied slabs, ascending and disjoint. They lie one after the other from byte
    `offset` of the snapshot's memory, as `shape`: [slabs, *local shape from `outer_ndim`].
    """

    outer_ndim: int
    spans: Sequence[Interval]
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return prod(self.shape) * self.dtype.itemsize

    def data(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the copy in the snapshot's memory: [slabs, *local shape from `outer_ndim`]."""
        stored = memory[self.offset : self.offset + self.nbytes]
        return stored.view(self.dtype).view(self.shape)

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
        merged, tensor = merge_adjacent(sorted(spans)), tensors[decl_index]
        shape = sum(stop - first for first, stop in merged), *tensor.local.shape[outer_ndim:]
        dtype = torch_dtype(tensor.decl.spec.dtype)
        slabs[decl_index] = SlabCopy(outer_ndim, merged, 0, shape, dtype)
    return slabs

"""The tiles of one group at a save: ranks fill them for each other, and their movers write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from unified_ckpt.core.planning.exchange import Tile
from unified_ckpt.core.sharding.boxes import full_box, runs
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import BlockCrcs
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.save.extents import ContiguousWrite, QueuedWriter
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.shared_memory import (
    SLOTS,
    PeerWait,
    RemoteTileBuffer,
    TileBuffer,
)
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport, TileSpan
from unified_ckpt.runtime.exchange.whole_tensors import WholeTensors, tiles_by_number
from unified_ckpt.runtime.torch_state.tensors import (
    LocalTensor,
    as_bytes,
    as_contiguous,
    boxes_in_slab,
    copy_slabs_to_tile,
    copy_whole_to_tile,
)


def write_tiles(
    group: GroupPlan,
    parts: Sequence[LocalTensor],
    writer: QueuedWriter,
    tile_buffers: Mapping[int, TileBuffer],
    wait: PeerWait,
    *,
    remote_buffers: Mapping[int, RemoteTileBuffer],
    transport: PeerTransport | None,
    rank: int,
    exchange: int,
) -> BlockCrcs:
    """Fills this rank's parts of all tiles, its own and the others', and writes its own, two in
    flight per rank. `remote_buffers`: the windows of ranks on other machines, which `transport`
    leads to.
    """
    block_crcs: BlockCrcs = []
    tiles_to_write = {tile.number: tile for tile in group.rank_io.io_tiles}
    contiguous_parts: dict[int, LocalTensor] = {}  # row-major copies of parts that are not
    local_buffer = tile_buffers.get(rank)
    if local_buffer is not None and tiles_to_write:
        local_buffer.open_for(exchange)
    tiles_to_fill = tiles_by_number(group.rank_io.member_tiles)
    for number in sorted(tiles_to_fill.keys() | tiles_to_write.keys()):
        for tile in tiles_to_fill.get(number, ()):
            remote_buffer = remote_buffers.get(tile.io_rank)
            if remote_buffer is not None and transport is not None:
                fill_tile(remote_buffer.tile(number), tile, parts, contiguous_parts, rank=rank)
                spans = list(tile_spans(tile, parts, rank=rank))
                transport.send_tile(
                    remote_buffer, exchange=exchange, number=number, tiles=number + 1, spans=spans
                )
                continue
            if tile.io_rank != rank:
                wait.until_progress(tile.io_rank, exchange=exchange, tiles=number - SLOTS + 1)
            fill_tile(
                tile_buffers[tile.io_rank].tile(number), tile, parts, contiguous_parts, rank=rank
            )
            tile_buffers[tile.io_rank].set_done(rank, number + 1)
        if number in tiles_to_write and local_buffer is not None:
            wait.until_done(
                local_buffer,
                [member for member in tiles_to_write[number].members if member != rank],
                number + 1,
            )
            block_crcs.extend(
                write_tile(local_buffer.tile(number), tiles_to_write[number], group, writer)
            )
            writer.drain()
            local_buffer.advance(number + 1)
    return block_crcs


def fill_tile(
    memory: torch.Tensor,
    tile: Tile,
    parts: Sequence[LocalTensor],
    contiguous_parts: dict[int, LocalTensor],
    *,
    rank: int,
) -> None:
    """Copies this rank's pieces into a tile. `contiguous_parts`: row-major copies of parts that are
    not, by row.
    """
    whole_tensors = WholeTensors(memory, copy_whole_to_tile)
    for piece in tile.ranges:
        if rank in piece.members:
            part = parts[piece.decl_index]
            if whole_tensors.add(piece, part):
                continue
            if not part.local.is_contiguous():
                part = contiguous_parts[piece.decl_index] = contiguous_parts.get(
                    piece.decl_index
                ) or LocalTensor(part.decl, as_contiguous(part.local))
            slot_memory = memory[piece.tile_offset : piece.tile_offset + piece.stop - piece.start]
            boxes = boxes_in_slab(part, rank, piece.outer_ndim)
            copy_slabs_to_tile(
                slot_memory,
                part,
                boxes,
                outer_ndim=piece.outer_ndim,
                first_slab=piece.first_local_slab,
                count=piece.slab_count,
            )
    whole_tensors.flush()


def tile_spans(tile: Tile, parts: Sequence[LocalTensor], *, rank: int) -> Iterator[TileSpan]:
    """Which bytes of a tile `fill_tile` fills."""
    for piece in tile.ranges:
        if rank not in piece.members:
            continue
        spec, nbytes = (
            parts[piece.decl_index].decl.spec,
            (piece.stop - piece.start) // piece.slab_count,
        )
        element_nbytes, slab_shape = itemsize(spec.dtype), spec.shape[piece.outer_ndim :]
        for slab_box, _ in boxes_in_slab(parts[piece.decl_index], rank, piece.outer_ndim):
            for start_element, _, element_count in runs(
                slab_box, slab_shape, local=full_box(slab_box.shape), local_shape=slab_box.shape
            ):
                if element_count * element_nbytes == nbytes:
                    yield piece.tile_offset, nbytes * piece.slab_count, 0, 1
                elif element_count:
                    yield (
                        piece.tile_offset + start_element * element_nbytes,
                        element_count * element_nbytes,
                        nbytes,
                        piece.slab_count,
                    )


def write_tile(
    memory: torch.Tensor, tile: Tile, group: GroupPlan, writer: QueuedWriter
) -> BlockCrcs:
    """Digests a tile that is full and queues its writes; neighbours in the file in one call."""
    block_crcs: BlockCrcs = []
    view = as_bytes(memory)
    writes: list[ContiguousWrite] = []
    file_name, file_end, run_start, run_stop = (
        "",
        0,
        0,
        0,
    )  # of the last run: its file, where it ends there, and its last bytes in the tile
    for piece in tile.ranges:
        slot, stop = piece.tile_offset, piece.tile_offset + piece.stop - piece.start
        block_crcs += [
            (piece.decl_index, block_crc)
            for block_crc in digests.block_crcs(view[slot:stop], start=piece.start)
        ]
        file = group.files[group.file_by_decl[piece.decl_index]]
        start = file.offsets[piece.decl_index] + piece.start
        if (file.name, start) != (file_name, file_end):
            writes.append((file.name, start, [view[slot:stop]]))
            run_start = slot
        elif slot != run_stop:
            writes[-1][2].append(view[slot:stop])
            run_start = slot
        else:
            writes[-1][2][-1] = view[run_start:stop]
        file_name, file_end, run_stop = file.name, start + stop - slot, stop
    writer.write_all(writes)
    return block_crcs

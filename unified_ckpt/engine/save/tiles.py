"""The tiles of one group at a save: ranks fill them for each other, and their movers write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from unified_ckpt.core.planning.exchange import Tile
from unified_ckpt.core.sharding.boxes import runs, whole
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import Digested
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.save.extents import Run, Writer
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.shared_memory import SLOTS, FarWindow, Wait, Window
from unified_ckpt.runtime.exchange.tcp_exchange import Post, Span
from unified_ckpt.runtime.exchange.whole_tensors import Wholes, by_number
from unified_ckpt.runtime.torch_state.tensors import (
    Part,
    as_bytes,
    boxes_in_line,
    dense,
    fill_lines,
    fill_whole,
)


def write_tiles(
    group: GroupPlan,
    parts: Sequence[Part],
    writer: Writer,
    windows: Mapping[int, Window],
    wait: Wait,
    *,
    far: Mapping[int, FarWindow],
    post: Post | None,
    rank: int,
    exchange: int,
) -> Digested:
    """Fills this rank's parts of all tiles, its own and the others', and writes its own, two in flight per rank. `far`: the windows of
    ranks on other machines, which `post` leads to."""
    found: Digested = []
    mine = {tile.number: tile for tile in group.moves.mine}
    made: dict[int, Part] = {}  # row-major copies of parts that are not
    own = windows.get(rank)
    if own is not None and mine:
        own.serve(exchange)
    shared = by_number(group.moves.shared)
    for number in sorted(shared.keys() | mine.keys()):
        for tile in shared.get(number, ()):
            there = far.get(tile.mover)
            if there is not None and post is not None:
                fill_tile(there.tile(number), tile, parts, made, rank=rank)
                spans = list(spans_of(tile, parts, rank=rank))
                post.hand_in(there, exchange=exchange, number=number, tiles=number + 1, spans=spans)
                continue
            if tile.mover != rank:
                wait.until_progress(tile.mover, exchange=exchange, tiles=number - SLOTS + 1)
            fill_tile(windows[tile.mover].tile(number), tile, parts, made, rank=rank)
            windows[tile.mover].mark(rank, number + 1)
        if number in mine and own is not None:
            wait.until_done(own, [r for r in mine[number].parties if r != rank], number + 1)
            found.extend(put_tile(own.tile(number), mine[number], group, writer))
            writer.drain()
            own.advance(number + 1)
    return found


def fill_tile(
    memory: torch.Tensor, tile: Tile, parts: Sequence[Part], made: dict[int, Part], *, rank: int
) -> None:
    """Copies this rank's pieces into a tile. `made`: row-major copies of parts that are not, by row."""
    wholes = Wholes(memory, fill_whole)
    for piece in tile.pieces:
        if rank in piece.parties:
            part = parts[piece.row]
            if wholes.take(piece, part):
                continue
            if not part.local.is_contiguous():
                part = made[piece.row] = made.get(piece.row) or Part(part.row, dense(part.local))
            target = memory[piece.slot : piece.slot + piece.stop - piece.start]
            boxes = boxes_in_line(part, rank, piece.split)
            fill_lines(
                target,
                part,
                boxes,
                split=piece.split,
                first_line=piece.first_line,
                lines=piece.lines,
            )
    wholes.end()


def spans_of(tile: Tile, parts: Sequence[Part], *, rank: int) -> Iterator[Span]:
    """Which bytes of a tile `fill_tile` fills."""
    for piece in tile.pieces:
        if rank not in piece.parties:
            continue
        spec, nbytes = parts[piece.row].row.spec, (piece.stop - piece.start) // piece.lines
        item, line = itemsize(spec.dtype), spec.shape[piece.split :]
        for in_line, _ in boxes_in_line(parts[piece.row], rank, piece.split):
            for first, _, count in runs(
                in_line, line, local=whole(in_line.shape), local_shape=in_line.shape
            ):
                if count * item == nbytes:
                    yield piece.slot, nbytes * piece.lines, 0, 1
                elif count:
                    yield piece.slot + first * item, count * item, nbytes, piece.lines


def put_tile(memory: torch.Tensor, tile: Tile, group: GroupPlan, writer: Writer) -> Digested:
    """Digests a tile that is full and queues its writes; neighbours in the file in one call."""
    found: Digested = []
    view = as_bytes(memory)
    runs: list[Run] = []
    name, end, low, high = (
        "",
        0,
        0,
        0,
    )  # of the last run: its file, where it ends there, and its last bytes in the tile
    for piece in tile.pieces:
        slot, stop = piece.slot, piece.slot + piece.stop - piece.start
        found += [(piece.row, part) for part in digests.pieces(view[slot:stop], start=piece.start)]
        file = group.files[group.file_of[piece.row]]
        start = file.starts[piece.row] + piece.start
        if (file.name, start) != (name, end):
            runs.append((file.name, start, [view[slot:stop]]))
            low = slot
        elif slot != high:
            runs[-1][2].append(view[slot:stop])
            low = slot
        else:
            runs[-1][2][-1] = view[low:stop]
        name, end, high = file.name, start + stop - slot, stop
    writer.put_all(runs)
    return found

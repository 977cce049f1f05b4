"""Moves the bytes of one group into its files: what this rank writes alone, then the tiles that ranks fill for each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from unified_ckpt.core.dtypes import itemsize
from unified_ckpt.core.exchange import Extent, Tile
from unified_ckpt.engine.plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.lane import Lane
from unified_ckpt.runtime.staging import SLOTS, Wait, Window
from unified_ckpt.runtime.storage import LocalStorage
from unified_ckpt.runtime.tensors import ELEMENT, Part, as_bytes, boxes_in_line, dense, fill_lines

CHUNK_NBYTES = 4 << 20  # of one write: a whole number of digest blocks, small enough to stay in the cache between CRC and copy

Digested = list[tuple[int, digests.Piece]]  # (row number in the group, piece)


class Writer:
    """Positional writes of one rank into one folder, one chunk ahead of the caller, who digests the next meanwhile.

    `hurry`: tell the disk to begin at once. `ranks`: that keep a core of this machine busy.
    """

    def __init__(self, storage: LocalStorage, folder: str, *, hurry: bool, ranks: int, beat: Callable[[], None]) -> None:
        self._storage, self._folder, self._hurry, self._beat = storage, folder, hurry, beat
        self._lane = Lane(ranks=ranks)
        self._pending: list[Future[None]] = []

    def put(self, file: str, start: int, buffers: Sequence[memoryview]) -> Future[None]:
        """Queues a write; the buffers must stay as they are until it is done."""
        self._beat()
        while len(self._pending) > 1:
            self._pending.pop(0).result()
        future = self._lane.submit(partial(self._write, file, start, buffers))
        self._pending.append(future)
        return future

    def _write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._storage.write_at(f"{self._folder}/{file}", start, buffers)
        if self._hurry:  # the disk works while we write on: a third off a durable save
            self._storage.start_flush(f"{self._folder}/{file}", start, sum(len(b) for b in buffers))

    def drain(self) -> None:
        """Returns once everything queued is written."""
        while self._pending:
            self._pending.pop(0).result()

    def resize(self, file: str, nbytes: int) -> None:
        self._storage.resize(f"{self._folder}/{file}", nbytes)

    def close(self) -> None:
        self._lane.close()


def write_headers(group: GroupPlan, writer: Writer, *, rank: int) -> None:
    """Makes the files whose header is this rank's, at their full length."""
    for file in group.files:
        if file.writer == rank:
            writer.resize(file.name, file.nbytes)
            writer.put(file.name, 0, [memoryview(file.head)])


def write_extents(group: GroupPlan, parts: Sequence[Part], writer: Writer, *, rank: int) -> Digested:
    """What the rank writes alone; files in an order turned by rank, so that ranks meet in a file as little as may be."""
    found: Digested = []
    scratch = Scratch()
    turn = len(group.files) * group.holders.index(rank) // len(group.holders)

    def place(extent: Extent) -> tuple[int, int]:
        number = group.file_of[extent.row]
        return (number - turn) % len(group.files), group.files[number].starts[extent.row] + extent.start

    for extent in sorted(group.moves.extents, key=place):
        file = group.files[group.file_of[extent.row]]
        part = parts[extent.row]
        if not part.local.is_contiguous():
            part = Part(part.row, dense(part.local))
        for start, stop in chunks(extent.start, extent.stop):
            local = extent.local + start - extent.start
            if part.plain:
                view = as_bytes(part.local)[local : local + stop - start]
                writer.put(file.name, file.starts[extent.row] + start, [view])
            else:
                view = scratch.stage(part, local, stop - start)
                scratch.busy(writer.put(file.name, file.starts[extent.row] + start, [view]))
            found.extend((extent.row, piece) for piece in digests.pieces(view, start=start))
    writer.drain()
    return found


def chunks(start: int, stop: int, *, nbytes: int = CHUNK_NBYTES) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at multiples of `nbytes`."""
    while start < stop:
        border = min((start // nbytes + 1) * nbytes, stop)
        yield start, border
        start = border


class Scratch:
    """Two host buffers, used in turn, for bytes that memory does not hold as the file does: on a device, or to be cast."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._writes: list[Future[None] | None] = [None] * SLOTS
        self._turn = 0

    def stage(self, part: Part, local: int, nbytes: int) -> memoryview:
        """Bytes [local, +nbytes) of the part, counted in the dtype on disk. Valid until the buffer's turn comes again."""
        self._turn = (self._turn + 1) % SLOTS
        if len(self._buffers) < SLOTS:
            self._buffers = [torch.empty(CHUNK_NBYTES, dtype=torch.uint8) for _ in range(SLOTS)]
        write = self._writes[self._turn]
        if write is not None:
            write.result()
        target = self._buffers[self._turn][:nbytes]
        item = itemsize(part.row.spec.dtype)
        fill_lines(target, part, ELEMENT, split=part.local.dim(), first_line=local // item, lines=nbytes // item)
        return as_bytes(target)

    def busy(self, write: Future[None]) -> None:
        """The buffer of the last `stage` is in use until this write is done."""
        self._writes[self._turn] = write


def write_tiles(
    group: GroupPlan, parts: Sequence[Part], writer: Writer, windows: Mapping[int, Window], wait: Wait, *, rank: int, exchange: int
) -> Digested:
    """Fills this rank's parts of all tiles, its own and the others', and writes its own, two in flight per rank."""
    found: Digested = []
    mine = {tile.number: tile for tile in group.moves.mine}
    made: dict[int, Part] = {}  # row-major copies of parts that are not
    own = windows.get(rank)
    if own is not None and mine:
        own.serve(exchange)
    numbers = sorted({tile.number for tile in group.moves.shared} | set(mine))
    for number in numbers:
        for tile in (t for t in group.moves.shared if t.number == number):
            if tile.mover != rank:
                wait.until_progress(tile.mover, exchange=exchange, tiles=number - SLOTS + 1)
            fill_tile(windows[tile.mover].tile(number), tile, parts, made, rank=rank, rows=range(len(parts)))
            windows[tile.mover].mark(rank, number + 1)
        if number in mine and own is not None:
            wait.until_done(own, [r for r in mine[number].parties if r != rank], number + 1)
            found.extend(put_tile(own.tile(number), mine[number], group, writer))
            writer.drain()
            own.advance(number + 1)
    return found


def fill_tile(memory: torch.Tensor, tile: Tile, parts: Sequence[Part], made: dict[int, Part], *, rank: int, rows: Collection[int]) -> None:
    """Copies this rank's pieces of some rows into a tile. `made`: row-major copies of parts that are not, by row."""
    for piece in tile.pieces:
        if rank in piece.parties and piece.row in rows:
            part = parts[piece.row]
            if not part.local.is_contiguous():
                part = made[piece.row] = made.get(piece.row) or Part(part.row, dense(part.local))
            target = memory[piece.slot : piece.slot + piece.stop - piece.start]
            boxes = boxes_in_line(part, rank, piece.split)
            fill_lines(target, part, boxes, split=piece.split, first_line=piece.first_line, lines=piece.lines)


def put_tile(memory: torch.Tensor, tile: Tile, group: GroupPlan, writer: Writer) -> Digested:
    """Digests a tile that is full and queues its writes; neighbours in the file in one call."""
    found: Digested = []
    view = as_bytes(memory)
    run: list[memoryview] = []
    where = ("", 0)  # file and first byte of the run
    for piece in tile.pieces:
        file = group.files[group.file_of[piece.row]]
        held = view[piece.slot : piece.slot + piece.stop - piece.start]
        found.extend((piece.row, part) for part in digests.pieces(held, start=piece.start))
        start = file.starts[piece.row] + piece.start
        if run and (file.name, start) != (where[0], where[1] + sum(len(b) for b in run)):
            writer.put(where[0], where[1], run)
            run = []
        if not run:
            where = (file.name, start)
        run.append(held)
    if run:
        writer.put(where[0], where[1], run)
    return found

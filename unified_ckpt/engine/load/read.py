"""Moves the bytes of one group out of files into tensors: what this rank reads alone, and tiles that one reads and several empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from unified_ckpt.core.planning.exchange import Extent, Moves, Piece, Tile
from unified_ckpt.core.planning.load_plan import Reads
from unified_ckpt.core.sharding.declarations import Row
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, Digested, chunks
from unified_ckpt.engine.source.protocol import Location
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.shared_memory import SLOTS, Wait, Window
from unified_ckpt.runtime.exchange.whole_tensors import Wholes, by_number
from unified_ckpt.runtime.gc_pause import paused
from unified_ckpt.runtime.storage.io_thread import Lane
from unified_ckpt.runtime.storage.storage import Reader
from unified_ckpt.runtime.torch_state.tensors import (
    ELEMENT,
    Part,
    as_bytes,
    boxes_in_line,
    empty_lines,
    empty_whole,
    same_bits,
)


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """One group at a load, seen by a member. `locations`: by row."""

    index: int
    holders: tuple[int, ...]
    rows: tuple[Row, ...]
    locations: tuple[Location, ...]
    reads: Reads


@dataclass(slots=True)
class Fetched:
    """What a rank read: CRCs of it where wanted, and how many bytes came from the storage."""

    digested: Digested = field(default_factory=list)
    nbytes: int = 0


class Targets:
    """The parts of a group as memory that bytes can be put into. One that needs a copy of its own for that has it from the first extent or
    piece of a tile that goes there until the last is `done`: all copies at once would be as much memory again as the model takes."""

    def __init__(self, parts: Sequence[Part], moves: Moves, *, rank: int) -> None:
        self._parts = parts
        self._dense: dict[int, Part] = {}
        self._copied = {row for row, part in enumerate(parts) if not part.local.is_contiguous()}
        self._left = Counter(extent.row for extent in moves.extents if extent.row in self._copied)
        if self._copied:
            pieces = (
                piece for tile in moves.shared for piece in tile.pieces if rank in piece.parties
            )
            self._left.update(piece.row for piece in pieces if piece.row in self._copied)

    def __getitem__(self, row: int) -> Part:
        part = self._parts[row]
        if row not in self._copied:
            return part
        if row not in self._dense:
            self._dense[row] = Part(
                part.row, torch.empty_like(part.local, memory_format=torch.contiguous_format)
            )
        return self._dense[row]

    def is_own(self, row: int) -> bool:
        """Whether the memory is the target's own, so that nothing needs to be `done`."""
        return row not in self._copied

    def done(self, row: int) -> None:
        """One extent of the row, or one piece of a tile, is in."""
        if row not in self._copied:
            return
        self._left[row] -= 1
        if not self._left[row] and row in self._dense:
            same_bits(self._parts[row].local).copy_(same_bits(self._dense.pop(row).local))


class Beating:
    """A storage that gives a sign of life with each read: the others may have long been through."""

    def __init__(self, storage: Reader, beat: Callable[[], None]) -> None:
        self._storage, self._beat = storage, beat

    def read_at(self, name: str, start: int, into: memoryview) -> None:
        self._storage.read_at(name, start, into)
        self._beat()


def read_extents(
    group: ReadGroup,
    targets: Targets,
    storage: Beating,
    *,
    verify: bool,
    rank: int,
    ranks: int,
    into: Fetched,
) -> None:
    """Straight into the tensors where their memory is what the file holds; one chunk read ahead while the last is digested."""
    extents = sorted(
        group.reads.moves.extents,
        key=lambda e: (group.locations[e.row].file, group.locations[e.row].start + e.start),
    )
    cut = (
        len(extents) * group.holders.index(rank) // len(group.holders)
    )  # ranks meet in a file as little as may be
    pending: list[tuple[Future[None], Extent, int, memoryview, torch.Tensor | None]] = []
    ring: list[torch.Tensor] = []  # buffers for parts that bytes cannot be read into

    def finish() -> None:
        future, extent, start, view, scratch = pending.pop(0)
        future.result()
        if verify and extent.row not in group.reads.sparse:
            into.digested.extend((extent.row, piece) for piece in digests.pieces(view, start=start))
        if scratch is not None:
            _put(targets[extent.row], extent.local + start - extent.start, scratch)
        if start + len(view) == extent.stop:
            targets.done(extent.row)

    with Lane(ranks=ranks) as lane:
        for extent in extents[cut:] + extents[:cut]:
            part, location = targets[extent.row], group.locations[extent.row]
            into.nbytes += extent.stop - extent.start
            if part.plain and not verify:
                view = as_bytes(part.local)[
                    extent.local : extent.local + extent.stop - extent.start
                ]
                storage.read_at(location.file, location.start + extent.start, view)
                targets.done(extent.row)
                continue
            for start, stop in chunks(extent.start, extent.stop):
                local = extent.local + start - extent.start
                scratch = None if part.plain else _turned(ring, lane.ahead)[: stop - start]
                view = (
                    as_bytes(part.local)[local : local + stop - start]
                    if scratch is None
                    else as_bytes(scratch)
                )
                reading = lane.submit(
                    partial(storage.read_at, location.file, location.start + start, view)
                )
                pending.append((reading, extent, start, view, scratch))
                if len(pending) > lane.ahead:
                    finish()
        while pending:
            finish()


def _turned(ring: list[torch.Tensor], ahead: int) -> torch.Tensor:
    """A buffer that no read is pending for."""
    if len(ring) <= ahead + 1:
        ring.append(torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu"))
    else:
        ring.append(ring.pop(0))
    return ring[-1]


def _put(part: Part, local: int, scratch: torch.Tensor) -> None:
    """Bytes as the file holds them, to byte `local` of the part, counted in the stored dtype."""
    item = itemsize(part.row.spec.dtype)
    empty_lines(
        scratch,
        part,
        ELEMENT,
        split=part.local.dim(),
        first_line=local // item,
        lines=len(scratch) // item,
    )


def read_tiles(
    group: ReadGroup,
    targets: Targets,
    storage: Beating,
    windows: Mapping[int, Window],
    wait: Wait,
    *,
    verify: bool,
    rank: int,
    exchange: int,
    into: Fetched,
) -> None:
    """Reads this rank's tiles, and takes its own from everybody's, two in flight per rank."""
    mine = {tile.number: tile for tile in group.reads.moves.mine}
    own = windows.get(rank)
    if own is not None and mine:
        own.serve(exchange)
    shared = by_number(group.reads.moves.shared)
    for number in sorted(shared.keys() | mine.keys()):
        if number in mine and own is not None:
            if number >= SLOTS:
                wait.until_done(own, mine[number - SLOTS].parties, number - SLOTS + 1)
            _read_tile(own.tile(number), mine[number], group, storage, verify=verify, into=into)
            own.advance(number + 1)
        for tile in shared.get(number, ()):
            if tile.mover != rank:
                wait.until_progress(tile.mover, exchange=exchange, tiles=number + 1)
            _empty(windows[tile.mover].tile(number), tile, targets, rank=rank)
            windows[tile.mover].mark(rank, number + 1)
    for number in sorted(mine)[-SLOTS:]:
        if own is not None:
            wait.until_done(own, mine[number].parties, number + 1)


def _read_tile(
    memory: torch.Tensor,
    tile: Tile,
    group: ReadGroup,
    storage: Beating,
    *,
    verify: bool,
    into: Fetched,
) -> None:
    view = as_bytes(memory)
    with paused:
        runs = list(_runs(tile.pieces, group.locations))
    for run in runs:
        first, last = run[0], run[-1]
        location = group.locations[first.row]
        for start, stop in chunks(first.slot, last.slot + last.stop - last.start):
            storage.read_at(
                location.file, location.start + first.start + start - first.slot, view[start:stop]
            )
        into.nbytes += last.slot + last.stop - last.start - first.slot
        with paused:
            for piece in run if verify else ():
                if piece.row not in group.reads.sparse:
                    held = view[piece.slot : piece.slot + piece.stop - piece.start]
                    into.digested += [
                        (piece.row, part) for part in digests.pieces(held, start=piece.start)
                    ]


def _runs(pieces: Sequence[Piece], locations: Sequence[Location]) -> Iterator[list[Piece]]:
    """Pieces that follow each other in a file as in the tile: read by one call, up to a chunk of them."""
    run: list[Piece] = []
    file, offset = "", 0  # of the run: bytes from the tile to the file
    for piece in pieces:
        location = locations[piece.row]
        if run:
            last = run[-1]
            follows = piece.slot == last.slot + last.stop - last.start
            if (
                not follows
                or (location.file, location.start + piece.start - piece.slot) != (file, offset)
                or piece.slot - run[0].slot >= CHUNK_NBYTES
            ):
                yield run
                run = []
        file, offset = location.file, location.start + piece.start - piece.slot
        run.append(piece)
    if run:
        yield run


def _empty(memory: torch.Tensor, tile: Tile, targets: Targets, *, rank: int) -> None:
    wholes = Wholes(memory, empty_whole)
    for piece in tile.pieces:
        if rank in piece.parties:
            part = targets[piece.row]
            if targets.is_own(piece.row) and wholes.take(piece, part):
                continue
            held = memory[piece.slot : piece.slot + piece.stop - piece.start]
            boxes = boxes_in_line(part, rank, piece.split)
            empty_lines(
                held, part, boxes, split=piece.split, first_line=piece.first_line, lines=piece.lines
            )
            targets.done(piece.row)
    wholes.end()

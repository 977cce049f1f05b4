"""A copy of the bytes that this rank writes at a save, as the files will hold them: training goes on while they are written.

How a snapshot could hold wrong bytes: the next one is copied over it before it is written; a tile is written that another rank has
not filled yet; the caller changes a tensor while it is copied. So a rank comes to a save only when its last one is over, a window is
served anew before its parties learn of it, and the copies are made before the call returns (or before the optimizer's next step).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from unified_ckpt.core.dtypes import itemsize
from unified_ckpt.core.exchange import Extent
from unified_ckpt.core.tables import Key
from unified_ckpt.engine.plan import GroupPlan
from unified_ckpt.engine.tiles import fill_tile, put_tile, spans_of
from unified_ckpt.engine.write import Digested, Writer, chunks, write_headers
from unified_ckpt.errors import StorageError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm import Meeting
from unified_ckpt.runtime.post import Post
from unified_ckpt.runtime.probe import free_memory_nbytes
from unified_ckpt.runtime.staging import FarWindow, Wait, Window, giving_up
from unified_ckpt.runtime.tensors import ELEMENT, Part, as_bytes, dense, fill_lines
from unified_ckpt.runtime.windows import Windows

# Between two blocks: who waits for the interpreter's lock gets it now, not when the switch interval of 5 ms is over.
_BREATH_SECONDS = 50e-6
_ALIGN = 64  # of an extent in the buffer: any dtype, whole cache lines


class Buffers:
    """Host memory of snapshots, kept from one to the next: a buffer for what this rank alone holds, windows for what ranks put together.

    The buffer is pinned where it is filled from a CUDA device.
    """

    def __init__(self) -> None:
        self._own = torch.empty(0, dtype=torch.uint8)
        self.windows = Windows()
        self.last: Snapshot | None = None  # without the tensors

    @property
    def nbytes(self) -> int:
        return self._own.numel() + self.windows.nbytes

    def own(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """At least `nbytes` of memory, uint8."""
        if self._own.numel() < nbytes or (pinned and not self._own.is_pinned()):
            self._own = torch.empty(0, dtype=torch.uint8)  # given back before its successor is made
            self._own = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._own

    def close(self) -> None:
        self._own = torch.empty(0, dtype=torch.uint8)
        self.last = None
        self.windows.close()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to copy where. `number`: of the save, higher than those before. `firsts`: of each group's extents, the first byte in `memory`;
    `slots`: mover -> group -> the slot of its first tile in the mover's window. `far`: windows of ranks on other machines."""

    number: int
    rank: int
    groups: Sequence[GroupPlan]
    held: Sequence[Sequence[Part]]
    memory: torch.Tensor
    firsts: Sequence[Sequence[int]]
    windows: Mapping[int, Window]
    far: Mapping[int, FarWindow]
    slots: Mapping[int, Mapping[int, int]]

    def extents(self) -> Iterator[tuple[GroupPlan, Part, Extent, torch.Tensor]]:
        """Each extent with its memory."""
        for group, parts, firsts in zip(self.groups, self.held, self.firsts, strict=True):
            for extent, first in zip(group.moves.extents, firsts, strict=True):
                yield group, parts[extent.row], extent, self.memory[first : first + extent.stop - extent.start]


def prepare(meeting: Meeting, groups: Sequence[GroupPlan], held: Sequence[Sequence[Part]], buffers: Buffers, post: Post | None) -> Snapshot:
    """Collective. Makes room, and learns where the other ranks' room is; copies nothing. StorageError where memory is short.

    The buffers must be free on every rank: each has come here only after its last snapshot was written. Where the groups are those of
    that one, on every rank, nobody has anything to tell.
    """
    pinned = any(part.local.device.type == "cuda" for parts in held for part in parts)
    if buffers.last is not None and buffers.last.groups is groups and meeting.all_same:
        buffers.windows.revive()
        return replace(buffers.last, number=meeting.number + 1, held=held)
    buffers.last = None
    firsts, total = _layout(groups)
    slots, count = _slots(groups)
    tile_nbytes = max((group.tile_nbytes for group in groups if group.moves.mine), default=0)
    _check_memory(total + count * tile_nbytes - buffers.nbytes)
    meeting.put(f"slots/{meeting.rank}", b"." + ",".join(f"{index}:{slot}" for index, slot in slots.items()).encode())
    windows = buffers.windows.ready(
        meeting,
        tile_nbytes=tile_nbytes,
        partners={rank for group in groups for rank in group.moves.partners(meeting.rank)},
        slots=count,
        exchange=0,
        post=post,
    )
    movers = {tile.mover for group in groups for tile in group.moves.shared}
    told = {mover: _parse_slots(meeting.get(f"slots/{mover}", of=mover)) for mover in movers | ({meeting.rank} if count else set())}
    memory, far = buffers.own(total, pinned=pinned), buffers.windows.far
    made = Snapshot(meeting.number + 1, meeting.rank, groups, held, memory, firsts, windows, far, told)
    buffers.last = replace(made, held=())
    return made


def _layout(groups: Sequence[GroupPlan]) -> tuple[list[list[int]], int]:
    """Where each group's extents begin in the buffer, and the buffer's bytes."""
    firsts, total = [], 0
    for group in groups:
        own = []
        for extent in group.moves.extents:
            own.append(total)
            total += -(-(extent.stop - extent.start) // _ALIGN) * _ALIGN
        firsts.append(own)
    return firsts, total


def _slots(groups: Sequence[GroupPlan]) -> tuple[dict[int, int], int]:
    """The slot of this rank's first tile of each group, and how many tiles it has."""
    slots, count = {}, 0
    for group in groups:
        if group.moves.mine:
            slots[group.index] = count
            count += len(group.moves.mine)
    return slots, count


def _parse_slots(told: bytes) -> dict[int, int]:
    pairs = (pair.split(":") for pair in told[1:].decode().split(",") if pair)
    return {int(index): int(slot) for index, slot in pairs}


def _check_memory(nbytes: int) -> None:
    free = free_memory_nbytes()
    if free is not None and nbytes > free:
        raise StorageError(f"a snapshot takes {nbytes} more bytes of memory on this rank; {free} are free; `save` takes none")


def copy(snapshot: Snapshot, keys: Collection[Key]) -> None:
    """Copies these tensors, which may change then. First what other ranks wait for."""
    windows, rank = snapshot.windows, snapshot.rank
    with giving_up(windows.get(rank)):
        for group, parts in zip(snapshot.groups, snapshot.held, strict=True):
            made: dict[int, Part] = {}
            rows = frozenset(number for number, row in enumerate(group.rows) if row.key in keys)
            for tile in group.moves.shared:
                slot = snapshot.slots[tile.mover][group.index] + tile.number
                window = windows.get(tile.mover) or snapshot.far[tile.mover]
                fill_tile(window.tile(slot), tile, parts, made, rank=rank, rows=rows)
        last: Part | None = None
        for _, part, extent, memory in snapshot.extents():
            if part.row.key not in keys:
                continue
            if last is None or last.row is not part.row:  # a row-major copy serves all extents of its tensor
                last = part if part.local.is_contiguous() else Part(part.row, dense(part.local))
            item = itemsize(part.row.spec.dtype)
            lines = (extent.stop - extent.start) // item
            fill_lines(memory, last, ELEMENT, split=last.local.dim(), first_line=extent.local // item, lines=lines)


def hand_over(snapshot: Snapshot) -> None:
    """Tells the other ranks of this machine that everything of theirs is copied."""
    for mover in {tile.mover for group in snapshot.groups for tile in group.moves.shared} - set(snapshot.far):
        snapshot.windows[mover].mark(snapshot.rank, snapshot.number)


def send(snapshot: Snapshot, post: Post) -> None:
    """Sends what was copied for ranks on other machines; with the last of each mover, that it is all."""
    tiles = [(tile, group, parts) for group, parts in zip(snapshot.groups, snapshot.held, strict=True) for tile in group.moves.shared]
    theirs = {mover: [one for one in tiles if one[0].mover == mover] for mover in snapshot.far}
    for mover, window in snapshot.far.items():
        for i, (tile, group, parts) in enumerate(theirs[mover], start=1):
            number = snapshot.slots[mover][group.index] + tile.number
            filled = snapshot.number if i == len(theirs[mover]) else 0
            post.hand_in(window, exchange=0, number=number, tiles=filled, spans=list(spans_of(tile, parts, rank=snapshot.rank)))


def write(snapshot: Snapshot, writer: Writer, wait: Wait) -> list[Digested]:
    """Writes what was copied, by group: its files' headers, its tiles once all their parties have filled them, its extents."""
    found: list[Digested] = []
    own, rank = snapshot.windows.get(snapshot.rank), snapshot.rank
    extents: dict[int, list[tuple[Extent, torch.Tensor]]] = {}
    for group, _, extent, memory in snapshot.extents():
        extents.setdefault(group.index, []).append((extent, memory))
    for group in snapshot.groups:
        write_headers(group, writer, rank=rank)
        digested: Digested = []
        for tile in group.moves.mine:
            if own is None:
                raise AssertionError(f"rank {rank} has tiles and no window")
            wait.until_done(own, [party for party in tile.parties if party != rank], snapshot.number)
            digested += put_tile(own.tile(snapshot.slots[rank][group.index] + tile.number), tile, group, writer)
        for extent, memory in sorted(extents.get(group.index, ()), key=partial(_place, group)):
            digested += _write_extent(group, extent, memory, writer)
        found.append(digested)
    writer.drain()
    return found


def _place(group: GroupPlan, found: tuple[Extent, torch.Tensor]) -> tuple[int, int]:
    number = group.file_of[found[0].row]
    return number, group.files[number].starts[found[0].row] + found[0].start


def _write_extent(group: GroupPlan, extent: Extent, memory: torch.Tensor, writer: Writer) -> Digested:
    file, view = group.files[group.file_of[extent.row]], as_bytes(memory)
    digested: Digested = []
    first = file.starts[extent.row]
    alone = first + extent.start, first + extent.stop
    for start, stop in chunks(extent.start, extent.stop):
        held = view[start - extent.start : stop - extent.start]
        writer.put(file.name, first + start, [held], alone=alone)
        for low, high in chunks(start, stop, nbytes=digests.BLOCK_NBYTES):
            digested.extend((extent.row, piece) for piece in digests.pieces(held[low - start : high - start], start=low))
            time.sleep(_BREATH_SECONDS)
    return digested

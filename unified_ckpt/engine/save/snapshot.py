"""A copy of the bytes that this rank writes, or gives to those that write them: training goes on while the files are made of it.

How a snapshot could hold wrong bytes: the next one is copied over it before it is written; the caller changes a tensor while it is copied.
So a rank comes to a save only when its last one is over, and the copies are made before the call returns (or before the optimizer's next
step). What ranks put together they put together later, out of their copies, as a save that waits does out of the tensors.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from unified_ckpt.core.planning.exchange import Extent, Piece, Tile
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import Digested, chunks
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.save.extents import Writer
from unified_ckpt.errors import StorageError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.topology import free_memory_nbytes
from unified_ckpt.runtime.torch_state.tensors import (
    ELEMENT,
    TORCH_DTYPES,
    Part,
    as_bytes,
    copy_lines,
    dense,
    fill_lines,
)

# Between two blocks: who waits for the interpreter's lock gets it now, not when the switch interval of 5 ms is over.
_BREATH_SECONDS = 50e-6
_ALIGN = 64  # of what is copied, in the buffer: any dtype, whole cache lines


class Buffers:
    """Host memory of snapshots, kept from one to the next; pinned where it is filled from a CUDA device."""

    def __init__(self) -> None:
        self._own = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.last: Snapshot | None = None  # without the tensors

    @property
    def nbytes(self) -> int:
        return self._own.numel()

    def own(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """At least `nbytes` of memory, uint8."""
        if self._own.numel() < nbytes or (pinned and not self._own.is_pinned()):
            self._own = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # given back before its successor is made
            self._own = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._own

    def close(self) -> None:
        self._own = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.last = None


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of one row of a group that this rank gives to tiles: spans (first, count), ascending and apart, and their copy, one after the
    other: the lines of a part in the dtype on disk."""

    row: int
    split: int
    spans: tuple[tuple[int, int], ...]
    copy: torch.Tensor  # [lines, *local shape from `split` on]

    def at(self, first: int) -> int:
        """Where a line is in the copy."""
        i = bisect_right(self.spans, (first, 1 << 62)) - 1
        return sum(count for _, count in self.spans[:i]) + first - self.spans[i][0]


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """Of one group: `firsts`: of its extents, the first byte in the snapshot's memory; `lines`: by row; `plan`: of a rank whose parts are
    the copies."""

    firsts: Sequence[int]
    lines: Mapping[int, Lines]
    plan: GroupPlan


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to copy where. `held`: the tensors, by group; `copies`: where they go in `memory`."""

    rank: int
    groups: Sequence[GroupPlan]
    held: Sequence[Sequence[Part]]
    memory: torch.Tensor
    copies: Sequence[GroupCopy]

    def extents(self) -> Iterator[tuple[GroupPlan, Part, Extent, torch.Tensor]]:
        """Each extent with its memory."""
        for group, parts, copied in zip(self.groups, self.held, self.copies, strict=True):
            for extent, first in zip(group.moves.extents, copied.firsts, strict=True):
                yield (
                    group,
                    parts[extent.row],
                    extent,
                    self.memory[first : first + extent.stop - extent.start],
                )


def prepare(
    meeting: Meeting, groups: Sequence[GroupPlan], held: Sequence[Sequence[Part]], buffers: Buffers
) -> Snapshot:
    """Makes room; copies nothing. StorageError where memory is short.

    The buffers must be free: this rank has come here only after its last snapshot was written.
    """
    if buffers.last is not None and buffers.last.groups is groups:
        return replace(buffers.last, held=held)
    buffers.last = None
    total, firsts, spans = 0, list[list[int]](), list[dict[int, _Spans]]()
    for group, parts in zip(groups, held, strict=True):
        own, total = _place_extents(group.moves.extents, total)
        firsts.append(own)
        wanted, total = _place_lines(group, parts, total, rank=meeting.rank)
        spans.append(wanted)
    pinned = any(part.local.device.type == "cuda" for parts in held for part in parts)
    _check_memory(total - buffers.nbytes)
    memory = buffers.own(total, pinned=pinned)
    copies = [
        _copy_of(group, parts, own, wanted, memory, rank=meeting.rank)
        for group, parts, own, wanted in zip(groups, held, firsts, spans, strict=True)
    ]
    made = Snapshot(meeting.rank, groups, held, memory, copies)
    buffers.last = replace(made, held=())
    return made


@dataclass(frozen=True, slots=True)
class _Spans:
    """Lines to copy of a row, and the first byte of their copy."""

    split: int
    spans: tuple[tuple[int, int], ...]
    first: int


def _place_extents(extents: Sequence[Extent], total: int) -> tuple[list[int], int]:
    """The first byte of each, from byte `total` of the memory on, and where the next thing may begin."""
    firsts = []
    for extent in extents:
        firsts.append(total)
        total += _aligned(extent.stop - extent.start)
    return firsts, total


def _place_lines(
    group: GroupPlan, parts: Sequence[Part], total: int, *, rank: int
) -> tuple[dict[int, _Spans], int]:
    """The same of the lines that this rank gives to tiles, by row."""
    wanted: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for tile in group.moves.shared:
        for piece in _given(tile, rank):
            wanted.setdefault(piece.row, (piece.split, []))[1].append(
                (piece.first_line, piece.lines)
            )
    found = {}
    for row, (split, spans) in sorted(wanted.items()):
        joined = _joined(spans)
        found[row] = _Spans(split, joined, total)
        total += _aligned(sum(count for _, count in joined) * _line_nbytes(parts[row], split))
    return found, total


def _given(tile: Tile, rank: int) -> Iterator[Piece]:
    return (piece for piece in tile.pieces if rank in piece.parties)


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans (first, count) in order, neighbours in one."""
    found: list[tuple[int, int]] = []
    for first, count in sorted(spans):
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((first, count))
    return tuple(found)


def _line_nbytes(part: Part, split: int) -> int:
    """Of one line of this rank's part, in the dtype on disk."""
    nbytes = itemsize(part.row.spec.dtype)
    for size in part.local.shape[split:]:
        nbytes *= size
    return nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _copy_of(
    group: GroupPlan,
    parts: Sequence[Part],
    firsts: Sequence[int],
    wanted: Mapping[int, _Spans],
    memory: torch.Tensor,
    *,
    rank: int,
) -> GroupCopy:
    lines = {}
    for row, spans in wanted.items():
        count, part = sum(count for _, count in spans.spans), parts[row]
        nbytes = count * _line_nbytes(part, spans.split)
        typed = memory[spans.first : spans.first + nbytes].view(TORCH_DTYPES[part.row.spec.dtype])
        lines[row] = Lines(
            row, spans.split, spans.spans, typed.view(count, *part.local.shape[spans.split :])
        )

    def moved(tile: Tile) -> Tile:
        pieces = (
            replace(one, first_line=lines[one.row].at(one.first_line))
            if rank in one.parties
            else one
            for one in tile.pieces
        )
        return replace(tile, pieces=tuple(pieces))

    moves = replace(group.moves, shared=tuple(moved(tile) for tile in group.moves.shared))
    return GroupCopy(firsts, lines, replace(group, moves=moves))


def _check_memory(nbytes: int) -> None:
    free = free_memory_nbytes()
    if free is not None and nbytes > free:
        raise StorageError(
            f"a snapshot takes {nbytes} more bytes of memory on this rank; {free} are free; `save` takes none"
        )


def enqueued(snapshot: Snapshot) -> list[torch.cuda.Event]:
    """Of each CUDA device: what the caller's stream has been given so far, which may still change the tensors."""
    devices = {
        part.local.device
        for parts in snapshot.held
        for part in parts
        if part.local.device.type == "cuda"
    }
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def wait_for(events: Sequence[torch.cuda.Event]) -> None:
    """The streams of this thread, others than the caller's, go on after these."""
    for event in events:
        torch.cuda.current_stream(event.device).wait_event(event)


def copy(snapshot: Snapshot, keys: Collection[Key]) -> None:
    """Copies these tensors, which may change then."""
    for group, parts, copied in zip(snapshot.groups, snapshot.held, snapshot.copies, strict=True):
        for row, lines in copied.lines.items():
            if group.rows[row].key in keys:
                part = Part(parts[row].row, dense(parts[row].local))
                for first, count in lines.spans:
                    at = lines.at(first)
                    copy_lines(
                        lines.copy[at : at + count], part, split=lines.split, first_line=first
                    )
    last: Part | None = None
    for _, part, extent, memory in snapshot.extents():
        if part.row.key not in keys:
            continue
        if (
            last is None or last.row is not part.row
        ):  # a row-major copy serves all extents of its tensor
            last = part if part.local.is_contiguous() else Part(part.row, dense(part.local))
        item = itemsize(part.row.spec.dtype)
        lines_of_extent = (extent.stop - extent.start) // item
        fill_lines(
            memory,
            last,
            ELEMENT,
            split=last.local.dim(),
            first_line=extent.local // item,
            lines=lines_of_extent,
        )


def parts_of(snapshot: Snapshot, number: int) -> list[Part]:
    """The parts of group `number` as `GroupCopy.plan` counts their lines: the copies; of a row that gives nothing to tiles, nothing."""
    group, lines = snapshot.groups[number], snapshot.copies[number].lines
    found = []
    for row, spec_row in enumerate(group.rows):
        if row in lines:
            one = lines[row]
            dims = (1,) * (one.split - 1)  # the lines count over `split` dims
            shape = (len(one.copy), *dims, *one.copy.shape[1:]) if one.split else one.copy.shape[1:]
            found.append(Part(spec_row, one.copy.view(shape)))
        else:
            found.append(Part(spec_row, snapshot.memory[:0]))
    return found


def write_copied(snapshot: Snapshot, number: int, writer: Writer) -> Digested:
    """Writes the extents of group `number` out of the snapshot."""
    group, copied = snapshot.groups[number], snapshot.copies[number]
    held = [
        (extent, snapshot.memory[first : first + extent.stop - extent.start])
        for extent, first in zip(group.moves.extents, copied.firsts, strict=True)
    ]
    digested: Digested = []
    for extent, memory in sorted(held, key=partial(_place, group)):
        digested += _write_extent(group, extent, memory, writer)
    return digested


def _place(group: GroupPlan, found: tuple[Extent, torch.Tensor]) -> tuple[int, int]:
    number = group.file_of[found[0].row]
    return number, group.files[number].starts[found[0].row] + found[0].start


def _write_extent(
    group: GroupPlan, extent: Extent, memory: torch.Tensor, writer: Writer
) -> Digested:
    file, view = group.files[group.file_of[extent.row]], as_bytes(memory)
    digested: Digested = []
    first = file.starts[extent.row]
    alone = first + extent.start, first + extent.stop
    for start, stop in chunks(extent.start, extent.stop):
        held = view[start - extent.start : stop - extent.start]
        writer.put(file.name, first + start, [held], alone=alone)
        for low, high in chunks(start, stop, nbytes=digests.BLOCK_NBYTES):
            digested.extend(
                (extent.row, piece)
                for piece in digests.pieces(held[low - start : high - start], start=low)
            )
            time.sleep(_BREATH_SECONDS)
    return digested

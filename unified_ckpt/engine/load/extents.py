"""Read all groups: first tiles, which ranks share, then in lanes what one rank alone needs.

A lane reads, digests and copies its share of the extents, chunk by chunk.

How bytes could be lost: a buffer that is filled again before a device has copied from it, or a
share that ends too early. `TransferBuffers` waits for copies, `split_lanes` cuts one list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch

from unified_ckpt.core.planning.box_reads import BoxRead, plan_box_reads
from unified_ckpt.core.planning.exchange import Extent, RankIO
from unified_ckpt.core.planning.lanes import LaneSpan, split_lanes
from unified_ckpt.core.planning.load_plan import ReadPlan
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.load.read import (
    Destinations,
    GroupReader,
    GroupReadPlan,
    planned_tiles,
    read_tiles,
)
from unified_ckpt.engine.load.tensor_reader import LocatedTensor, TensorRange, TensorReader
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, chunks
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.exchange.tile_buffers import TileBufferSet, make_exchange_id
from unified_ckpt.runtime.threads import Lane, run_lanes
from unified_ckpt.runtime.torch_state.devices import (
    TransferBuffers,
    copy_part_to_tensor,
    copy_threads,
    copy_to_tensor,
    record_events,
    streams_after,
)
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_bytes

LaneItem = tuple[GroupReadPlan, Extent | BoxRead]
Share = list[LaneItem]  # of one lane, in its order


def plan_boxes(
    index: int, rank: int, targets: Sequence[LocalTensor], tensors: Sequence[LocatedTensor]
) -> GroupReadPlan:
    """Return the reads of declared boxes, which concern this rank alone, as group `index`.

    `targets`: one for each box, `tensors`: what is read into each.
    """
    decls = tuple(target.decl for target in targets)
    contiguous = {i for i, target in enumerate(targets) if target.local.is_contiguous()}
    plan = plan_box_reads(decls, contiguous=contiguous, limit_nbytes=CHUNK_NBYTES)
    read_plan = ReadPlan(RankIO(plan.extents, (), (), 0), plan.overlapping)
    first = dict[Key, int]()
    first_boxes = {i: first.setdefault(decl.key, i) for i, decl in enumerate(decls)}
    return GroupReadPlan(
        index,
        (rank,),
        decls,
        tuple(targets),
        tuple(tensors),
        read_plan,
        box_reads=plan.box_reads,
        first_boxes=first_boxes,
    )


def read_groups(
    collective: Collective,
    group_plans: Sequence[GroupReadPlan],
    reader: TensorReader,
    buffers: TileBufferSet,
    topology: Topology,
) -> list[GroupReader]:
    """Read all groups, and return their readers. Collective."""
    rank, lanes = collective.rank, reader.lane_count(ranks=topology.local_world)
    group_readers = [
        GroupReader(
            plan, Destinations(plan.targets, plan.read_plan.rank_io, rank=rank), reader, rank
        )
        for plan in group_plans
    ]
    shares = lane_shares(group_plans, rank, lanes=lanes)
    tiles = chain.from_iterable(map(planned_tiles, group_plans))
    with reader.expecting(chain(tiles, *map(planned_extents, shares))):
        for group in group_readers:
            exchange_id = make_exchange_id(collective, group.plan.index)
            read_tiles(group, buffers, exchange_id=exchange_id, ahead=lanes > 1)
        read_extents(shares, group_readers)
    return group_readers


def lane_shares(plans: Sequence[GroupReadPlan], rank: int, *, lanes: int) -> list[Share]:
    """Divide the extents of a rank, in file order, among up to `lanes` lanes.

    Ranks begin at other places of their shares, so that they are rarely in one file at once. The
    first lane also reads tensors that are not contiguous: one stream fills their copies.
    """
    if any(target.casts for plan in plans for target in plan.targets):
        lanes = copy_threads(lanes)
    direct, copied = list[LaneItem](), list[LaneItem]()
    for plan in plans:
        for extent in plan.read_plan.rank_io.extents:
            is_direct = plan.targets[extent.decl_index].local.is_contiguous()
            (direct if is_direct else copied).append((plan, extent))
        direct += ((plan, read) for read in plan.box_reads)
    direct.sort(key=_position)
    spans = [
        LaneSpan(item.start, item.stop, CHUNK_NBYTES if isinstance(item, Extent) else 0)
        for _, item in direct
    ]
    shares = [
        [_cut(direct[index], start, stop) for index, start, stop in lane_share]
        for lane_share in split_lanes(spans, lanes=lanes)
    ] or [[]]
    shares[0] += sorted(copied, key=_position)
    ranks = sorted({holder for plan in plans for holder in plan.holders})
    for share in shares:
        first = len(share) * ranks.index(rank) // len(ranks) if ranks else 0
        share[:] = share[first:] + share[:first]
    return shares


def _position(item: LaneItem) -> tuple[str, int]:
    plan, read = item
    location = plan.tensors[read.decl_index].location
    return location.file, location.start + read.start


def _cut(item: LaneItem, start: int, stop: int) -> LaneItem:
    plan, extent = item
    if isinstance(extent, BoxRead):
        return item
    local_offset = extent.local_offset + start - extent.start
    return plan, Extent(extent.decl_index, start, stop, local_offset)


def planned_extents(share: Share) -> Iterator[TensorRange]:
    """Yield what a lane will read, in its order."""
    for plan, item in share:
        target, into = plan.targets[item.decl_index], None
        if isinstance(item, Extent) and target.is_stored_bytes:
            local = item.local_offset
            into = as_bytes(target.local)[local : local + item.stop - item.start]
        yield TensorRange(plan.tensors[item.decl_index], item.start, item.stop, into)


def read_extents(shares: Sequence[Share], group_readers: Iterable[GroupReader]) -> None:
    """Read the shares, each in a lane, straight into tensors whose memory matches the file.

    Copies to devices wait for what the current streams do now, and are complete at the end.
    """
    readers = {reader.plan.index: reader for reader in group_readers}
    for plan, item in chain.from_iterable(shares):
        readers[plan.index].nbytes += item.stop - item.start
    targets = [target.local for reader in readers.values() for target in reader.plan.targets]
    events, inference = record_events(targets), torch.is_inference_mode_enabled()

    def lane(share: Share) -> Lane:
        buffers = TransferBuffers(CHUNK_NBYTES)
        with torch.inference_mode(inference), streams_after(events):
            try:
                for plan, item in share:
                    reader = readers[plan.index]
                    if isinstance(item, Extent):
                        yield from _read_extent(reader, item, buffers)
                    else:
                        yield from _read_box(reader, item, buffers)
            finally:
                buffers.wait()

    run_lanes([lane(share) for share in shares], on_progress=lambda: None)


def _read_extent(group_reader: GroupReader, extent: Extent, buffers: TransferBuffers) -> Lane:
    """Read, digest and copy one extent, chunk by chunk."""
    index = extent.decl_index
    target, tensor = group_reader.destinations[index], group_reader.plan.tensors[index]
    memory = as_bytes(target.local) if target.is_stored_bytes else None
    for start, stop in chunks(extent.start, extent.stop):
        first = extent.local_offset + start - extent.start
        if memory is not None:
            view = memory[first : first + stop - start]
        else:
            buffer = buffers.acquire()[: stop - start]
            view = as_bytes(buffer)
        group_reader.tensor_reader.read_into(tensor, start, view)
        group_reader.digest(index, view, start=start)
        if memory is None:
            copy_to_tensor(buffer, target, first // itemsize(target.decl.spec.dtype))
        if stop == extent.stop:
            group_reader.destinations.mark_filled(index)
        if memory is None:
            buffers.release_after(target.local)
        yield


def _read_box(group_reader: GroupReader, read: BoxRead, buffers: TransferBuffers) -> Lane:
    """Read, digest and copy a part of a box, with the gaps between its runs."""
    index = read.decl_index
    target, tensor = group_reader.plan.targets[index], group_reader.plan.tensors[index]
    buffer = buffers.acquire()[: read.stop - read.start]
    view = as_bytes(buffer)
    group_reader.tensor_reader.read_into(tensor, read.start, view)
    group_reader.digest(index, view, start=read.start)
    copy_part_to_tensor(buffer, target, read.part)
    buffers.release_after(target.local)
    yield

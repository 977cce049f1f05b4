"""Writes and syncs this rank's share of a save: tensors, or their snapshot, and digests."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from unified_ckpt.core.nodes.node_groups import base_part
from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.engine.encode.encoder import GroupWritten, LocalOutliers
from unified_ckpt.engine.plan.chunks import BlockCrcs, group_by_tensor
from unified_ckpt.engine.plan.digest_file import digest_file_record
from unified_ckpt.engine.plan.group_plan import GroupPlan
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.write.extents import write_extents, write_headers
from unified_ckpt.engine.save.write.snapshot import Snapshot, snapshot_tensors
from unified_ckpt.engine.save.write.tiles import write_tiles
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests, names
from unified_ckpt.format.manifest_fields import DigestFile
from unified_ckpt.runtime.exchange.file_writer import ContiguousWrite, FileWriter, RankWriter
from unified_ckpt.runtime.exchange.tile_buffers import TileBufferSet, make_exchange_id
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.threads import lane_count, map_in_threads
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

_SYNCS = 8  # files synced at a time: the disk works on all of them


@dataclass(frozen=True, slots=True)
class WrittenTensors:
    """This rank's share of a save: the CRCs of written blocks by group, and all outliers."""

    crcs_by_group: Sequence[BlockCrcs]
    outliers: LocalOutliers


def write_tensors(
    planned: PlannedSave, file_writer: FileWriter, snapshot: Snapshot | None
) -> WrittenTensors:
    """Write this rank's share of every group, tiles first because other ranks wait for them."""
    collective, connections = planned.folder_ranks, planned.call.connections
    groups, tile_buffers = planned.writes.groups, planned.call.buffers.tiles
    # Beside training, each rank's training occupies a core.
    busy_ranks = connections.topology.local_world * (1 if snapshot is None else 2)
    with (
        IOThread(ranks=busy_ranks) as io_thread,
        tile_buffers.exchanging(
            collective,
            [group.rank_io for group in groups],
            tile_nbytes=max((g.tile_nbytes for g in groups if g.rank_io.io_tiles), default=0),
        ) as buffers,
    ):
        writer = RankWriter(
            file_writer,
            collective.rank,
            lanes=lane_count(ranks=busy_ranks) if file_writer.is_thread_safe else 1,
            io_thread=io_thread,
            on_progress=planned.heartbeat,
        )
        written = [
            _write_group(planned, index, snapshot, writer, buffers) for index in range(len(groups))
        ]
        connections.transport.flush_tiles(buffers.wait)
    outliers = list(chain.from_iterable(group.outliers for group in written))
    return WrittenTensors([group.crcs for group in written], outliers)


def _write_group(
    planned: PlannedSave,
    index: int,
    snapshot: Snapshot | None,
    writer: RankWriter,
    buffers: TileBufferSet,
) -> GroupWritten:
    """Write this rank's share of one group."""
    group, tensors = planned.writes.groups[index], planned.tensors_by_group[index]
    exchange_id = make_exchange_id(planned.folder_ranks, group.index)
    tile_plan = group  # without a snapshot
    write_headers(group, writer)
    extents = [(extent, tensors[extent.decl_index]) for extent in group.rank_io.extents]
    copies: Extents = []
    if snapshot is not None:
        tile_plan, tensors = snapshot.copies[index].plan, snapshot_tensors(snapshot, index)
        uncopied = [extent for extent in extents if snapshot.is_uncopied(index, extent[0])]
        extents, copies = _with_their_parts(group, uncopied, snapshot.copied_extents(index))
    written = write_tiles(tile_plan, tensors, writer, buffers, exchange_id=exchange_id)
    stable = snapshot is None
    written.extend(write_extents(group, extents, writer, beside_training=False, stable=stable))
    if snapshot is not None:
        if index == snapshot.last_uncopied_group:
            planned.hold.release()
        written.extend(write_extents(group, copies, writer, beside_training=True, stable=True))
    return written


Extents = list[tuple[Extent, LocalTensor]]


def _with_their_parts(
    group: GroupPlan, uncopied: Extents, copies: Extents
) -> tuple[Extents, Extents]:
    """Return the extents to write first: `uncopied`, and copies that share a part with them.

    A part in memory waits for all of its bytes. Also returns the other copies.
    """
    parts = {group.part_of(extent) for extent, _ in uncopied} - {None}
    first = [item for item in copies if group.part_of(item[0]) in parts]
    return uncopied + first, [item for item in copies if group.part_of(item[0]) not in parts]


def write_digests(
    planned: PlannedSave, file_writer: FileWriter, crcs_by_group: Sequence[BlockCrcs]
) -> DigestFile | None:
    """Collective. Combine the CRCs of each group on its leader, which writes its section.

    Returns the record of the digest file on rank 0. If folders compare models, leaders send it
    digests of models, too, for `SaveScope.differing_models`.
    """
    collective, groups = planned.folder_ranks, planned.writes.groups
    global_plan, send_models = planned.writes.global_plan, planned.layout.compares_models
    for group, local_crcs in zip(groups, crcs_by_group, strict=True):
        if group.leader != collective.rank:
            collective.collect(
                f"digests/{group.index}",
                b"." + digests.serialize(local_crcs),
                dst=group.leader,
                ranks=group.holders,
            )
    for group, local_crcs in zip(groups, crcs_by_group, strict=True):
        if group.leader == collective.rank:
            collected = collective.collect(
                f"digests/{group.index}", b".", dst=group.leader, ranks=group.holders
            )
            remote_crcs = [crc for body in collected for crc in digests.deserialize(body[1:])]
            blocks = _combine_blocks(group, group_by_tensor([*local_crcs, *remote_crcs]))
            packed = [struct.pack(f"<{len(numbers)}Q", *numbers) for numbers in blocks]
            section = b"".join(packed)
            file_writer.write(
                ContiguousWrite(names.DIGESTS, group.digest_start, [memoryview(section)])
            )
            summary = [digests.crc(section), len(section)]
            collective.put_json(f"section/{group.index}", summary)
            if send_models:
                models = {
                    f"{tensor.part}:{tensor.fqn}": digests.crc(numbers)
                    for tensor, numbers in zip(group.stored.tensors, packed, strict=True)
                    if base_part(tensor.part) == names.MODEL
                }
                collective.put_json(f"models/{group.index}", models)
    if global_plan is None:
        return None
    header = global_plan.digest_header
    file_writer.write(ContiguousWrite(names.DIGESTS, 0, [memoryview(header)]))
    sections = [
        collective.get_json(f"section/{index}") for index in range(len(global_plan.stored_by_group))
    ]
    return digest_file_record([(digests.crc(header), len(header)), *sections])


def _combine_blocks(
    group: GroupPlan, crcs_by_tensor: Mapping[int, Sequence[digests.BlockCrc]]
) -> list[list[int]]:
    """Return the digests of all blocks of each stored tensor of the group.

    IntegrityError if a byte was digested twice or never.
    """
    blocks = list[list[int]]()
    for index, tensor in enumerate(group.stored.tensors):
        complete, partial = digests.combine_blocks(
            crcs_by_tensor.get(index, ()), nbytes=tensor.spec.nbytes
        )
        count = digests.block_count(tensor.spec.nbytes)
        if partial or len(complete) != count:
            raise IntegrityError(
                f"{tensor.part}:{tensor.fqn}: {count - len(complete)} of {count} blocks "
                "were not written whole; this is a bug"
            )
        blocks.append([complete[block] for block in range(count)])
    return blocks


def sync_tensor_files(planned: PlannedSave, folder: str) -> None:
    """Sync the tensor files once each, spread over the ranks of their group.

    Where ranks of several nodes share the folder, each rank syncs the files it has written: a node
    flushes only its own pages.
    """
    storage = planned.call.storage
    if planned.call.connections.topology.group_spans_nodes:
        storage.sync_written(planned.heartbeat)
        return
    files = [
        f"{folder}/{file.name}"
        for group in planned.writes.groups
        for index, file in enumerate(group.files)
        if group.holders[index % len(group.holders)] == planned.folder_ranks.rank
    ]

    def sync(file: str) -> None:
        storage.sync(file)
        planned.heartbeat()  # a sync that hangs is no progress

    map_in_threads(sync, files, count=_SYNCS)

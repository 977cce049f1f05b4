"""Writes and syncs this rank's share of a save: tensors, or their snapshot, and digests."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from unified_ckpt.core.nodes.write_alignment import ANY_BYTE
from unified_ckpt.engine.encode.stored_models import StoredModels, pack_model_digests
from unified_ckpt.engine.plan.chunks import BlockCrcs, group_by_tensor
from unified_ckpt.engine.plan.save_plan import GlobalPlan, GroupPlan
from unified_ckpt.engine.plan.stored_tensors import is_encoded_master
from unified_ckpt.engine.save.extents import write_extents, write_headers
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.snapshot import Snapshot, snapshot_tensors, write_snapshot
from unified_ckpt.engine.save.tiles import write_tiles
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests, names
from unified_ckpt.format.digest_file import digest_file_record
from unified_ckpt.format.manifest_fields import DigestFile
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_writer import FileWriter, QueuedWriter
from unified_ckpt.runtime.exchange.tile_buffers import TileBufferSet, make_exchange_id


def write_tensors(
    planned: PlannedSave,
    file_writer: FileWriter,
    snapshot: Snapshot | None,
) -> list[BlockCrcs]:
    """Write this rank's share of every group, tiles first because other ranks wait for them.

    Encodes masters beside the model that all ranks have written. Returns the CRCs of the written
    blocks by group.
    """
    collective, plan, connections = planned.collective, planned.plan, planned.call.connections
    groups, tile_buffers = plan.groups, planned.call.buffers.tiles
    exceptions = planned.exceptions
    # Beside training, nobody waits for the disk, and each rank's training occupies a core.
    in_background = snapshot is not None
    local_ranks = connections.topology.local_world
    writer = QueuedWriter(
        file_writer,
        writeback_early=planned.request.options.fsync and not in_background,
        busy_ranks=local_ranks * (2 if in_background else 1),
        on_progress=planned.heartbeat,
    )
    crcs_by_group: list[BlockCrcs] = []
    try:
        with tile_buffers.exchanging(collective, [group.rank_io for group in groups]) as buffers:
            for index, group in enumerate(groups):
                if exceptions.models is None and is_encoded_master(group.decls[0]):
                    exceptions.models = _finish_models(planned, file_writer, writer)
                crcs = _write_group(planned, index, snapshot, writer, buffers)
                if exceptions.models is not None:
                    crcs += exceptions.models.records(group)
                crcs_by_group.append(crcs)
            if exceptions.models is None and planned.is_encoded:  # other ranks wait for this one
                _finish_models(planned, file_writer, writer)
            writer.drain()
            connections.transport.flush_tiles(buffers.wait)
        return crcs_by_group
    finally:
        writer.close()


def _write_group(
    planned: PlannedSave,
    index: int,
    snapshot: Snapshot | None,
    writer: QueuedWriter,
    buffers: TileBufferSet,
) -> BlockCrcs:
    """Write this rank's share of one group."""
    group, tensors, rank = planned.plan.groups[index], planned.tensors_by_group[index], buffers.rank
    exceptions, tile_plan = planned.exceptions, group
    exchange_id = make_exchange_id(planned.collective, group.index)
    write_headers(group, writer, rank=rank)
    if snapshot is not None:
        tile_plan, tensors = snapshot.copies[index].plan, snapshot_tensors(snapshot, index)
    crcs = write_tiles(tile_plan, tensors, writer, buffers, exceptions, exchange_id=exchange_id)
    if snapshot is None:
        return crcs + write_extents(group, tensors, writer, exceptions, rank=rank)
    uncopied = snapshot.uncopied_extents(index)
    crcs += write_extents(uncopied, tensors, writer, exceptions, rank=rank)
    if index == snapshot.last_uncopied_group:
        planned.hold.release()
    return crcs + write_snapshot(snapshot, index, writer, exceptions)


def _finish_models(
    planned: PlannedSave, file_writer: FileWriter, writer: QueuedWriter
) -> StoredModels:
    """Collective. Return once this rank can read what all ranks wrote before masters."""
    collective, topology = planned.collective, planned.call.connections.topology
    writer.drain()
    file_writer.flush()
    collective.finish_step("write-model")
    if topology.group_spans_nodes and topology.alignment_nbytes != ANY_BYTE:
        # Nodes that cache pages show each other a file that is opened after it was synced.
        sync_files(planned, file_writer.folder)
        collective.finish_step("sync-model")
    return StoredModels(file_writer, planned.plan.groups)


def write_digests(
    collective: Collective,
    file_writer: FileWriter,
    groups: Sequence[GroupPlan],
    crcs_by_group: Sequence[BlockCrcs],
    global_plan: GlobalPlan | None,
    *,
    encoded: bool,
) -> DigestFile | None:
    """Collective. Combine the CRCs of each group on its leader, which writes its section.

    Returns the record of the digest file on rank 0. If some tensors are `encoded`, leaders send
    it digests of models, too.
    """
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
            crcs_by_tensor = group_by_tensor([*local_crcs, *remote_crcs])
            blocks = _combine_blocks(group, crcs_by_tensor)
            section = b"".join(struct.pack(f"<{len(numbers)}Q", *numbers) for numbers in blocks)
            file_writer.write_at(names.DIGESTS, group.digest_start, [memoryview(section)])
            summary = [digests.crc(section), len(section)]
            collective.put_json(f"section/{group.index}", summary)
            if encoded:
                models = pack_model_digests(group, crcs_by_tensor, blocks)
                collective.put(f"models/{group.index}", models)
    if global_plan is None:
        return None
    header = global_plan.digest_header
    file_writer.write_at(names.DIGESTS, 0, [memoryview(header)])
    sections = [
        collective.get_json(f"section/{index}") for index in range(len(global_plan.decls_by_group))
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
            part = group.decls[tensor.decl_index].part
            raise IntegrityError(
                f"{part}:{tensor.fqn}: {count - len(complete)} of {count} blocks "
                "were not written whole; this is a bug"
            )
        blocks.append([complete[block] for block in range(count)])
    return blocks


def sync_files(planned: PlannedSave, folder: str) -> None:
    """Sync the tensor files once each, spread over the ranks of their group.

    Where ranks of several nodes share the folder, each rank syncs the files it has written: a node
    flushes only its own pages.
    """
    storage = planned.call.storage
    if planned.call.connections.topology.group_spans_nodes:
        storage.sync_written(planned.heartbeat)
        return
    for group in planned.plan.groups:
        for index, file in enumerate(group.files):
            if group.holders[index % len(group.holders)] == planned.collective.rank:
                storage.sync(f"{folder}/{file.name}")
                planned.heartbeat()

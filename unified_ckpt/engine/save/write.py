"""Writes and syncs this rank's share of a save, from its tensors or from a snapshot of them."""

from __future__ import annotations

from unified_ckpt.engine.plan.chunks import BlockCrcs
from unified_ckpt.engine.save.extents import QueuedWriter, write_extents, write_headers
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.snapshot import Snapshot, snapshot_tensors, write_snapshot
from unified_ckpt.engine.save.tiles import TileBufferSet, write_tiles
from unified_ckpt.runtime.exchange.file_writer import FileWriter
from unified_ckpt.runtime.exchange.shared_memory import PeerWait, marking_failed
from unified_ckpt.runtime.exchange.tile_buffers import exchange_number


def write_parts(
    planned: PlannedSave, file_writer: FileWriter, snapshot: Snapshot | None
) -> list[BlockCrcs]:
    """Write this rank's share of every group, tiles first because other ranks wait for them.

    Returns the CRCs of the written blocks by group.
    """
    collective, plan, transport = planned.collective, planned.plan, planned.transport
    rank, groups, tile_buffers = collective.rank, plan.groups, planned.call.cache.tile_buffers
    # Beside training, nobody waits for the disk, and each rank's training occupies a core.
    in_background = snapshot is not None
    local_ranks = collective.world
    if transport is not None:
        ranks = range(collective.world)
        local_ranks = sum(transport.alignment.same_node(rank, other) for other in ranks)
    writer = QueuedWriter(
        file_writer,
        writeback_early=planned.request.options.fsync and not in_background,
        busy_ranks=local_ranks * (2 if in_background else 1),
        on_progress=planned.heartbeat,
    )
    try:
        local_buffers = tile_buffers.prepare(
            collective,
            tile_nbytes=max(
                (group.tile_nbytes for group in groups if group.rank_io.io_tiles), default=0
            ),
            partners={partner for group in groups for partner in group.rank_io.partners(rank)},
            transport=transport,
        )
        wait = PeerWait(
            timeout_seconds=collective.timeout_seconds,
            tile_buffers={**local_buffers, **tile_buffers.remote},
            raise_if_failed=collective.raise_if_failed,
            progress=collective.progress,
        )
        buffers = TileBufferSet(rank, local_buffers, tile_buffers.remote, transport, wait)
        crcs_by_group: list[BlockCrcs] = []
        with marking_failed(local_buffers.get(rank)):
            for index, group in enumerate(groups):
                tensors, exchange = (
                    planned.tensors_by_group[index],
                    exchange_number(collective, group.index),
                )
                write_headers(group, writer, rank=rank)
                if snapshot is None:
                    crcs = write_tiles(group, tensors, writer, buffers, exchange=exchange)
                    crcs += write_extents(group, tensors, writer, rank=rank)
                else:
                    tile_plan, copies = (
                        snapshot.copies[index].plan,
                        snapshot_tensors(snapshot, index),
                    )
                    crcs = write_tiles(tile_plan, copies, writer, buffers, exchange=exchange)
                    crcs += write_snapshot(snapshot, index, writer)
                crcs_by_group.append(crcs)
            writer.drain()
            if transport is not None:
                transport.flush_tiles(wait)
        return crcs_by_group
    finally:
        writer.close()


def sync_parts(planned: PlannedSave, folder: str) -> None:
    """Sync the part files once each, spread over the ranks of their group.

    Where ranks of several nodes share the folder, each rank syncs the files it has written: a node
    flushes only its own pages.
    """
    storage = planned.call.storage
    if planned.transport is not None:
        for name in storage.unsynced_files():
            storage.sync(name)
            planned.heartbeat()
        return
    for group in planned.plan.groups:
        for index, file in enumerate(group.files):
            if group.holders[index % len(group.holders)] == planned.collective.rank:
                storage.sync(f"{folder}/{file.name}")
                planned.heartbeat()

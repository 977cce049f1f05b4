"""What each rank writes of the parts of a checkpoint, from its tensors or from a snapshot of them;
then all of it on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unified_ckpt.engine.plan.chunks import BlockCrcs
from unified_ckpt.engine.plan.save_plan import SavePlan
from unified_ckpt.engine.save.extents import QueuedWriter, write_extents, write_headers
from unified_ckpt.engine.save.snapshot import Snapshot, snapshot_tensors, write_snapshot
from unified_ckpt.engine.save.tiles import write_tiles
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.shared_files import FileWriter
from unified_ckpt.runtime.exchange.shared_memory import PeerWait, marking_failed
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.exchange.windows import TileBuffers, exchange_number
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


def write_parts(
    collective: Collective,
    plan: SavePlan,
    parts_by_group: Sequence[Sequence[LocalTensor]],
    file_writer: FileWriter,
    tile_buffers: TileBuffers,
    snapshot: Snapshot | None,
    *,
    transport: PeerTransport | None,
    fsync: bool,
    on_progress: Callable[[], None],
) -> list[BlockCrcs]:
    """What this rank writes of every group: first what others wait for. `parts_by_group`: by group
    of the plan; `on_progress`: called with each write.
    """
    # Beside the training nobody waits for the disk, and each rank's training has a core already.
    in_background = snapshot is not None
    ranks = (
        collective.world
        if transport is None
        else sum(
            transport.alignment.same_node(collective.rank, rank) for rank in range(collective.world)
        )
    )
    writer = QueuedWriter(
        file_writer,
        writeback_early=fsync and not in_background,
        busy_ranks=ranks * (2 if in_background else 1),
        on_progress=on_progress,
    )
    try:
        local_buffers = tile_buffers.prepare(
            collective,
            tile_nbytes=max(
                (group.tile_nbytes for group in plan.groups if group.rank_io.io_tiles), default=0
            ),
            partners={
                rank for group in plan.groups for rank in group.rank_io.partners(collective.rank)
            },
            transport=transport,
        )
        wait = PeerWait(
            timeout_seconds=collective.timeout_seconds,
            tile_buffers={**local_buffers, **tile_buffers.remote},
            raise_if_failed=collective.raise_if_failed,
            progress=collective.progress,
        )
        block_crcs: list[BlockCrcs] = []
        with marking_failed(local_buffers.get(collective.rank)):
            for index, (group, parts) in enumerate(zip(plan.groups, parts_by_group, strict=True)):
                exchange = exchange_number(collective, group.index)
                write_headers(group, writer, rank=collective.rank)
                tile_source = (
                    (group, parts)
                    if snapshot is None
                    else (snapshot.copies[index].plan, snapshot_tensors(snapshot, index))
                )
                tile_crcs = write_tiles(
                    *tile_source,
                    writer,
                    local_buffers,
                    wait,
                    remote_buffers=tile_buffers.remote,
                    transport=transport,
                    rank=collective.rank,
                    exchange=exchange,
                )
                extent_crcs = (
                    write_extents(group, parts, writer, rank=collective.rank)
                    if snapshot is None
                    else write_snapshot(snapshot, index, writer)
                )
                block_crcs.append(tile_crcs + extent_crcs)
            writer.drain()
            if transport is not None:
                transport.flush_tiles(wait)
        return block_crcs
    finally:
        writer.close()


def sync_parts(
    collective: Collective,
    storage: LocalStorage,
    folder: str,
    plan: SavePlan,
    *,
    shared: bool,
    on_progress: Callable[[], None],
) -> None:
    """Each file is synced once, the work spread over its group; where ranks of several machines
    share the folder, by each rank that has written to it, for a machine knows only of its own
    bytes.
    """
    if shared:
        for name in storage.unsynced_files():
            storage.sync(name)
            on_progress()
        return
    for group in plan.groups:
        for index, file in enumerate(group.files):
            if group.holders[index % len(group.holders)] == collective.rank:
                storage.sync(f"{folder}/{file.name}")
                on_progress()

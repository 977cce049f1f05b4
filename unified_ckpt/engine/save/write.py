"""What each rank writes of the parts of a checkpoint, from its tensors or from a snapshot of them; then all of it on the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unified_ckpt.engine.plan.chunks import Digested
from unified_ckpt.engine.plan.save_plan import SavePlan
from unified_ckpt.engine.save.extents import Writer, write_extents, write_headers
from unified_ckpt.engine.save.snapshot import Snapshot, parts_of, write_copied
from unified_ckpt.engine.save.tiles import write_tiles
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.exchange.shared_files import Files
from unified_ckpt.runtime.exchange.shared_memory import Wait, giving_up
from unified_ckpt.runtime.exchange.tcp_exchange import Post
from unified_ckpt.runtime.exchange.windows import Windows, exchange_number
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.tensors import Part


def write_parts(
    meeting: Meeting,
    plan: SavePlan,
    held: Sequence[Sequence[Part]],
    files: Files,
    windows: Windows,
    snapshot: Snapshot | None,
    *,
    post: Post | None,
    fsync: bool,
    beat: Callable[[], None],
) -> list[Digested]:
    """What this rank writes of every group: first what others wait for. `held`: by group of the plan; `beat`: called with each write."""
    # Beside the training nobody waits for the disk, and each rank's training has a core already.
    behind = snapshot is not None
    ranks = (
        meeting.world
        if post is None
        else sum(post.volume.near(meeting.rank, rank) for rank in range(meeting.world))
    )
    writer = Writer(
        files, hurry=fsync and not behind, ranks=ranks * (2 if behind else 1), beat=beat
    )
    try:
        opened = windows.ready(
            meeting,
            tile_nbytes=max(
                (group.tile_nbytes for group in plan.groups if group.moves.mine), default=0
            ),
            partners={rank for group in plan.groups for rank in group.moves.partners(meeting.rank)},
            post=post,
        )
        wait = Wait(
            timeout_seconds=meeting.timeout_seconds,
            windows={**opened, **windows.far},
            heed=meeting.heed,
            signs=meeting.signs,
        )
        found: list[Digested] = []
        with giving_up(opened.get(meeting.rank)):
            for i, (group, parts) in enumerate(zip(plan.groups, held, strict=True)):
                number = exchange_number(meeting, group.index)
                write_headers(group, writer, rank=meeting.rank)
                given = (
                    (group, parts)
                    if snapshot is None
                    else (snapshot.copies[i].plan, parts_of(snapshot, i))
                )
                tiles = write_tiles(
                    *given,
                    writer,
                    opened,
                    wait,
                    far=windows.far,
                    post=post,
                    rank=meeting.rank,
                    exchange=number,
                )
                alone = (
                    write_extents(group, parts, writer, rank=meeting.rank)
                    if snapshot is None
                    else write_copied(snapshot, i, writer)
                )
                found.append(tiles + alone)
            writer.drain()
            if post is not None:
                post.handed_in(wait)
        return found
    finally:
        writer.close()


def sync_parts(
    meeting: Meeting,
    storage: LocalStorage,
    folder: str,
    plan: SavePlan,
    *,
    shared: bool,
    beat: Callable[[], None],
) -> None:
    """Each file is synced once, the work spread over its group; where ranks of several machines share the folder, by each rank that has
    written to it, for a machine knows only of its own bytes."""
    if shared:
        for name in storage.written():
            storage.sync(name)
            beat()
        return
    for group in plan.groups:
        for i, file in enumerate(group.files):
            if group.holders[i % len(group.holders)] == meeting.rank:
                storage.sync(f"{folder}/{file.name}")
                beat()

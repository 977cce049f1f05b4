"""Count the bytes that a rank sends to other nodes in a save to a shared folder.

Run: python benchmarks/bench_volume.py [--ranks 64,1024] [--out FILE].

Simulated, by number of ranks and kind of volume: the plan of one rank of Llama 3.1 405B (weights,
fp32 masters, two moments), PP 4 x FSDP x TP 8, eight ranks per node; no tensors, no disk. One JSON
line per row: bytes that the rank holds, bytes that it sends (blocks, and parts of tiles), the
number of ranks that it sends to, the number that may send to it, and the seconds to compute that
(median of 3).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_plan import llama_job, members_of

from unified_ckpt.core.nodes.write_alignment import ANY_BYTE, WHOLE_FILES, WriteAlignment
from unified_ckpt.engine.plan.file_layout import lay_out_group
from unified_ckpt.engine.plan.group_plan import GroupPlan, plan_group

BLOCKS = {"coherent": ANY_BYTE, "nfs": 1 << 20, "unknown": WHOLE_FILES}
RANKS_OF_A_NODE = 8
RUNS = 3


def sent(groups: list[GroupPlan], volume: WriteAlignment, rank: int) -> dict[str, Any]:
    """Return what one rank sends: blocks that another node writes, and pieces of remote tiles."""
    local_nbytes = blocks = pieces = 0
    to: set[int] = set()
    movers: set[int] = set()
    parties: set[int] = set()
    for group in groups:
        for extent in group.rank_io.extents:
            file = group.file_of(group.stored.starts[extent.decl_index])
            span = (
                file.offsets[extent.decl_index] + extent.start,
                file.offsets[extent.decl_index] + extent.stop,
            )
            local_nbytes += extent.stop - extent.start
            for low, high, writer in volume.split_by_writer(
                file.name, *span, exclusive_range=span, rank=rank
            ):
                if not volume.same_node(rank, writer):
                    blocks += high - low
                    to.add(writer)
        for tile in group.rank_io.member_tiles:
            rank_nbytes = sum(
                (piece.stop - piece.start) // len(piece.members)
                for piece in tile.ranges
                if rank in piece.members
            )
            local_nbytes += rank_nbytes
            if not volume.same_node(rank, tile.io_rank):
                pieces += rank_nbytes
                movers.add(tile.io_rank)
        parties |= {
            party
            for tile in group.rank_io.io_tiles
            for party in tile.members
            if not volume.same_node(rank, party)
        }
    return {
        "held": local_nbytes,
        "sent_blocks": blocks,
        "sent_pieces": pieces,
        "sends_to": len(to | movers),
        "hears_from": len(parties),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,1024,16384")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for world in map(int, arguments.ranks.split(",")):
        declarations, rank, case = llama_job(world)
        groups = [
            plan_group(lay_out_group(member), rank=rank)
            for member in members_of(declarations, "stage1")
        ]
        nodes = tuple(index // RANKS_OF_A_NODE for index in range(world))
        for kind, block in BLOCKS.items():
            seconds = []
            for _ in range(RUNS):
                volume, began = WriteAlignment(nodes, block), time.perf_counter()
                volumes = sent(groups, volume, rank)
                seconds.append(time.perf_counter() - began)
            row = {"bench": "volume", **case, "volume": kind, **volumes}
            rows.append(
                {
                    **row,
                    "seconds": round(statistics.median(seconds), 4),
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

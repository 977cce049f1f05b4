"""What a rank sends to ranks of other nodes at a save to a folder that all see, by number of
ranks and kind of volume. Simulated: the plan of one rank of Llama 3.1 405B (weights, fp32 masters,
two moments), PP 4 x FSDP x TP 8, eight ranks a node; no tensors, no disk.

Run: python benchmarks/bench_volume.py [--ranks 64,1024] [--out FILE]. One JSON line per row: bytes
that the rank holds, bytes that it sends (blocks, and parts of tiles), to how many ranks, from how
many it may hear, and the seconds that it takes to find that out (median of 3).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_plan import BOUND, llama_job, members_of

from unified_ckpt.core.nodes.write_alignment import ANY_BYTE, WHOLE_FILES, WriteAlignment
from unified_ckpt.engine.plan.save_plan import GroupPlan, plan_group

BLOCKS = {"coherent": ANY_BYTE, "nfs": 1 << 20, "unknown": WHOLE_FILES}
RANKS_OF_A_NODE = 8
RUNS = 3


def sent(groups: list[GroupPlan], volume: WriteAlignment, rank: int) -> dict[str, Any]:
    """What one rank sends: blocks of its extents that another node writes, and its pieces of
    tiles that a rank elsewhere moves.
    """
    held = blocks = pieces = 0
    to: set[int] = set()
    movers: set[int] = set()
    parties: set[int] = set()
    for group in groups:
        for extent in group.rank_io.extents:
            file = group.files[group.file_by_decl[extent.decl_index]]
            span = (
                file.offsets[extent.decl_index] + extent.start,
                file.offsets[extent.decl_index] + extent.stop,
            )
            held += extent.stop - extent.start
            for low, high, writer in volume.split_by_writer(
                file.name, *span, exclusive_range=span, rank=rank
            ):
                if not volume.same_node(rank, writer):
                    blocks += high - low
                    to.add(writer)
        for tile in group.rank_io.member_tiles:
            own = sum(
                (piece.stop - piece.start) // len(piece.members)
                for piece in tile.ranges
                if rank in piece.members
            )
            held += own
            if not volume.same_node(rank, tile.io_rank):
                pieces += own
                movers.add(tile.io_rank)
        parties |= {
            party
            for tile in group.rank_io.io_tiles
            for party in tile.members
            if not volume.same_node(rank, party)
        }
    return {
        "held": held,
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
            plan_group(member, rank=rank, max_file_bytes=BOUND)
            for member in members_of(declarations, "stage1")
        ]
        nodes = tuple(one // RANKS_OF_A_NODE for one in range(world))
        for kind, block in BLOCKS.items():
            seconds = []
            for _ in range(RUNS):
                volume, began = WriteAlignment(nodes, block), time.perf_counter()
                found = sent(groups, volume, rank)
                seconds.append(time.perf_counter() - began)
            row = {"bench": "volume", **case, "volume": kind, **found}
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

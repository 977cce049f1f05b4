"""Measures what a save plan costs rank 0, and another rank, if ranks declare boxes of tensors.

Blocks that 512 ranks share as flat ranges, with replicas, as FSDP1 does; and embedding tables, of
which each rank has its own rows. The number of ranks is simulated: no tensors, no disk.

Run: python benchmarks/bench_boxes.py [--ranks 1024,16384] [--out FILE].
One JSON line per row. Of rank 0: CPU seconds, the bytes that it gathers, and all that it sends. Of
another rank: seconds as in bench_plan.py, and the bytes that it announces and receives.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from math import prod
from typing import Any

from bench_plan import RUNS, measured

from unified_ckpt.core.sharding.box_tables import (
    box_order,
    decode_boxes,
    decode_names,
    encode_boxes,
)
from unified_ckpt.core.sharding.boxes import Box, range_to_boxes
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, spec_of
from unified_ckpt.engine.plan.box_groups import (
    plan_box_group,
    read_box_membership,
    send_box_groups,
)
from unified_ckpt.engine.plan.holders import Declarations, Membership
from unified_ckpt.engine.plan.save_plan import checked_boxes, list_group_files

FLAT_LAYERS, FLAT_HOLDERS, TABLES = 80, 512, 16
FLAT_STATES = (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq"))


class Messages:
    """Stands in for a collective: rank 0 puts messages, and a rank gets its own."""

    rank = 0

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}

    def put(self, key: str, body: bytes) -> None:
        self.bodies[key] = body

    def put_json(self, key: str, value: object) -> None:
        self.put(key, json.dumps(value, separators=(",", ":")).encode())

    def get(self, key: str) -> bytes:
        return self.bodies[key]

    def get_json(self, key: str) -> Any:
        return json.loads(self.bodies[key])

    def heartbeat(self) -> None:
        pass


def flat_ranges(world: int, layers: int) -> dict[int, list[TensorDecl]]:
    """Return the boxes of each rank that differs: 512 ranks share each block of a model of 70B."""
    hidden, inner, kv = 8192, 28672, 1024
    shapes = {
        "q_proj": (hidden, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    holders = min(FLAT_HOLDERS, world)
    share = -(-sum(map(prod, shapes.values())) // holders)
    by_rank: dict[int, list[TensorDecl]] = {}
    for rank in range(holders):
        decls, start = [], 0
        for name, shape in shapes.items():
            low, high = (min(max(n * share - start, 0), prod(shape)) for n in (rank, rank + 1))
            for box in range_to_boxes(shape, low, high):
                decls += [
                    TensorDecl(part, f"model.layers.{layer}.{name}.weight{suffix}", spec, held)
                    for held in (Sharding(box=box),)
                    for spec in (spec_of("F32", shape),)
                    for layer in range(layers)
                    for part, suffix in FLAT_STATES
                ]
            start += prod(shape)
        by_rank[rank] = sorted(decls, key=box_order)
    return by_rank


def table_rows(world: int, tables: int) -> dict[int, list[TensorDecl]]:
    """Return the rows of each rank: tables of other lengths, cut where the loads are equal."""
    by_rank: dict[int, list[TensorDecl]] = {rank: [] for rank in range(world)}
    for table in range(tables):
        length = 100 * world + 37 * table
        cuts = [length * rank // world for rank in range(world + 1)]
        for suffix, width in (("", (128,)), ("/momentum", ())):
            spec = spec_of("F32", (length, *width))
            for rank, decls in by_rank.items():
                box = Box((cuts[rank], *(0 for _ in width)), (cuts[rank + 1] - cuts[rank], *width))
                name = f"sparse.ebc.embedding_bags.t_{table:03}.weight{suffix}"
                decls.append(TensorDecl("model", name, spec, Sharding(box=box)))
    return {rank: sorted(decls, key=box_order) for rank, decls in by_rank.items()}


def box_rows(
    case: dict[str, Any], by_rank: dict[int, list[TensorDecl]], world: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of rank 0, and of another rank, of a save in which ranks declare boxes."""
    encoded = {rank: encode_boxes(decls) for rank, decls in by_rank.items()}
    ranks = {str(n): list(range(n, world, len(by_rank))) for n in by_rank}
    bodies = {body for pair in encoded.values() for body in pair}
    messages = Messages()

    def gather() -> Declarations:
        names = {names: decode_names(names) for names in {names for names, _ in encoded.values()}}
        tables = {str(n): decode_boxes(names[pair[0]], pair[1]) for n, pair in encoded.items()}
        return Declarations({}, {}, tables, ranks)

    def plan() -> None:
        declarations = gather()
        box_plan = checked_boxes(declarations)
        files, _ = list_group_files(
            [], declarations, box_groups=box_plan.groups, max_file_bytes=None
        )
        groups = [Membership(f.group.index, f.holders, f.group.decls, f.group_info) for f in files]
        send_box_groups(messages, box_plan, ranks, groups)  # type: ignore[arg-type]

    started = time.process_time()
    plan()
    yield {
        "bench": "plan",
        **case,
        "who": "rank 0",
        "boxes": sum(map(len, by_rank.values())),
        "cpu_seconds": round(time.process_time() - started, 4),
        "gathered_bytes": sum(map(len, bodies)),
        "sent_bytes": sum(map(len, messages.bodies.values())),
    }
    rank = len(by_rank) // 3
    messages.rank = rank
    group = next(body for key, body in messages.bodies.items() if key.startswith("box-group"))

    def plan_own() -> None:
        encode_boxes(by_rank[rank])
        plan_box_group(read_box_membership(messages, by_rank[rank]))  # type: ignore[arg-type]

    columns = {
        "boxes": len(by_rank[rank]),
        "announced_bytes": sum(map(len, encoded[rank])),
        "received_bytes": len(group) + len(messages.bodies[f"boxes/{rank}"]),
    }
    yield measured({**case, "who": "one rank", **columns}, plan_own, repeats=RUNS)


def measure_boxes(world: int, *, layers: int, tables: int) -> list[dict[str, Any]]:
    """Return the rows of all cases with boxes."""
    rows = list[dict[str, Any]]()
    flat = {"model": "flat-70b", "mesh": f"{FLAT_HOLDERS} holders", "ranks": world}
    rows += box_rows(flat, flat_ranges(world, layers), world)
    case = {"model": f"{tables} tables", "mesh": "rows", "ranks": world}
    rows += box_rows(case, table_rows(world, tables), world)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1024,16384", help="comma-separated")
    parser.add_argument("--layers", type=int, default=FLAT_LAYERS)
    parser.add_argument("--tables", type=int, default=TABLES)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    for world in map(int, options.ranks.split(",")):
        rows += measure_boxes(world, layers=options.layers, tables=options.tables)
        print(*map(json.dumps, rows[-4:]), sep="\n", flush=True)
    if options.out:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        with open(options.out, "w") as file:
            file.writelines(json.dumps({**row, "date": date}) + "\n" for row in rows)


if __name__ == "__main__":
    main()

"""Measure what rank 0 of a load computes: which ranks of each node want the same tensors.

Run: python benchmarks/bench_load_plan.py [--nodes 64,2048] [--out FILE].

Nodes have 8 ranks. The models are Llama 3.1 405B, where every rank has the same names, and a
mixture of experts, where each of 64 ranks in turn has experts of its own. One JSON line per row:
seconds (median of 5 runs), peak memory by tracemalloc in a separate run, bytes that go into the
store. No tensors, disk or network.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from functools import partial
from typing import Any

from bench_plan import LLAMA_LAYERS, MOE_LAYERS, PP, add_scale, llama_405b, measured, moe

from unified_ckpt.engine.load.share_reads import read_redundancy
from unified_ckpt.engine.plan.holders import Declarations, send_groups_by_node

RANKS, EXPERT_GROUPS = 8, 64


class Store:
    """Counts the bytes that go into the store."""

    def __init__(self) -> None:
        self.nbytes = 0

    def put(self, _key: str, value: bytes) -> None:
        self.nbytes += len(value)

    def heartbeat(self) -> None:
        """No rank waits."""


def declarations_of(model: str, nodes: int, layers: int | None) -> Declarations:
    world = RANKS * nodes
    if model == "llama-405b":
        every = {
            row.key: row
            for stage in range(PP)
            for row in llama_405b(stage, nodes, layers=layers or LLAMA_LAYERS)
        }
        return Declarations(
            {"all": sorted(every.values(), key=lambda row: row.key)}, {"all": list(range(world))}
        )
    tables = {
        f"ep{group}": moe(group, EXPERT_GROUPS, layers=layers or MOE_LAYERS)
        for group in range(EXPERT_GROUPS)
    }
    return Declarations(
        tables,
        {name: list(range(group, world, EXPERT_GROUPS)) for group, name in enumerate(tables)},
    )


def rank_0(declarations: Declarations, nodes: list[int]) -> int:
    store: Any = Store()
    read_redundancy(declarations, nodes)
    send_groups_by_node(store, declarations, nodes)
    return int(store.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="64,512,2048")
    add_scale(parser)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    for model in ("llama-405b", "moe"):
        for count in map(int, options.nodes.split(",")):
            declarations, nodes = (
                declarations_of(model, count, options.layers),
                [rank // RANKS for rank in range(RANKS * count)],
            )
            case = {
                "model": model,
                "nodes": count,
                "ranks": len(nodes),
                "tables": len(declarations.tables),
            }
            case |= {
                "rows_in_tables": sum(map(len, declarations.tables.values())),
                "told_bytes": rank_0(declarations, nodes),
            }
            act = partial(rank_0, declarations, nodes)
            measure = measured({**case, "who": "rank 0"}, act, repeats=options.repeats)
            rows.append(
                {
                    **measure,
                    "bench": "load plan",
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    if options.out:
        with open(options.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()

"""Simulates a save of Llama 3.1 405B to a bucket: parts, who uploads them, what crosses nodes.

The number of ranks is simulated: no tensors, no requests. A save has bfloat16 parameters, float32
masters and two moments: 5.7 TB in 1,470 files. Nodes have 8 ranks.

Run: python benchmarks/bench_parts.py [--meshes 16x1x128x8,…] [--layers 126] [--out FILE].
A mesh is pipeline stages x replicas x FSDP ranks x TP ranks. One JSON line per mesh: parts, parts
of a rank, bytes of the most loaded rank over the mean, the share of bytes that ranks get from their
own node and from others, requests and dollars; and, the most of some ranks, the partners in tiles
and the CPU seconds of the plan. `load` is the machine's meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from bench_plan import forget, rows_of

from unified_ckpt.core.planning import part_segments
from unified_ckpt.core.planning.part_grid import GroupParts
from unified_ckpt.core.planning.part_owners import assign_owners
from unified_ckpt.core.planning.part_segments import Numbers
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim
from unified_ckpt.engine.plan.file_layout import lay_out_group
from unified_ckpt.engine.plan.group_parts import group_parts
from unified_ckpt.engine.plan.group_plan import GroupPlan, plan_group
from unified_ckpt.engine.plan.holders import Declarations, Membership
from unified_ckpt.engine.plan.save_plan import checked_groups, list_group_files

MESHES = "16x1x128x8,16x8x16x8,1x64x256x1,1x1x2048x1,1x1x8x8"
LAYERS, RANKS_PER_NODE = 126, 8
SMALLEST_PART_NBYTES = 8 << 20
DOLLARS_PER_PUT = 0.005 / 1000  # S3 Standard, us-east-1; also for begin and complete
PUTS_PER_SECOND = 3500  # of a prefix that S3 has not split yet
OTHER_REQUESTS = 30  # manifest, indexes, records: a few for each save
SAMPLED_RANKS = 4


@dataclass(frozen=True)
class Mesh:
    """The mesh of a job; ranks are ordered by stage, replica, FSDP rank, TP rank."""

    stages: int
    replicas: int
    fsdp: int
    tp: int

    @property
    def world(self) -> int:
        return self.stages * self.stage_world

    @property
    def stage_world(self) -> int:
        return self.replicas * self.fsdp * self.tp

    def shardings(self) -> dict[str, tuple[ShardDim, ...]]:
        """The shard dims of column-parallel and row-parallel matrices, and of norms."""
        dp = ShardDim(0, self.fsdp, self.tp, name="dp")
        if self.tp == 1:
            return dict.fromkeys(("column", "row", "norm"), (dp,))
        column, row = (ShardDim(dim, self.tp, 1, name="tp") for dim in (0, 1))
        return {"column": (column, dp), "row": (row, dp), "norm": (dp,)}


def stage_decls(mesh: Mesh, stage: int, layers: int) -> list[TensorDecl]:
    """Return the tensors of a pipeline stage."""
    hidden, inner, kv, vocab = 16384, 53248, 1024, 128256
    shapes = {
        "self_attn.q_proj": ((hidden, hidden), "column"),
        "self_attn.k_proj": ((kv, hidden), "column"),
        "self_attn.v_proj": ((kv, hidden), "column"),
        "self_attn.o_proj": ((hidden, hidden), "row"),
        "mlp.gate_proj": ((inner, hidden), "column"),
        "mlp.up_proj": ((inner, hidden), "column"),
        "mlp.down_proj": ((hidden, inner), "row"),
        "input_layernorm": ((hidden,), "norm"),
        "post_attention_layernorm": ((hidden,), "norm"),
    }
    dims, decls = mesh.shardings(), list[TensorDecl]()
    for layer in range(layers * stage // mesh.stages, layers * (stage + 1) // mesh.stages):
        for name, (shape, kind) in shapes.items():
            decls += rows_of(f"model.layers.{layer}.{name}.weight", shape, dims[kind])
    if stage == 0:
        decls += rows_of("model.embed_tokens.weight", (vocab, hidden), dims["column"])
    if stage == mesh.stages - 1:
        decls += rows_of("model.norm.weight", (hidden,), dims["norm"])
        decls += rows_of("lm_head.weight", (vocab, hidden), dims["column"])
    return sorted(decls, key=lambda decl: decl.key)


def forget_parts() -> None:
    """Clear the planner's caches: they hold what the call for another rank computed."""
    forget()
    part_segments._segment_table.cache_clear()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, in fresh caches, and its CPU seconds."""
    forget_parts()
    gc.disable()  # as in a save
    try:
        started = time.process_time()
        result = call()
        return result, time.process_time() - started
    finally:
        gc.enable()


def source_nodes(group: GroupParts, owners: Numbers) -> tuple[int, int, int]:
    """Return the bytes that owners have, get from their node, and get from other nodes."""
    holders = np.array(group.holders)
    own = near = far = 0
    for number, file in enumerate(group.files):
        for stored_index, start in zip(file.stored_indices, file.starts, strict=True):
            decl_index = group.stored[stored_index].decl_index
            nbytes = group.decls[decl_index].spec.nbytes
            if not nbytes:
                continue
            table, part = group.segments_of(stored_index), group.part_nbytes
            first, last = start // part, (start + nbytes - 1) // part
            borders = np.arange(first + 1, last + 1) * part - start
            starts = np.unique(np.concatenate([np.array(table.starts), borders]))
            sizes = np.diff(starts, append=nbytes)
            owner = owners[group.first_parts[number] + (start + starts) // part]
            segment = np.searchsorted(table.starts, starts, side="right") - 1
            origin = group.source_replica(decl_index) + table.offsets[segment]
            ranks = origin[:, None] + table.inner_offsets  # meshes are in the order of ranks
            shares = (sizes / ranks.shape[1])[:, None] + np.zeros(ranks.shape)
            to = holders[owner][:, None]
            is_own, is_near = ranks == to, ranks // RANKS_PER_NODE == to // RANKS_PER_NODE
            own += int(shares[is_own].sum())
            near += int(shares[is_near & ~is_own].sum())
            far += int(shares[~is_near].sum())
    return own, near, far


def simulate(mesh: Mesh, layers: int) -> dict[str, Any]:
    """Plan a save by all ranks of a mesh."""
    load = os.getloadavg()[0]
    tables = {f"stage{n}": stage_decls(mesh, n, layers) for n in range(mesh.stages)}
    ranks_by_table = {
        f"stage{n}": list(range(n * mesh.stage_world, (n + 1) * mesh.stage_world))
        for n in range(mesh.stages)
    }
    declarations = Declarations(tables, ranks_by_table)
    (group_files, _), listed_seconds = timed(
        lambda: list_group_files(
            checked_groups(declarations),
            declarations,
            max_file_bytes=None,
            smallest_part_nbytes=SMALLEST_PART_NBYTES,
        )
    )
    loads, counts = np.zeros(mesh.world, np.int64), np.zeros(mesh.world, np.int64)
    sources, file_count, part_nbytes = np.zeros(3, np.int64), 0, 0
    rank_seconds, partners = list[float](), list[int]()
    for files in group_files:
        member = Membership(files.group.index, files.holders, files.group.decls, files.group_info)
        layout = lay_out_group(member)
        parts = group_parts(layout)
        owners = assign_owners(parts)
        holders = np.array(layout.holders)
        ranges = (parts.part_range(index) for index in range(len(owners)))
        np.add.at(loads, holders[owners], [stop - start for _, start, stop in ranges])
        np.add.at(counts, holders[owners], 1)
        sources += source_nodes(parts, owners)
        file_count, part_nbytes = file_count + len(layout.files), parts.part_nbytes
        for rank in holders[:: max(len(holders) // SAMPLED_RANKS, 1)][:SAMPLED_RANKS].tolist():
            group_plan, seconds = timed(partial(plan, member, rank))
            rank_seconds.append(seconds)
            partners.append(len(group_plan.rank_io.partners(rank)))
    puts = int(counts.sum()) + 2 * file_count + OTHER_REQUESTS
    return {
        "bench": "parts",
        "mesh": f"{mesh.stages}x{mesh.replicas}x{mesh.fsdp}x{mesh.tp}",
        "ranks": mesh.world,
        "bytes": int(loads.sum()),
        "files": file_count,
        "part_mib": part_nbytes >> 20,
        "parts": int(counts.sum()),
        "least_parts": int(counts.min()),
        "most_parts": int(counts.max()),
        "peak_over_mean": round(float(loads.max() / loads.mean()), 3),
        "from_own_rank": round(float(sources[0] / sources.sum()), 3),
        "from_own_node": round(float(sources[1] / sources.sum()), 3),
        "from_other_nodes": round(float(sources[2] / sources.sum()), 3),
        "partners": max(partners),
        "put_requests": puts,
        "dollars": round(puts * DOLLARS_PER_PUT, 3),
        "seconds_at_3500": round(puts / PUTS_PER_SECOND, 1),
        "first_rank_cpu_seconds": round(listed_seconds, 2),
        "rank_cpu_seconds": round(max(rank_seconds), 2),
        "load": round(load, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def plan(member: Membership, rank: int) -> GroupPlan:
    """Do the work of a rank for a group."""
    return plan_group(lay_out_group(member), rank=rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--meshes", default=MESHES)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out")
    options = parser.parse_args()
    for sizes in options.meshes.split(","):
        row = json.dumps(simulate(Mesh(*map(int, sizes.split("x"))), options.layers))
        print(row, flush=True)
        if options.out:
            with open(options.out, "a") as file:
                file.write(row + "\n")


if __name__ == "__main__":
    main()

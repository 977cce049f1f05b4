"""Measures what a save plan costs one rank, and the rank that writes index and manifest.

The number of ranks is simulated: no tensors, no disk.

Run: python benchmarks/bench_plan.py [--ranks 64,1024] [--compression O2] [--out FILE].
One JSON line per row: seconds (median of the runs, each in fresh caches), peak memory by
tracemalloc in a run of its own, bytes that the rank announces. `--compression`: of the 405B model.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, get_args

from unified_ckpt.core.planning import replica_ranks, slabs
from unified_ckpt.core.sharding import shardings
from unified_ckpt.core.sharding.declarations import TensorDecl, encode_table
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.plan.file_layout import group_file_name, lay_out_group
from unified_ckpt.engine.plan.group_plan import plan_group
from unified_ckpt.engine.plan.holders import Declarations, Membership
from unified_ckpt.engine.plan.save_plan import (
    build_global_plan,
    checked_groups,
    list_group_files,
)
from unified_ckpt.format.encoded_tensors import Compression, choose_encodings
from unified_ckpt.format.index import encode_index
from unified_ckpt.format.manifest import Manifest, Part, encode_manifest
from unified_ckpt.format.manifest_fields import IndexFile

TP, PP = 8, 4
RUNS = 5
LLAMA_LAYERS, MOE_LAYERS = 126, 61
STATES = (
    ("master_weights", "F32", ""),
    ("optimizer", "F32", "/exp_avg"),
    ("optimizer", "F32", "/exp_avg_sq"),
)


def forget() -> None:
    """Empty the planner's caches, so that each run is a first save."""
    for function in (
        slabs.choose_granularity,
        slabs.unexchanged_granularity,
        slabs.segments,
        slabs.segments_nbytes,
        slabs.slab_boxes,
        shardings._intervals,
        shardings._positions,
        replica_ranks.ranks_along,
    ):
        function.cache_clear()
    gc.collect()


def rows_of(fqn: str, shape: tuple[int, ...], cuts: tuple[ShardDim, ...]) -> list[TensorDecl]:
    """A parameter in bf16, its fp32 master, two moments and a step."""
    whole = Sharding(cuts)
    rows = [TensorDecl("model", fqn, TensorSpec("BF16", shape), whole)]
    rows += [
        TensorDecl(part, fqn + suffix, TensorSpec(dtype, shape), whole)
        for part, dtype, suffix in STATES
    ]
    return [*rows, TensorDecl("optimizer", fqn + "/step", TensorSpec("F32", ()), Sharding())]


def llama_405b(stage: int, fsdp: int, *, layers: int = LLAMA_LAYERS) -> list[TensorDecl]:
    """Return the rows of one pipeline stage of Llama 3.1 405B.

    FSDP2 over TP; ranks are ordered (pp, fsdp, tp).
    """
    hidden, inner, kv, vocab = 16384, 53248, 1024, 128256
    tp, dp = ShardDim(0, TP, 1, name="tp"), ShardDim(0, fsdp, TP, name="dp")
    column, row, norm = (tp, dp), (ShardDim(1, TP, 1, name="tp"), dp), (dp,)
    if fsdp == 1:
        column, row, norm = (tp,), (ShardDim(1, TP, 1, name="tp"),), ()
    shapes = {
        "self_attn.q_proj": ((hidden, hidden), column),
        "self_attn.k_proj": ((kv, hidden), column),
        "self_attn.v_proj": ((kv, hidden), column),
        "self_attn.o_proj": ((hidden, hidden), row),
        "mlp.gate_proj": ((inner, hidden), column),
        "mlp.up_proj": ((inner, hidden), column),
        "mlp.down_proj": ((hidden, inner), row),
        "input_layernorm": ((hidden,), norm),
        "post_attention_layernorm": ((hidden,), norm),
    }
    decls = []
    for layer in range(layers * stage // PP, layers * (stage + 1) // PP):
        for name, (shape, cuts) in shapes.items():
            decls += rows_of(f"model.layers.{layer}.{name}.weight", shape, cuts)
    if stage == 0:
        decls += rows_of("model.embed_tokens.weight", (vocab, hidden), column)
    if stage == PP - 1:
        decls += rows_of("model.norm.weight", (hidden,), norm) + rows_of(
            "lm_head.weight", (vocab, hidden), column
        )
    return sorted(decls, key=lambda r: r.key)


def encoded(decls: list[TensorDecl], compression: Compression) -> list[TensorDecl]:
    """Return declarations with the encodings that a save chooses."""
    chosen = choose_encodings({decl.key: decl.spec for decl in decls}, compression)
    return [
        decl._replace(encoding=chosen[decl.key].name) if decl.key in chosen else decl
        for decl in decls
    ]


def moe(expert_group: int, groups: int, *, layers: int = MOE_LAYERS) -> list[TensorDecl]:
    """Return a rank's rows of a mixture of experts with 256 experts in each layer.

    Its own experts are listed by name, then what all ranks share.
    """
    hidden, inner = 7168, 2048
    decls = []
    for layer in range(layers):
        for expert in range(256 * expert_group // groups, 256 * (expert_group + 1) // groups):
            for name, shape in (
                ("gate_proj", (inner, hidden)),
                ("up_proj", (inner, hidden)),
                ("down_proj", (hidden, inner)),
            ):
                decls += rows_of(
                    f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", shape, ()
                )
        decls += rows_of(
            f"model.layers.{layer}.self_attn.o_proj.weight",
            (hidden, 16384),
            (ShardDim(0, groups, 1, name="dp"),),
        )
    return sorted(decls, key=lambda r: r.key)


def measured(
    columns: dict[str, Any], call: Callable[[], Any], *, repeats: int = RUNS
) -> dict[str, Any]:
    """Time a call, then run it once more for its peak memory."""
    seconds = []
    for _ in range(repeats):
        forget()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    forget()
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    times = {
        "seconds": round(statistics.median(seconds), 4),
        "min": round(min(seconds), 4),
        "max": round(max(seconds), 4),
        "n": repeats,
    }
    return {"bench": "plan", **columns, **times, "peak_bytes": peak}


def declarations_of(
    tables: dict[str, list[TensorDecl]], ranks: dict[str, list[int]]
) -> Declarations:
    return Declarations(tables, ranks)


def llama_job(
    world: int, *, layers: int = LLAMA_LAYERS, compression: Compression = "none"
) -> tuple[Declarations, int, dict[str, Any]]:
    """Return rank 0's declarations of the 405B model, a rank of stage 1, and columns of the job."""
    fsdp = world // (TP * PP)
    tables = {
        f"stage{s}": encoded(llama_405b(s, fsdp, layers=layers), compression) for s in range(PP)
    }
    ranks = {f"stage{s}": list(range(s * world // PP, (s + 1) * world // PP)) for s in range(PP)}
    case = {"model": "llama-405b", "mesh": f"pp{PP} fsdp{fsdp} tp{TP}", "ranks": world}
    case |= {"compression": compression}
    return declarations_of(tables, ranks), ranks["stage1"][len(ranks["stage1"]) // 3], case


def members_of(declarations: Declarations, table: str) -> list[Membership]:
    """Return what rank 0 sends to the ranks of a table."""
    plans, _ = list_group_files(checked_groups(declarations), declarations, max_file_bytes=None)
    return [
        Membership(p.group.index, p.holders, p.group.decls, p.group_info)
        for p in plans
        if table in p.group.table_ids and p.group_info
    ]


def rank_planner(declarations: Declarations, table: str, rank: int) -> Callable[[], object]:
    """Do the work of a rank: encode its table, and plan the groups that rank 0 sent."""
    members = members_of(declarations, table)

    def call() -> object:
        encode_table(declarations.tables[table])
        return [plan_group(lay_out_group(member), rank=rank) for member in members]

    return call


def writer(declarations: Declarations) -> Callable[[], object]:
    """Do the further work of rank 0: all groups, the global plan, the indexes and the manifest."""

    def call() -> object:
        plans, digest_head = list_group_files(
            checked_groups(declarations), declarations, max_file_bytes=None
        )
        files = {name for plan in plans for name in names_in(plan)}
        global_plan = build_global_plan(plans, dict.fromkeys(files, (8, "0" * 16)), digest_head)
        indexes = {
            part: IndexFile.from_bytes(
                encode_index(total_size=global_plan.tensors.nbytes[part], weight_map=weight_map)
            )
            for part, weight_map in global_plan.tensors.weight_maps.items()
        }
        parts = {
            part: Part(
                files=dict(global_plan.tensors.records[part]),
                index=indexes.get(part),
                total_nbytes=global_plan.tensors.nbytes[part],
                aliases={},
                encodings=dict(global_plan.tensors.encodings.get(part, {})),
            )
            for part in sorted(global_plan.tensors.records)
        }
        created = "2026-01-01T00:00:00+00:00"
        manifest = Manifest(save_id="bench", step=0, created=created, world_size=1, parts=parts)
        return encode_manifest(manifest)

    return call


def names_in(plan: Any) -> list[str]:
    return [group_file_name(file, plan.group_info) for file in plan.files]


def add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=RUNS)
    parser.add_argument(
        "--layers",
        type=int,
        help=f"of each model, in place of its own {LLAMA_LAYERS} or {MOE_LAYERS}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks",
        default="64,1024,16384",
        help="of the 405B model, comma-separated multiples of 64",
    )
    add_scale(parser)
    parser.add_argument("--compression", default="none", choices=get_args(Compression))
    parser.add_argument("--out")
    options = parser.parse_args()
    repeats = options.repeats
    rows = []
    for world in map(int, options.ranks.split(",")):
        declarations, rank, case = llama_job(
            world, layers=options.layers or LLAMA_LAYERS, compression=options.compression
        )
        stage = declarations.tables["stage1"]
        columns = {
            **case,
            "who": "one rank",
            "tensors": len(stage),
            "announced_bytes": len(encode_table(stage)),
        }
        rows.append(measured(columns, rank_planner(declarations, "stage1", rank), repeats=repeats))
        total = sum(len(table) for table in declarations.tables.values())
        rows.append(
            measured(
                {**case, "who": "writer of index and manifest", "tensors": total},
                writer(declarations),
                repeats=repeats,
            )
        )
        print(json.dumps(rows[-2]), json.dumps(rows[-1]), sep="\n", flush=True)
    groups = 64
    tables = {f"ep{g}": moe(g, groups, layers=options.layers or MOE_LAYERS) for g in range(groups)}
    declarations = declarations_of(tables, {f"ep{g}": [g] for g in range(groups)})
    distinct = sum(len(g.decls) for g in checked_groups(declarations))
    case = {"model": "moe", "mesh": f"ep{groups}", "ranks": groups}
    rows.append(
        measured(
            {**case, "who": "one rank", "tensors": len(tables["ep5"])},
            rank_planner(declarations, "ep5", 5),
            repeats=repeats,
        )
    )
    rows.append(
        measured(
            {**case, "who": "writer of index and manifest", "tensors": distinct},
            writer(declarations),
            repeats=repeats,
        )
    )
    print(json.dumps(rows[-2]), json.dumps(rows[-1]), sep="\n", flush=True)
    if options.out:
        with open(options.out, "w") as file:
            file.writelines(
                json.dumps({**row, "date": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n"
                for row in rows
            )


if __name__ == "__main__":
    main()

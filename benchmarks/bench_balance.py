"""Counts how many bytes of a save each rank writes, where ranks hold replicas.

The number of ranks is simulated: no tensors, no disk. One JSON line per row: the mean bytes of a
rank, and those of the busiest over the mean. States have float32 masters and two moments.

Run: python benchmarks/bench_balance.py [--state "GPT-2 124M"] [--out FILE].
"""

from __future__ import annotations

import argparse
from collections import Counter

from common import write_rows

from unified_ckpt.core.planning.split_files import file_limits
from unified_ckpt.core.planning.write_plan import StoredTensor, plan_files, plan_writes
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec

Shape = tuple[int, ...]
HEADER_NBYTES = 5_000
STATES = (
    ("model", "BF16", ""),
    ("master_weights", "F32", ""),
    ("optimizer", "F32", "/exp_avg"),
    ("optimizer", "F32", "/exp_avg_sq"),
)


def llama(layers: int, hidden: int, inner: int, kv: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = dict.fromkeys(("embed_tokens", "lm_head"), (128256, hidden))
    for n in range(layers):
        shapes |= {f"{n:02}.{name}": (hidden, hidden) for name in ("q", "o")}
        shapes |= {f"{n:02}.{name}": (kv, hidden) for name in ("k", "v")}
        shapes |= {f"{n:02}.{name}": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{n:02}.down": (hidden, inner), f"{n:02}.norm": (hidden,)}
    return shapes


def gpt2() -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"wte": (50257, 768), "wpe": (1024, 768)}
    for n in range(12):
        shapes |= {f"{n:02}.qkv": (2304, 768), f"{n:02}.out": (768, 768)}
        shapes |= {f"{n:02}.fc": (3072, 768), f"{n:02}.proj": (768, 3072), f"{n:02}.norm": (768,)}
    return shapes


def tables() -> dict[str, Shape]:
    rows = (10_000_000, 2_000_000, 500_000, 100_000, 50_000, 10_000)
    return {f"table{n}": (count, 64) for n, count in enumerate(rows)}


def shard_dims(name: str, shape: Shape, *, fsdp: int, tp: int) -> tuple[ShardDim, ...]:
    """Return the rule of a parameter; ranks are ordered (replica, fsdp, tp)."""
    dims = (ShardDim(1 if name.endswith((".o", ".down")) else 0, tp, 1),) * (len(shape) > 1)
    return (dims if tp > 1 else ()) + (ShardDim(0, fsdp, tp),) * (fsdp > 1)


def bytes_by_rank(shapes: dict[str, Shape], *, world: int, fsdp: int, tp: int) -> list[int]:
    decls = [
        TensorDecl(
            part,
            name + suffix,
            TensorSpec(dtype, shape),
            Sharding(shard_dims(name, shape, fsdp=fsdp, tp=tp)),
        )
        for name, shape in shapes.items()
        for part, dtype, suffix in STATES
    ]
    decls.sort(key=lambda decl: decl.key)
    stored = [StoredTensor(n, *decl.key, decl.spec) for n, decl in enumerate(decls)]
    limits = file_limits(((each.part, each.spec.nbytes) for each in stored), max_file_bytes=None)
    holders = tuple(range(world))
    files = plan_files(stored, holders=holders, limits=limits)
    headers, nbytes = dict.fromkeys(range(len(files)), HEADER_NBYTES), Counter[int]()
    for rank in holders:
        plan = plan_writes(
            decls, stored, holders=holders, files=files, header_nbytes=headers, rank=rank
        )
        nbytes[rank] += sum(extent.stop - extent.start for extent in plan.extents)
        nbytes[rank] += sum(r.stop - r.start for tile in plan.io_tiles for r in tile.ranges)
    return [nbytes[rank] for rank in holders]


# State, shapes, FSDP ranks, TP ranks, numbers of replicas.
JOBS = [
    ("Llama 8B", llama(32, 4096, 14336, 1024), 1, 1, (2, 8, 32)),
    ("Llama 1B", llama(16, 2048, 8192, 512), 1, 1, (2, 8, 32)),
    ("GPT-2 124M", gpt2(), 1, 1, (2, 8, 32)),
    ("embedding tables", tables(), 1, 1, (2, 8, 32)),
    ("Llama 8B", llama(32, 4096, 14336, 1024), 8, 1, (2, 8)),
    ("Llama 8B", llama(32, 4096, 14336, 1024), 1, 8, (2, 8)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", help="only this one")
    parser.add_argument("--out")
    options = parser.parse_args()
    jobs = (job for job in JOBS if options.state in (None, job[0]))
    for state, shapes, fsdp, tp, counts in jobs:
        for replicas in counts:
            nbytes = bytes_by_rank(shapes, world=fsdp * tp * replicas, fsdp=fsdp, tp=tp)
            mean = sum(nbytes) / len(nbytes)
            row = {"bench": "balance", "state": state, "fsdp": fsdp, "tp": tp}
            row |= {"replicas": replicas, "mean_bytes": round(mean)}
            write_rows([row | {"busiest": round(max(nbytes) / mean, 2)}], options.out)


if __name__ == "__main__":
    main()

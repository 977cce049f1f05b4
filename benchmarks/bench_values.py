"""Measures what it costs to compare values beside tensors, on one rank and on rank 0.

The number of ranks is simulated: bodies of many ranks are merged in one process.

Run: python benchmarks/bench_values.py [--ranks 16384] [--parameters 200000] [--out FILE].
One JSON line per row. `encode_seconds`: of each rank at each save. `merge_seconds`: of rank 0.
`load_seconds`: of a rank that looks up its values in the manifest. Minima of the runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from unified_ckpt.engine.source.value_paths import RankValues
from unified_ckpt.engine.values.caller_extra import encode_extra
from unified_ckpt.engine.values.encode_values import EncodedValues, encode_state
from unified_ckpt.engine.values.merge_values import ParsedValues, merge_values
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.optimizers import FlatOptimizer

RUNS = 5


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the shortest time of the runs, and the last result."""
    best, result = float("inf"), None
    for _ in range(RUNS):
        started = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - started)
    return round(best, 4), result


def optimizer_of(count: int) -> FlatOptimizer:
    """An AdamW with one param group."""
    names = [f"model.layers.{n // 100}.block.{n % 100}.weight" for n in range(count)]
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return FlatOptimizer(groups=[{"names": names, "options": options, "optimizer": "AdamW"}])


def extra_of(rank: int) -> dict[str, Any]:
    """A scheduler, a data position and a random state."""
    scheduler = {"base_lrs": [1e-4], "last_epoch": 7, "_step_count": 8}
    loader = {"position": rank, "epoch": 3, "state": torch.full((128,), rank)}
    return {"scheduler": scheduler, "loader": loader, "seen": 12345}


def encode(optimizer: FlatOptimizer, extra: Any) -> list[EncodedValues]:
    """Encode the values of one rank, as a background save does."""
    caller_extra = encode_extra(extra, None, copy=False)
    state = FlatState(optimizer=optimizer)
    return encode_state(state, caller_extra, with_optimizer=True, copies_nbytes=64 << 20)


def measure(ranks: int, parameters: int, *, differs: bool) -> dict[str, Any]:
    """One row."""
    optimizer = optimizer_of(parameters)
    encode_seconds, _ = seconds(lambda: encode(optimizer, extra_of(0)))
    shared = encode(optimizer, None)[1:]
    values = [([*range(ranks)], item) for item in shared]
    for rank in range(ranks) if differs else [0]:
        held = [rank] if differs else [*range(ranks)]
        values.append((held, encode(FlatOptimizer(), extra_of(rank))[0]))
    started = time.perf_counter()
    merge_ = merge_values([ParsedValues.parse(held, item.body) for held, item in values])
    merge_.check(allow_differing=True)
    blobs_by_rank = {held[0]: item.blobs for held, item in values[2:]}
    needed = merge_.needed_blobs()
    merged = merge_.decode(
        [
            blobs_by_rank[state.ranks[0]] if names else {}
            for state, names in zip(merge_.states, needed, strict=True)
        ]
    )
    merge_seconds = round(time.perf_counter() - started, 4)
    entries = merged.rank_entries.entries
    rank_values = RankValues(
        merged.rank_entries.paths, [[(held[0], held[-1] + 1)] for held, _ in entries], ranks
    )
    load_seconds, _ = seconds(lambda: rank_values.entries(ranks - 1))
    return {
        "bench": "values",
        "ranks": ranks,
        "parameters": parameters,
        "differs": differs,
        "body_nbytes": [len(item.body) for item in encode(optimizer, extra_of(0))],
        "encode_seconds": encode_seconds,
        "merge_seconds": merge_seconds,
        "entries": len(entries),
        "entries_nbytes": sum(len(body) for _, body in entries),
        "load_seconds": load_seconds,
    }


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--parameters", type=int, default=200_000)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    for parameters in (1000, arguments.parameters):
        for differs in (False, True):
            row = json.dumps(measure(arguments.ranks, parameters, differs=differs))
            print(row, flush=True)
            if arguments.out:
                with open(arguments.out, "a") as file:
                    file.write(row + "\n")


if __name__ == "__main__":
    main()

"""Measure what comparing replicas costs a save: of many small tensors, and of many ranks.

Run: python benchmarks/bench_replicas.py [--tensors 200000] [--saved 20000] [--ranks 2,8]
[--many 1024,16384] [--repeats 5] [--out FILE].

Every rank is a thread with the same small tensors. `digest`: milliseconds of CPU time of one rank
for 10,000 tensors, which training waits for; the minimum of the rounds and ranks. `exchange`:
milliseconds from the first rank's digest to the last rank's answer, all ranks on one machine.
`save`: seconds of a save of all ranks with a cached plan, with and without the comparison.
`rank 0`: its work for that many ranks, of which only the messages exist.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import write_rows
from torch._C._distributed_c10d import HashStore

import unified_ckpt as uc
from unified_ckpt.checkpointer import Checkpointer
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, spec_of
from unified_ckpt.engine.plan.holders import Membership
from unified_ckpt.engine.plan.replica_sets import plan_replicas
from unified_ckpt.engine.save.replica_check import ReplicaCheck, ReplicaDigests
from unified_ckpt.engine.save.write.snapshot import SnapshotMemory
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.key_store import KeyStore
from unified_ckpt.runtime.exchange.probe_topology import Topologies
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

SHAPES: dict[str, tuple[int, ...]] = {
    "one element": (),
    "16 elements": (16,),
    "8 x 4": (8, 4),
    "2048 elements": (2048,),
}


def on_ranks(world: int, act: Callable[[Comm], Any]) -> list[Any]:
    """Return what each rank returns; ranks are threads."""
    store, results = HashStore(), [None] * world

    def run(rank: int) -> None:
        results[rank] = act(Comm(store, rank=rank, ranks=range(world)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def compare(shape: tuple[int, ...], tensors: int, world: int, repeats: int) -> dict[str, Any]:
    """Digest and compare tensors that all ranks hold."""
    values = [torch.full(shape, float(number)) for number in range(tensors)]
    local = [
        LocalTensor(
            TensorDecl("model", f"layers.{n:06}.w", spec_of("F32", shape), Sharding()), value
        )
        for n, value in enumerate(values)
    ]
    decls = tuple(tensor.decl for tensor in local)
    state = FlatState(tensors=local, requested_parts={"model"})

    def act(comm: Comm) -> tuple[list[float], list[float]]:
        group = Membership(0, tuple(range(world)), decls, {})
        sets = plan_replicas([group], local, state, rank=comm.rank)
        digest, exchange, memory = list[float](), list[float](), SnapshotMemory()
        for _ in range(repeats):
            collective = comm.begin_collective("compare", timeout_seconds=600)
            started = time.thread_time()
            digests = ReplicaDigests(sets, local, memory)
            digests.add()
            digest.append(time.thread_time() - started)
            collective.finish_step("digest")
            began = time.monotonic()
            check = ReplicaCheck(collective, digests, any_differs_is_error=True)
            check.send()
            assert check.finish() == []
            exchange.append(time.monotonic() - began)
        return digest, exchange

    times = on_ranks(world, act)
    per_10000 = 1e7 / tensors
    return {
        "digest_ms_a_10000": round(min(min(digest) for digest, _ in times) * per_10000, 2),
        "exchange_ms": round(min(map(max, zip(*(e for _, e in times), strict=True))) * 1e3, 2),
    }


def saves(tensors: int, world: int, repeats: int) -> list[dict[str, Any]]:
    """Save with a cached plan, in turn with and without the comparison."""

    def act(comm: Comm) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {}
        model = {f"layers.{n:06}.w": torch.zeros(16) for n in range(tensors)}
        for background in (False, True):
            checkpointer = Checkpointer(folder)
            checkpointer.session.topologies = Topologies(comm, None)
            for number in range(-1, repeats):
                for mode in ("first", "never"):
                    options = uc.SaveOptions(fsync=False, if_exists="replace", check_replicas=mode)
                    call = checkpointer.save_async if background else checkpointer.save
                    started = time.monotonic()
                    call("c", model=model, options=options)
                    if number >= 0:
                        key = f"{mode} async" if background else mode
                        seconds.setdefault(key, []).append(time.monotonic() - started)
                    checkpointer.wait()
            checkpointer.close()
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        of_ranks = on_ranks(world, act)
    return [
        {
            "operation": f"{'call of save_async' if 'async' in mode else 'save'}, "
            f"check_replicas {mode.partition(' ')[0]}",
            "seconds": round(min(map(max, zip(*(s[mode] for s in of_ranks), strict=True))), 4),
        }
        for mode in of_ranks[0]
    ]


def many(world: int, *, differ: bool) -> dict[str, Any]:
    """Rank 0 of pp4 x fsdp x tp8 receives the digests of all; with `differ`, of a DDP group that
    holds 32 tensors, each different on every rank.
    """
    store = HashStore()
    keys = KeyStore(store)
    collective = Collective(keys, 0, rank=0, ranks=range(world), timeout_seconds=600)
    names = [f"model.layers.{number}.norm.running_mean" for number in range(32)]
    local = [
        LocalTensor(TensorDecl("model", name, spec_of("F32", (64,)), Sharding()), torch.ones(64))
        for name in names
    ]
    group = Membership(0, tuple(range(world)), tuple(t.decl for t in local), {})
    state = FlatState(tensors=local, requested_parts={"model"})
    sets_of_all = plan_replicas([group], local, state, rank=0)
    digests = ReplicaDigests(sets_of_all, local, SnapshotMemory())
    digests.add()
    nbytes = 0
    for rank in range(1, world):
        stage, shard = divmod(rank, world // 4)
        sets = {
            f"{stage}/9af15b336c3b8e1d/({shard // 8},)/small": 2**63 + shard // 8,
            f"{stage}/9af15b336c3b8e1d/({shard // 8},)/large": 2**63 + shard // 8,
            f"{stage}/1c2b8e1d9af15b33/()/always equal": 2**63 + stage,
            f"{stage}/1c2b8e1d9af15b33/()/small": 2**63 + stage,
        }
        if differ:
            sets = dict.fromkeys(digests.sets, 2**63 + rank)
            listed = [[0, position, 2**63 + rank * 32 + position] for position in range(32)]
            distances = {str(position): 1.0 for position in range(32)}
            for key, value in {"replica-differing": listed, "replica-distances": distances}.items():
                collective.put_json(f"{key}/{rank}", value)
                nbytes += len(json.dumps(value))
        collective.put_json(f"replicas/{rank}", sets)
        nbytes += len(json.dumps(sets))
    check = ReplicaCheck(collective, digests, any_differs_is_error=False)
    started = time.monotonic()
    check.send()
    differences = check.finish()
    return {
        "messages": "32 tensors differ on every rank" if differ else "no difference",
        "seconds": round(time.monotonic() - started, 3),
        "received_bytes": nbytes,
        "record_bytes": sum(len(d.model_dump_json()) for d in differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=200_000)
    parser.add_argument("--saved", type=int, default=0, help="tensors of the saves; 0: none")
    parser.add_argument("--ranks", default="2,8")
    parser.add_argument("--many", default="1024,16384")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(options.out).resolve().as_posix() if options.out else None
    for ranks in map(int, options.ranks.split(",")):
        for name, shape in SHAPES.items():
            tensors = options.tensors if shape != (2048,) else max(options.tensors // 10, 1)
            row = {"bench": "replicas", "shape": name, "tensors": tensors, "ranks": ranks}
            row |= compare(shape, tensors, ranks, options.repeats)
            write_rows([row | {"load_average": os.getloadavg()[0]}], out)
        head = {"bench": "replicas", "tensors": options.saved, "ranks": ranks}
        for row in saves(options.saved, ranks, options.repeats) if options.saved else ():
            write_rows([head | row], out)
    for ranks in map(int, filter(None, options.many.split(","))):
        for differ in (False, True):
            row = {"bench": "replicas", "who": "rank 0", "ranks": ranks}
            write_rows([row | many(ranks, differ=differ)], out)


if __name__ == "__main__":
    main()

"""What it costs to find out what nodes without a common folder have between them, by number of
nodes. No tensors, disk or network.

Run: python benchmarks/bench_inventory.py [--nodes 8,64] [--repeats 5] [--out FILE]. Llama 3.1
405B: weights, fp32 masters, two moments and a step of each parameter, TP 8 inside a node, FSDP
over the nodes, so that almost all is stored in shards. One JSON line for each of: the first
rank of a node, which lists its folder; rank 0, which puts the lists together, proves that
nothing is missing and tells all; every rank, which reads that and looks up where its parts are, in
the layout of the save (`same`) and by rows over all ranks (`rows`), and parses the headers of each
folder that it reads from, its own at least. From 64 nodes on also a mixture of experts, where
nodes name different tensors. Seconds: median of the runs; peak memory by tracemalloc in a run of
its own; bytes that go through the store.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import statistics
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from bench_plan import LLAMA_LAYERS, MOE_LAYERS, PP, TP, add_scale, llama_405b, moe

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, shard_name
from unified_ckpt.core.sharding.boxes import Box, chunk
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.engine.nodes.coverage import decode_cluster_index, select_save
from unified_ckpt.engine.nodes.folders import FolderCache
from unified_ckpt.engine.nodes.inventory import (
    Inventory,
    Numbers,
    TensorList,
    classify,
    decode_inventory,
    decode_tensor_list,
    tensor_list_name,
)
from unified_ckpt.engine.nodes.source import ClusterSource
from unified_ckpt.format.digests import block_count
from unified_ckpt.format.header import encode_header, file_order, parse_header
from unified_ckpt.runtime.exchange.file_server import PeerStorage
from unified_ckpt.runtime.exchange.tcp import Address, parse_address

EXPERT_GROUPS = 64
FILE_NBYTES = 5_000_000_000

Measure = Callable[[dict[str, Any], Callable[[], Any]], None]  # of a row, and the call to measure


def measured(what: dict[str, Any], call: Callable[[], Any], *, repeats: int) -> dict[str, Any]:
    """Times a call, then runs it once more for its peak memory."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    gc.collect()
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
    row = {
        "bench": "inventory",
        **what,
        **times,
        "peak_bytes": peak,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(row), flush=True)
    return row


# ---- nodes: what each stores


def held_by(node: int, row: TensorDecl, ranks: int) -> list[Box]:
    """The boxes of a tensor that a node's ranks hold."""
    boxes = [
        box
        for rank in range(node * ranks, (node + 1) * ranks)
        for box, _ in row.sharding.boxes(rank, row.spec.shape)
    ]
    return [box for box in dict.fromkeys(boxes) if box.numel]


def stored_by(
    node: int, rows: Sequence[TensorDecl], *, ranks: int = TP
) -> dict[str, dict[str, TensorSpec]]:
    """What a node stores, by its own parts and names: what is cut over nodes in shards,
    the rest whole.
    """
    found: dict[str, dict[str, TensorSpec]] = {}
    for row in rows:
        if not row.sharding.shard_dims:
            found.setdefault(row.part, {})[row.fqn] = row.spec
        for box in held_by(node, row, ranks) if row.sharding.shard_dims else ():
            name = shard_name(row.fqn, box, row.spec.shape)
            found.setdefault(row.part + SHARD_SUFFIX, {})[name] = TensorSpec(
                row.spec.dtype, box.shape
            )
    return found


def patterns(rows: Sequence[TensorDecl]) -> list[TensorDecl]:
    """The first row of each shape and rule: the kinds of all rows are theirs, in the same order."""
    first: dict[tuple[tuple[int, ...], Sharding], TensorDecl] = {}
    for row in rows:
        first.setdefault((row.spec.shape, row.sharding), row)
    return list(first.values())


def inventory_of(
    node: int, nodes: int, listing: TensorList, spans: Numbers, totals: dict[str, list[int]]
) -> Inventory:
    files = []
    for part, (_, nbytes) in totals.items():
        count = max(1, nbytes // nodes // FILE_NBYTES)
        files += [
            f"{part}{SHARD_SUFFIX}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)
        ] + [f"{part}.safetensors.index.json"]
    return Inventory(
        root="/local/run/checkpoint-1000", node=node, folder_id="", save_id="0" * 16, created="2026-01-01T00:00:00+00:00",  # noqa: E501
        group_count=nodes, group_number=node, ranks=tuple(range(node * TP, (node + 1) * TP)), files=tuple(files), tensor_list=listing,  # noqa: E501
        spans=spans, problems=(), world_size=nodes * TP, totals=totals, rank_extras=nodes * TP,
    )  # fmt: skip


def totals_of(rows: Sequence[TensorDecl]) -> dict[str, list[int]]:
    totals: dict[str, list[int]] = {}
    for row in rows:
        count, nbytes = totals.get(row.part, [0, 0])
        totals[row.part] = [count + 1, nbytes + row.spec.nbytes]
    return totals


def experts(nodes: int, layers: int) -> tuple[int, list[bytes], dict[str, bytes]]:
    """The number of tensors, and what nodes tell that hold a 64th of the experts each, whole,
    and the attention in shards; node + 64 is a copy of node.
    """
    groups = [moe(group, EXPERT_GROUPS, layers=layers) for group in range(EXPERT_GROUPS)]
    tensors = {row.key: row for rows in groups for row in rows}
    totals = totals_of(list(tensors.values()))
    made, listings = [], {}
    for group, rows in enumerate(groups):
        listing, spans = classify(stored_by(group, rows, ranks=1))
        body = listing.encode()
        made.append((listing, spans, tensor_list_name(body)))
        listings[tensor_list_name(body)] = zlib.compress(body)
    turns = [(node, *made[node % EXPERT_GROUPS]) for node in range(nodes)]
    told = [
        inventory_of(m, nodes, listing, spans, totals).encode(list_name=name)
        for m, listing, spans, name in turns
    ]
    return len(tensors), told, listings


def fleet(nodes: int, rows: Sequence[TensorDecl]) -> tuple[list[bytes], dict[str, bytes]]:
    """What all nodes tell: their inventories, and the listings by name. Each distinct listing is
    made once, in full.
    """
    totals = totals_of(rows)
    few = patterns(rows)
    made: dict[TensorList, tuple[TensorList, str]] = {}
    listings: dict[str, bytes] = {}
    told = []
    for node in range(nodes):
        short, spans = classify(stored_by(node, few))
        if short not in made:
            listing, all_spans = classify(stored_by(node, rows))
            assert (spans == all_spans).all()
            body = listing.encode()
            made[short] = listing, tensor_list_name(body)
            listings[tensor_list_name(body)] = zlib.compress(body)
        listing, name = made[short]
        told.append(inventory_of(node, nodes, listing, spans, totals).encode(list_name=name))
    return told, listings


# ---- the ranks' parts of it


def list_folder(node: int, nodes: int, rows: Sequence[TensorDecl]) -> Callable[[], bytes]:
    """What the first rank of a node does, once the headers of its files are read."""
    stored = stored_by(node, rows)

    def call() -> bytes:
        listing, spans = classify(stored)
        body = listing.encode()
        zlib.compress(body)
        return inventory_of(node, nodes, listing, spans, {}).encode(
            list_name=tensor_list_name(body)
        )

    return call


def decide(told: Sequence[bytes], listings: dict[str, bytes]) -> bytes:
    """What rank 0 does."""
    known: dict[str, TensorList] = {}

    def listing_of(name: str) -> TensorList:
        if name not in known:
            known[name] = decode_tensor_list(zlib.decompress(listings[name]))
        return known[name]

    return select_save(
        [decode_inventory(body, listing_of) for body in told], label="bench"
    ).encode()


def learn(body: bytes, addresses: bytes, own: int) -> ClusterSource:
    """What every rank does with what rank 0 has told."""
    found = decode_cluster_index(body)
    servers = [parse_address(text) for text in zlib.decompress(addresses).decode().split("\n")]
    storages = [
        PeerStorage(
            servers[one.node],
            folder=0,
            root=one.root,
            rank=0,
            names=one.files,
            timeout_seconds=1,
        )
        for one in found.folders
    ]
    return ClusterSource(found, FolderCache(storages), local=[own], rotation=own * TP)


def headers_of(node: int, rows: Sequence[TensorDecl]) -> list[tuple[bytes, int]]:
    """The headers of a node's folder, of its parts and of its digests, each with the bytes of
    its file.
    """
    stored = stored_by(node, rows)
    files = [
        [(name, spec.dtype, spec.shape) for name, spec in tensors.items()]
        for tensors in stored.values()
    ]
    files.append(
        [
            (f"{part}:{name}", "U64", (block_count(spec.nbytes),))
            for part, tensors in stored.items()
            for name, spec in tensors.items()
        ]
    )
    found = []
    for items in files:
        head, entries = encode_header(file_order(items))
        found.append((head, max(entry.stop for entry in entries.values())))
    return found


def open_one(joint: ClusterSource, number: int, headers: Sequence[tuple[bytes, int]]) -> None:
    """Parses the headers of one folder, as a rank does before it reads from it."""
    for head, size in headers:
        parse_header(head, file_size=size, file="bench")
    joint._index.keys_in_folder(number)


def look_up(joint: ClusterSource, windows: Sequence[tuple[TensorDecl, int, int]]) -> int:
    """The regions of some tensors' rows [low, high)."""
    storage, count = joint.storage, 0
    storage._tilings.clear()
    for row, low, high in windows:
        window = Box((low, *(0,) * (len(row.spec.shape) - 1)), (high - low, *row.spec.shape[1:]))
        count += len(storage._regions(row.key, window, frozenset()))
    return count


def windows_of(
    rows: Sequence[TensorDecl], nodes: int, rank: int, *, how: str
) -> list[tuple[TensorDecl, int, int]]:
    """The rows of each tensor that a rank reads."""
    found = []
    for row in rows:
        if not row.spec.shape:
            continue
        if how == "rows":
            spans = [chunk(row.spec.shape[0], nodes * TP, rank)]
        else:
            spans = [
                (box.offsets[0], box.offsets[0] + box.shape[0])
                for box, _ in row.sharding.boxes(rank, row.spec.shape)
            ]
        found += [(row, low, high) for low, high in spans if low < high]
    return found


def bench_405b(nodes: int, layers: int, measure: Measure) -> None:
    rows = sorted(
        (row for stage in range(PP) for row in llama_405b(stage, nodes, layers=layers)),
        key=lambda row: row.key,
    )
    own = nodes // 3
    told, listings = fleet(nodes, rows)
    case = {
        "model": "llama-405b",
        "mesh": f"fsdp{nodes} tp{TP}",
        "nodes": nodes,
        "tensors": len(rows),
    }
    pieces = sum(map(len, stored_by(own, rows).values()))
    sent = {
        "pieces": pieces,
        "inventory_bytes": len(told[own]),
        "listing_bytes": max(map(len, listings.values())),
    }
    measure({**case, "who": "first rank of a node", **sent}, list_folder(own, nodes, rows))
    joint = bench_gather(case, told, listings, own, measure)
    headers = headers_of(own, rows)
    what = {
        **case,
        "who": "a rank, for each folder that it reads from",
        "header_bytes": sum(len(head) for head, _ in headers),
    }
    measure(what, lambda: open_one(joint, own, headers))
    for how in ("same", "rows"):
        windows = windows_of(rows, nodes, own * TP + 3, how=how)
        what = {
            **case,
            "who": "every rank, looking up",
            "layout": how,
            "windows": len(windows),
            "regions": look_up(joint, windows),
        }
        measure(what, lambda windows=windows: look_up(joint, windows))


def bench_gather(
    case: dict[str, Any], told: list[bytes], listings: dict[str, bytes], own: int, measure: Measure
) -> ClusterSource:
    """What rank 0 does, and every rank."""
    body, nodes = decide(told, listings), case["nodes"]
    address = Address("10.20.30.40", 43210, "").encode()
    addresses = zlib.compress(
        "\n".join(address + secrets.token_hex(16) for _ in range(nodes)).encode()
    )
    heard = {
        "received_bytes": sum(map(len, told)) + sum(map(len, listings.values())),
        "listings": len(listings),
    }
    measure({**case, "who": "rank 0", **heard}, lambda: decide(told, listings))
    got = len(body) + len(addresses)
    out = {
        "received_bytes": got,
        "of_which_addresses": len(addresses),
        "all_ranks_received_bytes": got * nodes * TP,
    }
    measure({**case, "who": "every rank", **out}, lambda: learn(body, addresses, own))
    return learn(body, addresses, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="8,64,256,2048")
    add_scale(parser)
    parser.add_argument("--out")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []

    def measure(what: dict[str, Any], call: Callable[[], Any]) -> None:
        found.append(measured(what, call, repeats=options.repeats))

    for nodes in map(int, options.nodes.split(",")):
        bench_405b(nodes, options.layers or LLAMA_LAYERS, measure)
        if nodes >= EXPERT_GROUPS:
            tensors, told, listings = experts(nodes, options.layers or MOE_LAYERS)
            case = {
                "model": "moe",
                "mesh": f"ep{EXPERT_GROUPS}",
                "nodes": nodes,
                "tensors": tensors,
            }
            bench_gather(case, told, listings, 5, measure)
    if options.out:
        with open(options.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()

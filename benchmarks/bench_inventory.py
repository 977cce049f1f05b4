"""Simulate what it costs to collect which tensors are on which nodes.

Run: python benchmarks/bench_inventory.py [--nodes 8,64] [--repeats 5] [--out FILE].

The model is Llama 3.1 405B: weights, fp32 masters, two moments and a step of each parameter, TP 8
inside a node, FSDP over the nodes, so that almost everything is stored in shards. One JSON line
for each of:

- the first rank of a node, which lists its folder;
- rank 0, which joins the lists, proves that nothing is missing and publishes the result;
- every rank, which reads the result and looks up its parts, in the layout of the save (`same`) and
  by rows over all ranks (`rows`);
- a rank that parses the headers of a folder that it reads from, its own at least.

From 64 nodes on there is also a mixture of experts, where nodes name different tensors. Seconds are
the median of the runs; peak memory is from tracemalloc in a separate run; bytes are those that go
through the store. No tensors, disk or network.
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
from unified_ckpt.engine.cluster.coverage import decode_cluster_index, select_save
from unified_ckpt.engine.cluster.folders import FolderCache
from unified_ckpt.engine.cluster.inventory import (
    Inventory,
    Numbers,
    TensorList,
    classify,
    decode_inventory,
    decode_tensor_list,
    tensor_list_name,
)
from unified_ckpt.engine.cluster.source import ClusterSource
from unified_ckpt.engine.source.protocol import ReadPolicy
from unified_ckpt.format.digests import block_count
from unified_ckpt.format.header import encode_header, file_order, parse_header
from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.exchange.file_server import Peer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import Address

EXPERT_GROUPS = 64
FILE_NBYTES = 5_000_000_000

Measure = Callable[
    [dict[str, Any], Callable[[], Any]], None
]  # takes the columns of a row, and the call


def measured(columns: dict[str, Any], call: Callable[[], Any], *, repeats: int) -> dict[str, Any]:
    """Time a call, then run it once more for its peak memory."""
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
        **columns,
        **times,
        "peak_bytes": peak,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(row), flush=True)
    return row


# ---- what each node stores


def node_boxes(node: int, row: TensorDecl, ranks: int) -> list[Box]:
    """Return the boxes of a tensor that a node's ranks hold."""
    boxes = [
        box
        for rank in range(node * ranks, (node + 1) * ranks)
        for box, _ in row.sharding.boxes(rank, row.spec.shape)
    ]
    return [box for box in dict.fromkeys(boxes) if box.numel]


def stored_specs(
    node: int, rows: Sequence[TensorDecl], *, ranks: int = TP
) -> dict[str, dict[str, TensorSpec]]:
    """Return what a node stores, by part and name: sharded tensors as shards, others whole."""
    specs: dict[str, dict[str, TensorSpec]] = {}
    for row in rows:
        if not row.sharding.shard_dims:
            specs.setdefault(row.part, {})[row.fqn] = row.spec
        for box in node_boxes(node, row, ranks) if row.sharding.shard_dims else ():
            name = shard_name(row.fqn, box, row.spec.shape)
            specs.setdefault(row.part + SHARD_SUFFIX, {})[name] = TensorSpec(
                row.spec.dtype, box.shape
            )
    return specs


def patterns(rows: Sequence[TensorDecl]) -> list[TensorDecl]:
    """Return the first row of each shape and sharding, which stands for all rows like it."""
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
        root="/local/run/checkpoint-1000",
        node=node,
        folder_id="",
        save_id="0" * 16,
        created="2026-01-01T00:00:00+00:00",
        group_count=nodes,
        group_number=node,
        ranks=tuple(range(node * TP, (node + 1) * TP)),
        files=tuple(files),
        tensor_list=listing,
        spans=spans,
        problems=(),
        world_size=nodes * TP,
        totals=totals,
        rank_extras=nodes * TP,
    )


def totals_of(rows: Sequence[TensorDecl]) -> dict[str, list[int]]:
    totals: dict[str, list[int]] = {}
    for row in rows:
        count, nbytes = totals.get(row.part, [0, 0])
        totals[row.part] = [count + 1, nbytes + row.spec.nbytes]
    return totals


def experts(nodes: int, layers: int) -> tuple[int, list[bytes], dict[str, bytes]]:
    """Return the number of tensors, and the inventories and listings of nodes with experts.

    A node holds a 64th of the experts, whole, and the attention in shards; node + 64 is a copy.
    """
    groups = [moe(group, EXPERT_GROUPS, layers=layers) for group in range(EXPERT_GROUPS)]
    tensors = {row.key: row for rows in groups for row in rows}
    totals = totals_of(list(tensors.values()))
    lists, listings = [], {}
    for group, rows in enumerate(groups):
        listing, spans = classify(stored_specs(group, rows, ranks=1))
        body = listing.encode()
        lists.append((listing, spans, tensor_list_name(body)))
        listings[tensor_list_name(body)] = zlib.compress(body)
    assigned = [(node, *lists[node % EXPERT_GROUPS]) for node in range(nodes)]
    inventories = [
        inventory_of(m, nodes, listing, spans, totals).encode(list_name=name)
        for m, listing, spans, name in assigned
    ]
    return len(tensors), inventories, listings


def all_inventories(nodes: int, rows: Sequence[TensorDecl]) -> tuple[list[bytes], dict[str, bytes]]:
    """Return the inventories of all nodes, and the listings by name.

    Each distinct listing is computed once, in full.
    """
    totals = totals_of(rows)
    few = patterns(rows)
    full_lists: dict[TensorList, tuple[TensorList, str]] = {}
    listings: dict[str, bytes] = {}
    encoded = []
    for node in range(nodes):
        short, spans = classify(stored_specs(node, few))
        if short not in full_lists:
            listing, all_spans = classify(stored_specs(node, rows))
            assert (spans == all_spans).all()
            body = listing.encode()
            full_lists[short] = listing, tensor_list_name(body)
            listings[tensor_list_name(body)] = zlib.compress(body)
        listing, name = full_lists[short]
        encoded.append(inventory_of(node, nodes, listing, spans, totals).encode(list_name=name))
    return encoded, listings


# ---- what each rank does


def list_folder(node: int, nodes: int, rows: Sequence[TensorDecl]) -> Callable[[], bytes]:
    """Do the work of the first rank of a node, after it has read the headers of its files."""
    stored = stored_specs(node, rows)

    def call() -> bytes:
        listing, spans = classify(stored)
        body = listing.encode()
        zlib.compress(body)
        return inventory_of(node, nodes, listing, spans, {}).encode(
            list_name=tensor_list_name(body)
        )

    return call


def decide(inventories: Sequence[bytes], listings: dict[str, bytes]) -> bytes:
    """Do the work of rank 0."""
    known: dict[str, TensorList] = {}

    def listing_of(name: str) -> TensorList:
        if name not in known:
            known[name] = decode_tensor_list(zlib.decompress(listings[name]))
        return known[name]

    return select_save(
        [decode_inventory(body, listing_of) for body in inventories], label="bench"
    ).encode()


def open_cluster(body: bytes, addresses: bytes, node: int) -> ClusterSource:
    """Do the work of every rank with the result of rank 0."""
    index = decode_cluster_index(body)
    servers = [Address(*fields) for fields in json.loads(zlib.decompress(addresses))]
    storages = [
        PeerStorage(
            Peer(0, servers[folder.node]),
            folder=0,
            root=folder.root,
            names=folder.files,
            traffic=Traffic(),
            timeout_seconds=1,
        )
        for folder in index.folders
    ]
    return ClusterSource(
        index, FolderCache(storages), local=[node], rotation=node * TP, policy=ReadPolicy()
    )


def headers_of(node: int, rows: Sequence[TensorDecl]) -> list[tuple[bytes, int]]:
    """Return the headers of a node's folder, with the size of each file, those of digests too."""
    stored = stored_specs(node, rows)
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
    file_headers = []
    for items in files:
        head, entries = encode_header(file_order(items))
        file_headers.append((head, max(entry.stop for entry in entries.values())))
    return file_headers


def open_folder(joint: ClusterSource, number: int, headers: Sequence[tuple[bytes, int]]) -> None:
    """Parse the headers of one folder, as a rank does before it reads from it."""
    for head, size in headers:
        parse_header(head, file_size=size, file="bench")
    joint._index.keys_in_folder(number)


def count_regions(joint: ClusterSource, windows: Sequence[tuple[TensorDecl, int, int]]) -> int:
    """Count the stored regions that hold rows `low` to `high` of some tensors."""
    reader, count = joint._reader, 0
    reader._tilings.clear()
    for row, low, high in windows:
        window = Box((low, *(0,) * (len(row.spec.shape) - 1)), (high - low, *row.spec.shape[1:]))
        count += len(reader._regions(row.key, window, frozenset()))
    return count


def windows_of(
    rows: Sequence[TensorDecl], nodes: int, rank: int, *, layout: str
) -> list[tuple[TensorDecl, int, int]]:
    """Return the rows of each tensor that a rank reads."""
    windows = []
    for row in rows:
        if not row.spec.shape:
            continue
        if layout == "rows":
            spans = [chunk(row.spec.shape[0], nodes * TP, rank)]
        else:
            spans = [
                (box.offsets[0], box.offsets[0] + box.shape[0])
                for box, _ in row.sharding.boxes(rank, row.spec.shape)
            ]
        windows += [(row, low, high) for low, high in spans if low < high]
    return windows


def bench_405b(nodes: int, layers: int, measure: Measure) -> None:
    rows = sorted(
        (row for stage in range(PP) for row in llama_405b(stage, nodes, layers=layers)),
        key=lambda row: row.key,
    )
    node = nodes // 3
    inventories, listings = all_inventories(nodes, rows)
    case = {
        "model": "llama-405b",
        "mesh": f"fsdp{nodes} tp{TP}",
        "nodes": nodes,
        "tensors": len(rows),
    }
    pieces = sum(map(len, stored_specs(node, rows).values()))
    sent = {
        "pieces": pieces,
        "inventory_bytes": len(inventories[node]),
        "listing_bytes": max(map(len, listings.values())),
    }
    measure({**case, "who": "first rank of a node", **sent}, list_folder(node, nodes, rows))
    joint = bench_gather(case, inventories, listings, node, measure)
    headers = headers_of(node, rows)
    columns = {
        **case,
        "who": "a rank, for each folder that it reads from",
        "header_bytes": sum(len(head) for head, _ in headers),
    }
    measure(columns, lambda: open_folder(joint, node, headers))
    for layout in ("same", "rows"):
        windows = windows_of(rows, nodes, node * TP + 3, layout=layout)
        columns = {
            **case,
            "who": "every rank, looking up",
            "layout": layout,
            "windows": len(windows),
            "regions": count_regions(joint, windows),
        }
        measure(columns, lambda windows=windows: count_regions(joint, windows))


def bench_gather(
    case: dict[str, Any],
    inventories: list[bytes],
    listings: dict[str, bytes],
    node: int,
    measure: Measure,
) -> ClusterSource:
    """Measure what rank 0 and every rank do."""
    body, nodes = decide(inventories, listings), case["nodes"]
    servers = [Address("10.20.30.40", 43210, secrets.token_hex(16)) for _ in range(nodes)]
    addresses = zlib.compress(json.dumps(servers).encode(), 1)
    received = {
        "received_bytes": sum(map(len, inventories)) + sum(map(len, listings.values())),
        "listings": len(listings),
    }
    measure({**case, "who": "rank 0", **received}, lambda: decide(inventories, listings))
    nbytes = len(body) + len(addresses)
    out = {
        "received_bytes": nbytes,
        "of_which_addresses": len(addresses),
        "all_ranks_received_bytes": nbytes * nodes * TP,
    }
    measure({**case, "who": "every rank", **out}, lambda: open_cluster(body, addresses, node))
    return open_cluster(body, addresses, node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="8,64,256,2048")
    add_scale(parser)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def measure(columns: dict[str, Any], call: Callable[[], Any]) -> None:
        rows.append(measured(columns, call, repeats=options.repeats))

    for nodes in map(int, options.nodes.split(",")):
        bench_405b(nodes, options.layers or LLAMA_LAYERS, measure)
        if nodes >= EXPERT_GROUPS:
            tensors, inventories, listings = experts(nodes, options.layers or MOE_LAYERS)
            case = {
                "model": "moe",
                "mesh": f"ep{EXPERT_GROUPS}",
                "nodes": nodes,
                "tensors": tensors,
            }
            bench_gather(case, inventories, listings, 5, measure)
    if options.out:
        with open(options.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()

r"""Measure what opening a checkpoint of torch.distributed.checkpoint costs.

Its whole `.metadata` is read, and compared with DCP's own reading. Each tensor is split into a row
for each of up to 16,384 ranks; the files have holes in place of bytes.

python benchmarks/bench_open_dcp.py --ranks 64,1024,16384 --shards 300000 \
    --out benchmarks/results/open-dcp.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile

from common import write_rows

NBYTES = 1500  # of a shard: a zip archive with one row
FILES = 1024  # that a process may have open, the usual limit of shells

DCP = """
from torch.distributed.checkpoint import FileSystemReader
from time import perf_counter
before = rss()
began = perf_counter()
opened = FileSystemReader(sys.argv[1]).read_metadata()
"""
UNIFIED = """
import unified_ckpt.foreign.dcp.source
from unified_ckpt.options import SourceOptions
from unified_ckpt.foreign.open import open_source
from time import perf_counter
before = rss()
began = perf_counter()
opened = open_source(sys.argv[1], SourceOptions())
"""
HEAD = """
import json, sys
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
"""
TAIL = """
seconds = perf_counter() - began
print(json.dumps({"seconds": round(seconds, 3), "kept_bytes": rss() - before}))
"""


def write(folder: str, ranks: int, tensors: int) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    state, places = {}, {}
    for n in range(tensors):
        fqn, chunks = f"optimizer.state.model.layers.{n}.mlp.up_proj.weight.exp_avg", []
        for rank in range(ranks):
            offsets = torch.Size([rank, 0])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size([1, 64])))
            places[MetadataIndex(fqn, offsets, rank)] = _StorageInfo(
                f"__{rank}_0.distcp", n * NBYTES, NBYTES
            )
        state[fqn] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([ranks, 64]), chunks
        )
    with open(f"{folder}/.metadata", "wb") as file:
        pickle.dump(Metadata(state, None, places), file)
    for rank in range(ranks):
        with open(f"{folder}/__{rank}_0.distcp", "wb") as file:
            file.truncate(tensors * NBYTES)


def measure(body: str, folder: str) -> dict[str, float]:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))

    command = [sys.executable, "-c", HEAD + body + TAIL, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=few_files)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="64,1024,16384")
    parser.add_argument("--shards", type=int, default=300_000, help="of all tensors together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    parser.add_argument("--out")
    options = parser.parse_args()
    for ranks in map(int, options.ranks.split(",")):
        folder, tensors = tempfile.mkdtemp(dir=options.scratch), max(options.shards // ranks, 1)
        try:
            write(folder, ranks, tensors)
            rounds = [
                {"dcp": measure(DCP, folder), "unified": measure(UNIFIED, folder)}
                for _ in range(options.repeats)
            ]
            size = os.path.getsize(f"{folder}/.metadata")
        finally:
            shutil.rmtree(folder)
        for case in ("dcp", "unified"):
            seconds = [measured[case]["seconds"] for measured in rounds]
            row = {
                "bench": "open_dcp",
                "case": case,
                "ranks": ranks,
                "tensors": tensors,
                "shards": ranks * tensors,
                "metadata_bytes": size,
            }
            row |= {
                "seconds_median": statistics.median(seconds),
                "rounds": seconds,
                "kept_bytes": rounds[-1][case]["kept_bytes"],
            }
            write_rows([row], options.out)


if __name__ == "__main__":
    main()

"""Measures the time and memory of conversions, next to durable copies of the same files.

python benchmarks/bench_convert.py --size 4GiB --repeats 5 --out results/convert.jsonl
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common import MOMENTS, llama_shapes, parse_size, write_rows

import unified_ckpt as uc


def rss(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) << 10


def make_sources(root: Path, nbytes: int) -> dict[str, Path]:
    """Write the same state in every format; return {name: folder or file}."""
    model, moments = {}, dict[str, dict[str, torch.Tensor]]()
    for fqn, shape in llama_shapes(nbytes).items():
        model[fqn] = torch.randn(shape).bfloat16()
        moments[fqn] = {name: torch.randn(shape) for name in MOMENTS}
    flat = {
        f"{fqn}/{name}": tensor
        for fqn, states in moments.items()
        for name, tensor in states.items()
    }
    paths = {"unified": root / "unified", "dcp": root / "dcp", "torch": root / "state.pt"}
    uc.save(paths["unified"], model=model, optimizer=flat)
    with warnings.catch_warnings(action="ignore"):  # the warning about a single process
        dcp.save({"model": model, "optimizer": {"state": moments}}, checkpoint_id=paths["dcp"])
    torch.save({"model": {**model, **flat}}, paths["torch"])
    return paths


def work(way: str, source: Path, target: Path) -> dict[str, object]:
    """Run once; return the seconds, and the memory beyond that of the imports."""

    start_anon, start_all, peak, done = rss("RssAnon"), rss("VmRSS"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], rss("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    if way == "copy":
        copied = shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        for path in Path(copied).rglob("*") if source.is_dir() else [Path(copied)]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    else:
        uc.convert(source, target)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    return {
        "seconds": seconds,
        "peak_anon": max(peak[0] - start_anon, 0),
        "peak_all": rss("VmHWM") - start_all,
    }


def run_apart(way: str, source: Path, target: Path, ranks: int) -> dict[str, object]:
    if way == "convert" and ranks > 1:
        began = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "unified_ckpt",
            "convert",
        ]
        completed = subprocess.run(
            [*command, str(source), str(target), "--json"],
            check=True,
            capture_output=True,
            text=True,
        )
        return {
            "seconds": json.loads(completed.stdout)["seconds"],
            "with_start": time.perf_counter() - began,
        }
    completed = subprocess.run(
        [sys.executable, __file__, "--one", way, source, target],
        check=True,
        capture_output=True,
        text=True,
    )
    result: dict[str, object] = json.loads(completed.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="unified,dcp,torch")
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--out")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, source, target = options.one
        print(json.dumps(work(way, Path(source), Path(target))))
        return
    root = Path(options.dir, f"bench-convert-{os.getpid()}")
    root.mkdir()
    try:
        sources = {
            name: path
            for name, path in make_sources(root, parse_size(options.size)).items()
            if name in options.only.split(",")
        }
        os.sync()
        for name, source in sources.items():
            for ranks in map(int, options.ranks.split(",")):
                row = compare(name, source, root, ranks, options)
                write_rows([row], options.out)
    finally:
        shutil.rmtree(root)


def compare(
    name: str, source: Path, root: Path, ranks: int, options: argparse.Namespace
) -> dict[str, object]:
    runs: dict[str, list[dict[str, object]]] = {"copy": [], "convert": []}
    for number in range(options.repeats + 1):  # the first warms the page cache
        for way, results in runs.items():
            target = root / f"target-{way}{source.suffix if way == 'copy' else ''}"
            result = run_apart(way, source, target, ranks)
            if way == "convert" and number == 0:
                with uc.open(source) as before, uc.open(target) as after:
                    for part in before.parts:
                        for fqn in before[part]:
                            assert torch.equal(before[part][fqn][...], after[part][fqn][...]), fqn
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            os.sync()
            if number:
                results.append(result)
    seconds = {
        way: [float(str(result["seconds"])) for result in results] for way, results in runs.items()
    }
    ratios = [
        copy / convert for copy, convert in zip(seconds["copy"], seconds["convert"], strict=True)
    ]
    row: dict[str, object] = {
        "bench": "convert",
        "source": name,
        "size": options.size,
        "ranks": ranks,
        "n": options.repeats,
    }
    row |= {f"{way}_median": round(statistics.median(values), 3) for way, values in seconds.items()}
    row |= {
        "speed_of_copy": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
    }
    for key in ("peak_anon", "peak_all"):
        row |= {
            f"{key}_mib": max(
                (int(str(result[key])) >> 20 for result in runs["convert"] if key in result),
                default=None,
            )
        }
    return row


if __name__ == "__main__":
    main()

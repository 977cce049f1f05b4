r"""Compare saves and loads of a bucket with plain transfers by the same client.

A server on this machine keeps or drops the bytes (`bucket_server.py`). `upload` sends as many bytes
as a rank saves, from memory, in parts of the same size and with as many in flight, to an object of
each rank. `ranges` reads as many bytes as a rank loads in ranges of 8 MiB, 16 in flight.

python benchmarks/bench_buckets.py --size 512MiB --ranks 1,2 --kind dim0,inner --repeats 7 \
    --out benchmarks/results/buckets.jsonl
"""

import argparse
import os
import subprocess
import sys
import time
from argparse import Namespace
from ast import literal_eval
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import torch
import torch.distributed as dist
from common import State, locals_of, make_state, parse_size

IN_FLIGHT = 16
RANGE_NBYTES = 8 << 20
Case = Callable[[], object]


def rank_bytes(state: State) -> list[memoryview]:
    """Return this rank's memory, tensor after tensor."""
    return [
        memoryview(local.reshape(-1).view(torch.uint8).numpy())
        for local in locals_of(state.tensors()).values()
    ]


def upload_case(state: State) -> Case:
    """Each rank uploads its bytes as an object of its own."""
    from unified_ckpt.runtime.objects.registry import bucket_of

    store, _ = bucket_of("s3://bench")
    parts, rest = list[list[memoryview]](), RANGE_NBYTES
    for view in rank_bytes(state):
        while len(view):
            if rest == RANGE_NBYTES:
                parts.append([])
            parts[-1].append(view[:rest])
            taken = min(rest, len(view))
            view, rest = view[taken:], rest - taken or RANGE_NBYTES
    key = f"sink/upload-{dist.get_rank()}"

    def run() -> None:
        upload_id = store.begin(key)
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            etags = list(
                pool.map(
                    lambda item: store.put_part(key, upload_id, item[0] + 1, item[1]),
                    enumerate(parts),
                )
            )
        store.complete(key, upload_id, etags)

    return run


def ranges_case() -> Case:
    """Each rank reads its share of the checkpoint's bytes, whatever tensors they are of."""
    from unified_ckpt.runtime.objects.registry import bucket_of

    store, _ = bucket_of("s3://bench")
    rank, world = dist.get_rank(), dist.get_world_size()
    files = sorted(
        (key, stat.nbytes)
        for key, stat in store.list("run/checkpoint-1/").objects.items()
        if stat.nbytes > RANGE_NBYTES
    )
    spans = [
        (key, start, min(start + RANGE_NBYTES, size))
        for key, size in files
        for start in range(0, size, RANGE_NBYTES)
    ]
    spans = spans[rank::world]
    memory = memoryview(bytearray(RANGE_NBYTES * IN_FLIGHT * 2))
    slots = [memory[i * RANGE_NBYTES : (i + 1) * RANGE_NBYTES] for i in range(IN_FLIGHT * 2)]

    def read(item: tuple[int, tuple[str, int, int]]) -> None:
        number, (key, start, stop) = item
        store.get_range(key, start, slots[number % len(slots)][: stop - start])

    def run() -> None:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(read, enumerate(spans)))

    return run


def race(cases: dict[str, Case], *, repeats: int, nbytes: int) -> list[dict[str, object]]:
    """Run each case once per round, in order. Returns a row for each."""
    from unified_ckpt.runtime.objects.registry import bucket_of

    store, _ = bucket_of("s3://bench")
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    requests: dict[str, object] = {}
    for _ in range(repeats + 1):
        for name, run in cases.items():
            if dist.get_rank() == 0:
                store.get("counts")
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            spent = torch.tensor([time.process_time() - cpu_start])
            dist.all_reduce(spent)
            cpu[name].append(float(spent) / (nbytes / 2**30))
            if dist.get_rank() == 0:
                requests[name] = literal_eval(store.get("counts")[0].decode())
    return [
        {
            "case": name,
            "seconds": min(seconds[name][1:]),
            "seconds_all": [round(each, 3) for each in seconds[name]],
            "cpu_seconds_per_gib": round(min(cpu[name][1:]), 3),
            "requests": requests.get(name),
        }
        for name in cases
    ]


def work(options: Namespace) -> None:
    import unified_ckpt as uc
    from unified_ckpt.runtime.objects.registry import set_storage_options
    from unified_ckpt.storage_options import StorageOptions

    mesh = common.start_ranks()
    set_storage_options(
        "s3://bench",
        StorageOptions(
            endpoint=options.endpoint, region="us-east-1", access_key="a", secret_key="b"
        ),
    )
    state = make_state(parse_size(options.size), options.kind, mesh)
    target = make_state(parse_size(options.size), options.kind, mesh, filled=False)
    replace = uc.SaveOptions(if_exists="replace")
    with uc.Checkpointer(options=replace) as checkpointer:

        def save(root: str) -> None:
            checkpointer.save(
                f"s3://bench/{root}/checkpoint-1",
                model=state.model,
                optimizer=state.optimizer,
                step=1,
            )

        def save_async() -> None:
            pending = checkpointer.save_async(
                "s3://bench/sink/checkpoint-2",
                model=state.model,
                optimizer=state.optimizer,
                step=2,
            )
            report = pending.result()
            blocked.append(report.blocked_seconds)

        def load() -> None:
            checkpointer.load(
                "s3://bench/run/checkpoint-1", model=target.model, optimizer=target.optimizer
            )

        blocked: list[float] = []
        save("run")
        cases: dict[str, Case] = {
            "upload": upload_case(state),
            "save": lambda: save("sink"),
            "ranges": ranges_case(),
            "load": load,
            "save_async": save_async,
        }
        found = race(cases, repeats=options.repeats, nbytes=state.nbytes)
        common.check_equal(
            locals_of(target.tensors()), locals_of(state.tensors()), where="load from the bucket"
        )
    if dist.get_rank() == 0:
        same = {
            "bench": "buckets",
            "size": options.size,
            "ranks": mesh.size(),
            "kind": options.kind,
            "load_average": round(os.getloadavg()[0], 1),
        }
        by_case = {row["case"]: row for row in found}
        for name, floor in (("save", "upload"), ("load", "ranges")):
            for column in ("seconds", "cpu_seconds_per_gib"):
                ratio = by_case[name][column] / by_case[floor][column]
                by_case[name][f"{column}_to_{floor}"] = round(ratio, 2)
        by_case["save_async"]["blocked_seconds"] = round(min(blocked[1:]), 4)
        common.write_rows([{**same, **row} for row in found], options.out)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="512MiB")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--kind", default="dim0,inner")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out")
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.endpoint:
        work(options)
        return
    command = [sys.executable, str(Path(__file__).parent / "bucket_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            endpoint = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            for ranks in map(int, options.ranks.split(",")):
                for kind in options.kind.split(","):
                    if ranks == 1 and kind == "inner":
                        continue  # one rank has one layout
                    arguments = ["--size", options.size, "--kind", kind]
                    arguments += ["--repeats", str(options.repeats), "--endpoint", endpoint]
                    out = ["--out", str(Path(options.out).resolve())] if options.out else []
                    common.launch(__file__, [*arguments, *out], ranks=ranks)
        finally:
            server.kill()


if __name__ == "__main__":
    main()

r"""Measure how long a load of a sharded training state takes, in the same layout and in others.

python benchmarks/bench_load.py --size 1GiB --ranks 1,2,4 --kind dim0,inner \
    --scenario same,reshard,world --out results/load.jsonl
"""

import os
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import common
import floors
import peers
import torch
import torch.distributed as dist
from common import KINDS, State, boxes_of, locals_of, make_state, parse_size
from measure import Case, chosen, over_ranks, race, rows

Contests = dict[str, list[Case]]
Columns = Mapping[str, object]


def origin(scenario: str, kind: str, ranks: int) -> tuple[str, int] | None:
    """Return the kind and the number of ranks of the save that `ranks` ranks load as `kind`.

    None if that would be the same layout.
    """
    if scenario == "same":
        return kind, ranks
    if scenario == "world":
        return kind, ranks // 2 if ranks > 2 else ranks * 2
    return (next(other for other in KINDS if other != kind), ranks) if ranks > 1 else None


# ---- first launch: write the checkpoints, by layout


def save_sources(options: Namespace) -> None:
    """Write the merged folder with unified; without it, with DCP's consolidation."""
    mesh = common.start_ranks()
    scratch = Path(options.scratch) / "bench_load"
    common.empty(scratch)
    write_sources(scratch, make_state(parse_size(options.size), options.kind, mesh), options)
    dist.destroy_process_group()


def write_sources(scratch: Path, state: State, options: Namespace, *, for_dcp: bool = True) -> None:
    """Collective. Write the state in every format that a case reads, in the empty `scratch`."""
    merged = scratch / "merged"
    if common.needs_unified(options.only):
        import unified_ckpt as uc

        save_options = uc.SaveOptions(fsync=False, max_file_bytes=options.max_file_bytes)
        uc.save(merged, model=state.model, optimizer=state.optimizer, options=save_options)
    else:
        merged.mkdir(exist_ok=True)
        mapping = peers.hf_mapping(state, max_file_bytes=options.max_file_bytes)
        peers.hf_save(merged, state, mapping=mapping, everywhere=False, threads=2, fsync=False)
    peers.check_merged(merged, state, options.kind)
    if for_dcp:
        peers.link_merged(merged, scratch / "view")
        peers.dcp_save(scratch / "dcp", state, fsync=False, threads=1)
    if options.scenario == "same":
        for suffix in ("pt", "safetensors"):
            (scratch / suffix).mkdir(exist_ok=True)
            peers.write_shards(scratch / suffix, state, suffix=suffix, fsync=False)


# ---- second launch: load them


def load_case(
    name: str,
    load: Callable[[], object],
    folder: Path,
    state: State,
    options: Namespace,
    *,
    check: Callable[[], Columns] | None = None,
    settings: Columns | None = None,
) -> Case:
    files = sorted(path for path in folder.rglob("*") if path.is_file())

    def reset() -> None:
        common.clear(state)  # this also creates every page of the target
        (common.drop_caches if options.cold else common.read_ahead)(files)

    def right() -> Columns:
        options.check(where=name)
        return {}

    return Case(
        name=name,
        limit="raw",
        reset=reset,
        run=load,
        check=check or right,
        columns={},
        settings=settings or {},
    )


def raw_contests(scratch: Path, state: State, options: Namespace) -> Contests:
    """The floor: each rank reads an even share of the bytes in file order, by the best threads.

    Cold reads also run past the page cache, as `raw_direct`.
    """
    files, device = peers.merged_files(scratch / "merged"), common.device_of(state)
    paths = [path for path, _, _ in files]
    own = sum(span.nbytes for span in floors.of_rank(files, threads=1)[0])
    target = torch.zeros(own, dtype=torch.uint8, device=device).fill_(1)
    before = partial(common.drop_caches if options.cold else common.read_ahead, paths)

    def check() -> Columns:
        floors.check_files(files, target.cpu())
        return {}

    def contest(name: str, *, direct: bool) -> list[Case]:
        def reader(threads: int) -> Callable[[], object]:
            return floors.Reader(files, target, threads=threads, direct=direct).read

        threads, tried = floors.best_read(reader, before, cores=common.cores())
        case = load_case(
            name,
            reader(threads),
            scratch / "merged",
            state,
            options,
            check=dict if direct else check,
            settings={"threads": threads},
        )
        return [replace(case, columns={"tried": tried})]

    contests = {"raw": contest("raw", direct=False)}
    if options.cold and floors.supports_direct(paths[0]):
        contests["raw_direct"] = contest("raw_direct", direct=True)
    return contests


def unified_contests(scratch: Path, state: State, options: Namespace, owned: ExitStack) -> Contests:
    import unified_ckpt as uc

    folder = scratch / "merged"

    def contest(
        name: str, verify: Literal["read", "off"], load: Callable[..., uc.LoadReport]
    ) -> list[Case]:
        reports: list[uc.LoadReport] = []

        def run() -> None:
            load_options = uc.LoadOptions(verify=verify)
            reports[:] = [
                load(folder, model=state.model, optimizer=state.optimizer, options=load_options)
            ]

        def check() -> Columns:
            options.check(where=name)
            return {"verified_bytes": over_ranks(reports[0].verified_bytes, dist.ReduceOp.SUM)}

        return [
            load_case(name, run, folder, state, options, check=check, settings={"verify": verify})
        ]

    return {  # each case has a Checkpointer of its own, because a used one already holds buffers
        "unified": contest("unified", "off", owned.enter_context(uc.Checkpointer()).load),
        "unified_verified": contest(
            "unified_verified", "read", owned.enter_context(uc.Checkpointer()).load
        ),
        "unified_oneshot": contest("unified_oneshot", "off", uc.load),
    }


def peer_contests(scratch: Path, state: State, options: Namespace) -> Contests:
    def case(name: str, folder: str, load: Callable[..., object], **settings: object) -> Case:
        return load_case(
            name,
            partial(load, scratch / folder, state, **settings),
            scratch / folder,
            state,
            options,
            settings=settings,
        )

    contests = {
        "dcp": [case("dcp", "dcp", peers.dcp_load)],
        "dcp_hf": [case("dcp_hf", "view", peers.hf_load, threads=threads) for threads in (1, 2)],
        "torch_load": [],
        "safetensors_load": [
            case("safetensors_load", "merged", peers.load_slices, kind=options.kind)
        ],
    }
    if options.scenario == "same":  # files of single ranks fit no other layout
        contests["torch_load"] = [
            case("torch_load", "pt", peers.load_shards, suffix="pt", mmap=mmap)
            for mmap in (False, True)
        ]
        contests["safetensors_load"].append(
            case("safetensors_load", "safetensors", peers.load_shards, suffix="safetensors")
        )
    return contests | whole_contests(scratch, state, options)


def whole_contests(scratch: Path, state: State, options: Namespace) -> Contests:
    """The loads of safetensors that return new tensors. `prefetch` needs a GPU and 0.9.0rc1."""
    device, loaded = common.device_of(state), dict[str, torch.Tensor]()

    def case(name: str, load: Callable[..., dict[str, torch.Tensor]], **how: Any) -> Case:
        def run() -> None:
            loaded.clear()
            loaded.update(load(scratch / "merged", device, **how))

        def check() -> Columns:
            for tensor, local in locals_of(state.tensors()).items():
                local.copy_(loaded.pop(tensor))
            options.check(where=name)
            return {}

        settings = {key: value for key, value in how.items() if key != "boxes"}
        return load_case(
            name, run, scratch / "merged", state, options, check=check, settings=settings
        )

    boxes = boxes_of(state.tensors(), options.kind)
    contests: Contests = {"safetensors_load_file": [], "safetensors_prefetch": []}
    if dist.get_world_size() == 1:
        contests["safetensors_load_file"] = [
            case("safetensors_load_file", peers.load_files, backend=backend)
            for backend in peers.load_file_backends(device)
        ]
    if peers.HAS_PREFETCH and device.type == "cuda" and options.kind == "dim0":
        contests["safetensors_prefetch"] = [
            case("safetensors_prefetch", peers.prefetch_files, boxes=boxes, threads=threads)
            for threads in (8, 16)
        ]
    return contests


def check_damage(folder: Path, state: State) -> None:
    """Raise unless a verifying load refuses a file with one flipped bit."""
    import unified_ckpt as uc

    path, first, nbytes = max(peers.merged_files(folder), key=lambda file: file[2])
    if dist.get_rank() == 0:
        flip(path, first + nbytes // 2)
    dist.barrier()
    try:
        uc.load(
            folder,
            model=state.model,
            optimizer=state.optimizer,
            options=uc.LoadOptions(verify="read"),
        )
    except uc.IntegrityError:
        return
    raise RuntimeError(f"{path}: one bit was flipped and a load with verify='read' did not see it")


def flip(path: Path, start: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        byte = file.read(1)[0]
        file.seek(start)
        file.write(bytes([byte ^ 1]))


def load_all(options: Namespace) -> None:
    mesh = common.start_ranks()
    scratch = Path(options.scratch) / "bench_load"
    state = make_state(parse_size(options.size), options.kind, mesh, filled=False)
    options.check = partial(common.check_pattern, state, options.kind)
    unified = common.needs_unified(options.only)
    saved_kind, saved_ranks = origin(options.scenario, options.kind, mesh.size()) or ("", 0)
    same: dict[str, object] = {
        "bench": "load",
        "run": options.stamp,
        "size": options.size,
        "ranks": mesh.size(),
        "kind": options.kind,
        "scenario": options.scenario,
        "saved_kind": saved_kind,
        "saved_ranks": saved_ranks,
        "cache": "cold" if options.cold else "warm",
        "merged_by": "unified" if unified else "dcp",
        "nbytes": over_ranks(
            sum(local.nbytes for local in locals_of(state.tensors()).values()), dist.ReduceOp.SUM
        ),
        "load_average": os.getloadavg()[0],
    }
    with ExitStack() as owned:
        contests = raw_contests(scratch, state, options)
        contests |= unified_contests(scratch, state, options, owned) if unified else {}
        contests |= peer_contests(scratch, state, options)
        trials = race(
            chosen(contests, options.only), repeats=options.repeats, before_round=dist.barrier
        )
        measured = rows(trials, same=same)
        if unified:
            check_damage(scratch / "merged", state)
    if mesh.get_rank() == 0:
        common.write_rows(measured, options.out)
    dist.destroy_process_group()


def parser() -> ArgumentParser:
    arguments = common.parser(__doc__ or "")
    arguments.add_argument(
        "--scenario",
        default="same,reshard,world",
        help="same layout; other sharded dim; other number of ranks",
    )
    arguments.add_argument(
        "--cold",
        action="store_true",
        help="drop the page cache before each load (needs root to be thorough)",
    )
    return arguments


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.stage:
        {"save": save_sources, "load": load_all}[options.stage](options)
        return
    stamp = time.strftime("%Y%m%d-%H%M%S")
    common.write_rows([{**common.environment(Path(options.scratch)), "run": stamp}], options.out)
    for ranks in map(int, options.ranks.split(",")):
        for kind in options.kind.split(",") if ranks > 1 else ["dim0"]:  # one rank, one layout
            for scenario in options.scenario.split(","):
                if saved := origin(scenario, kind, ranks):
                    shared = [*arguments, "--stamp", stamp, "--scenario", scenario]
                    common.launch(
                        __file__, [*shared, "--stage", "save", "--kind", saved[0]], ranks=saved[1]
                    )
                    common.launch(
                        __file__, [*shared, "--stage", "load", "--kind", kind], ranks=ranks
                    )
    shutil.rmtree(Path(options.scratch) / "bench_load")


if __name__ == "__main__":
    main(sys.argv[1:])

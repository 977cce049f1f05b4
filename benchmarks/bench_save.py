r"""Measure how long a save of a sharded training state takes.

Unified, its peers and the disk itself, in one run, on the same bytes.

python benchmarks/bench_save.py --size 1GiB --ranks 1,2,4 --kind dim0,inner --repeats 5 \
    --out results/save.jsonl
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import common
import floors
import peers
import torch.distributed as dist
from common import State, check_equal, locals_of, make_state, parse_size
from measure import Case, Trial, chosen, dirty_bytes, over_ranks, race, rows, spread

Contests = dict[str, list[Case]]
Save = Callable[[], object]
Check = Callable[[], object]


def save_case(
    name: str,
    save: Save,
    check: Check,
    folder: Path,
    *,
    durable: bool,
    hf_loadable: bool,
    settings: Mapping[str, object],
) -> Case:
    return Case(
        name=name,
        limit="raw" if durable else "raw_nosync",
        reset=partial(common.empty, folder.parent),
        run=save,
        check=partial(check_save, check, folder, durable),
        columns={"durable": durable, "hf_loadable": hf_loadable},
        settings=settings,
    )


def check_save(check: Check, folder: Path, durable: bool) -> Mapping[str, object]:
    """Return the columns of a finished folder; raise if a durable case left a dirty page."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    dirty = {
        path.name: count
        for path in folder.iterdir()
        if path.is_file() and (count := dirty_bytes(path))
    }
    if durable and dirty:
        raise RuntimeError(
            f"{folder}: claims to be durable, but there were bytes not yet on disk when it "
            f"returned: {dirty}"
        )
    check()
    return {
        "folder_bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
        "dirty_bytes_after": sum(dirty.values()),
    }


def raw_contests(scratch: Path, state: State, *, durable_only: bool = False) -> Contests:
    """The floors, each with its best number of files and threads."""
    folder, memory = scratch / "raw", common.flat_bytes(state)
    total = memory.numel() * dist.get_world_size()

    def contest(name: str, fsync: bool) -> list[Case]:
        writing, tried = floors.best_write(folder, memory, cores=common.cores(), fsync=fsync)

        def save() -> None:
            folder.mkdir(exist_ok=True)
            floors.write_files(folder, memory, writing, fsync=fsync)

        files = floors.new_files(folder, total, count=writing.files)
        check = partial(floors.check_files, files, memory)
        case = save_case(
            name, save, check, folder, durable=fsync, hf_loadable=False, settings=asdict(writing)
        )
        return [replace(case, columns={**case.columns, "tried": tried})]

    names = {"raw": True} if durable_only else {"raw": True, "raw_nosync": False}
    return {name: contest(name, fsync) for name, fsync in names.items()}


def unified_contests(scratch: Path, state: State, options: Namespace, owned: ExitStack) -> Contests:
    import unified_ckpt as uc

    folder = scratch / "checkpoint-1"
    check = partial(peers.check_merged, folder, state, options.kind)

    def contest(name: str, fsync: bool, reused: bool) -> list[Case]:
        save_options = uc.SaveOptions(fsync=fsync, max_file_bytes=options.max_file_bytes)
        save = (
            owned.enter_context(uc.Checkpointer(options=save_options)).save
            if reused
            else partial(uc.save, options=save_options)
        )
        run = partial(save, folder, model=state.model, optimizer=state.optimizer)
        return [
            save_case(
                name,
                run,
                check,
                folder,
                durable=fsync,
                hf_loadable=True,
                settings={"checkpointer": "reused" if reused else "new"},
            )
        ]

    return {
        "unified": contest("unified", fsync=True, reused=True),
        "unified_nosync": contest("unified_nosync", fsync=False, reused=True),
        "unified_oneshot": contest("unified_oneshot", fsync=True, reused=False),
    }


def shard_contests(scratch: Path, state: State) -> Contests:
    def contest(name: str, suffix: str, fsync: bool) -> list[Case]:
        folder = scratch / name

        def save() -> None:
            folder.mkdir(exist_ok=True)
            peers.write_shards(folder, state, suffix=suffix, fsync=fsync)

        def check() -> None:
            check_equal(
                peers.read_shards(folder, suffix=suffix), locals_of(state.tensors()), where=name
            )

        merged = suffix == "safetensors" and dist.get_world_size() == 1
        return [
            save_case(name, save, check, folder, durable=fsync, hf_loadable=merged, settings={})
        ]

    return {
        "torch_save": contest("torch_save", "pt", True),
        "torch_save_nosync": contest("torch_save_nosync", "pt", False),
        "safetensors_save_file": contest("safetensors_save_file", "safetensors", True),
        "safetensors_save_file_nosync": contest(
            "safetensors_save_file_nosync", "safetensors", False
        ),
    }


def dcp_contests(scratch: Path, state: State, options: Namespace) -> Contests:
    mesh = next(iter(state.model.values())).device_mesh
    folder = scratch / "dcp"
    thread_choices = sorted({1, max(2, min(8, common.cores() // mesh.size()))})

    def check() -> None:
        loaded = make_state(parse_size(options.size), options.kind, mesh, filled=False)
        peers.dcp_load(folder, loaded)
        check_equal(locals_of(loaded.tensors()), locals_of(state.tensors()), where="dcp")

    def case(name: str, fsync: bool, threads: int) -> Case:
        save = partial(peers.dcp_save, folder, state, fsync=fsync, threads=threads)
        return save_case(
            name,
            save,
            check,
            folder,
            durable=fsync,
            hf_loadable=False,
            settings={"threads": threads, "plan_cache": True},
        )

    return {
        "dcp": [case("dcp", True, threads) for threads in thread_choices],
        "dcp_nosync": [case("dcp_nosync", False, threads) for threads in thread_choices],
    }


def torch_checkpointing_contests(scratch: Path, state: State, owned: ExitStack) -> Contests:
    """Each rank writes its own files, which are then synced; none if it is not installed."""
    if not peers.has_torch_checkpointing():
        return {}
    folder, name = scratch / "torch_checkpointing", "torch_checkpointing"
    manager = peers.torch_checkpointing_manager(background=False)
    owned.callback(manager.close)
    save = partial(peers.torch_checkpointing_save, folder, state, manager)
    check = partial(peers.torch_checkpointing_check, folder, state, manager)
    return {
        name: [save_case(name, save, check, folder, durable=True, hf_loadable=False, settings={})]
    }


def hf_contests(scratch: Path, state: State, options: Namespace) -> Contests:
    folder, name = scratch / "hf", "dcp_hf_consolidated"
    mapping = peers.hf_mapping(state, max_file_bytes=options.max_file_bytes)
    check = partial(peers.check_merged, folder, state, options.kind)

    def case(everywhere: bool, threads: int) -> Case:
        def save() -> None:
            folder.mkdir(exist_ok=True)
            peers.hf_save(
                folder, state, mapping=mapping, everywhere=everywhere, threads=threads, fsync=True
            )

        by = "every rank" if everywhere else "rank 0"
        return save_case(
            name,
            save,
            check,
            folder,
            durable=True,
            hf_loadable=True,
            settings={"consolidated_by": by, "threads": threads, "plan_cache": True},
        )

    choices = (
        [(False, 1), (False, 2)]
        if dist.get_world_size() == 1
        else [(False, 2), (True, 1), (True, 2)]
    )
    return {name: [case(everywhere, threads) for everywhere, threads in choices]}


def first_row(trial: Trial, same: Mapping[str, object]) -> dict[str, object]:
    """The row of the first save of the process, which plans and fills its buffers and caches.

    Of a floor, too: its first save may be slow as well, on page cache that nobody has used yet.
    """
    return {
        **same,
        "case": f"{trial.case.name}_first",
        **spread([trial.first.seconds]),
        **trial.case.columns,
    }


def work(options: Namespace) -> None:
    mesh = common.start_ranks()
    scratch = Path(options.scratch) / "bench_save"
    state = make_state(parse_size(options.size), options.kind, mesh)
    with ExitStack() as owned:
        contests = raw_contests(scratch, state)
        if common.needs_unified(options.only):
            contests |= unified_contests(scratch, state, options, owned)
        contests |= (
            shard_contests(scratch, state)
            | dcp_contests(scratch, state, options)
            | torch_checkpointing_contests(scratch, state, owned)
            | hf_contests(scratch, state, options)
        )
        load_average = os.getloadavg()[0]
        trials = race(
            chosen(contests, options.only),
            repeats=options.repeats,
            before_round=partial(common.bump, state),
        )
        same: dict[str, object] = {
            "bench": "save",
            "run": options.stamp,
            "size": options.size,
            "ranks": mesh.size(),
            "kind": options.kind,
            "nbytes": over_ranks(
                sum(local.nbytes for local in locals_of(state.tensors()).values()),
                dist.ReduceOp.SUM,
            ),
            "load_average": load_average,
        }
        measured = rows(trials, same=same) + [
            first_row(trial, same)
            for trial in trials
            if trial.case.name in ("raw", "unified", "unified_oneshot")
        ]
    if mesh.get_rank() == 0:
        common.write_rows(measured, options.out)
    common.empty(scratch)
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    options = common.parser(__doc__ or "").parse_args(arguments)
    if options.stage:
        work(options)
        return
    run = time.strftime("%Y%m%d-%H%M%S")
    common.write_rows([{**common.environment(Path(options.scratch)), "run": run}], options.out)
    for ranks in map(int, options.ranks.split(",")):
        for kind in options.kind.split(",") if ranks > 1 else ["dim0"]:  # one rank, one layout
            common.launch(
                __file__,
                [*arguments, "--stage", "save", "--stamp", run, "--kind", kind],
                ranks=ranks,
            )


if __name__ == "__main__":
    main(sys.argv[1:])

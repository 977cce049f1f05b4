"""The cases of bench_machine.py, in blocks that run in turn."""

import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import async_cases
import bench_async
import bench_load
import bench_save
import common
import floors
import measure
import steps_cases
import torch
import torch.distributed as dist
from async_cases import Way
from common import State, make_state
from measure import Case, over_ranks
from torch.distributed.device_mesh import DeviceMesh

GOALS = ("G1", "G2", "G4", "G5", "G6")  # G3 and G7 are read from G1, G4 and G5; G8 is tests
SAVES = ("raw", "unified", "unified_oneshot", "dcp", "torch_save", "safetensors_save_file")
SAVES += ("torch_checkpointing",)
LOADS = ("raw", "unified", "unified_verified", "dcp", "torch_load", "safetensors_load")
WHOLE_LOADS = ("safetensors_load_file", "safetensors_prefetch")
COLD_LOADS = ("raw", "raw_direct", "unified", "unified_verified", "safetensors_load", "torch_load")
BACKGROUND = ("unified", "dcp_thread_cached", "dcp_process_cached", "torch_checkpointing")
LAZY = ("unified_lazy", "dcp_thread_lazy", "torch_checkpointing_lazy")

Rows = list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class Block:
    """Cases that run in turn. `weight`: its share of the time."""

    goal: str
    title: str
    weight: float
    run: Callable[[float], Rows]  # takes the seconds that it may use


# ---- the blocks of a launch


def background_block(scratch: Path, options: Namespace, mesh: DeviceMesh) -> Block:
    """G1 and G3: how long the call of a background save blocks training."""

    def run(seconds: float) -> Rows:
        state, makers = ways_of(scratch, options, mesh)
        threads = best_copy_threads(state)
        makers["memcpy"] = partial(async_cases.memcpy_way, state, "dim0", threads=threads)
        with ExitStack() as owned:
            owned.callback(async_cases.end_daemon)
            ways, failures = created(makers, ("memcpy", *BACKGROUND), owned)
            contests = [[background_case(way, scratch, state)] for way in ways]
            return race(contests, state, options, seconds, changed=True) + skipped(failures)

    return Block("G1", titled("call of save_async", mesh, "dim0", scratch), 2, run)


def ways_of(
    scratch: Path, options: Namespace, mesh: DeviceMesh
) -> tuple[State, dict[str, Callable[[], Way]]]:
    """Return the state, and what creates each way to save it in the background."""
    state = state_of("dim0", options, mesh)
    blank = partial(make_state, options.nbytes, "dim0", mesh, filled=False)
    makers = async_cases.ways(scratch, state, "dim0", blank, max_file_bytes=options.max_file_bytes)
    return state, makers


def created(
    makers: Mapping[str, Callable[[], Way]], names: Sequence[str], owned: ExitStack
) -> tuple[list[Way], dict[str, str]]:
    """Collective. Create the named ways. Return them, and the errors of those that failed."""
    ways, failures = [], dict[str, str]()
    for name in filter(makers.__contains__, names):
        if (way := measure.attempt(name, makers[name], failures)) is not None:
            owned.callback(way.close)
            ways.append(way)
    return ways, failures


def state_of(kind: str, options: Namespace, mesh: DeviceMesh) -> State:
    """Return the state of the block before if it has this kind: to fill one takes seconds."""
    if kind not in options.states:
        options.states.clear()
        options.states[kind] = make_state(options.nbytes, kind, mesh)
    return options.states[kind]


def best_copy_threads(state: State) -> int:
    """Collective. Return the number of threads that copies the state fastest in host memory."""
    if common.device_of(state).type != "cpu":
        return 1  # the GPU copies
    memory = common.flat_bytes(state)[: floors.SEARCH_NBYTES // dist.get_world_size()]
    target = torch.empty_like(memory).fill_(1)

    def seconds(threads: int) -> float:
        start = time.perf_counter()
        floors.copy_in_threads([target], [memory], threads=threads)
        return common.agree(time.perf_counter() - start)

    counts = floors.thread_counts(dist.get_world_size(), cores=common.cores())
    tried = floors.search(counts, seconds)
    return min(tried, key=tried.__getitem__)


def background_case(way: Way, scratch: Path, state: State) -> Case:
    """Only the call is timed. Then every element changes, and the save must not see it."""
    begun: list[object] = []

    def call() -> None:
        begun[:] = [way.begin(None)]

    def finish() -> None:
        common.bump(state)
        way.end(begun.pop())
        common.bump(state, by=-1)

    return Case(
        way.name,
        "memcpy",
        partial(common.empty, scratch),
        call,
        partial(bench_async.check_way, way),
        {},
        way.settings,
        finish,
    )


def lazy_block(scratch: Path, options: Namespace, mesh: DeviceMesh) -> Block:
    """G2: the call with lazy=True, and the steps until the end of the save."""

    def run(seconds: float) -> Rows:
        state, makers = ways_of(scratch, options, mesh)
        with ExitStack() as owned:
            ways, failures = created(makers, LAZY, owned)
            rows = steps_cases.measure(
                ways, scratch, state, repeats=options.repeats, seconds=seconds, failures=failures
            )
        return [{**same_columns(state), **row} for row in rows] + skipped(failures)

    return Block("G2", titled("steps beside a lazy save", mesh, "dim0", scratch), 2, run)


def save_block(scratch: Path, kind: str, options: Namespace, mesh: DeviceMesh) -> Block:
    """G4: durable saves."""

    def run(seconds: float) -> Rows:
        state = state_of(kind, options, mesh)
        of_kind = Namespace(**{**vars(options), "kind": kind})
        with ExitStack() as owned:
            contests = (
                bench_save.raw_contests(scratch, state, durable_only=True)
                | bench_save.unified_contests(scratch, state, of_kind, owned)
                | bench_save.shard_contests(scratch, state)
                | bench_save.dcp_contests(scratch, state, of_kind)
                | bench_save.torch_checkpointing_contests(scratch, state, owned)
            )
            contests["dcp"] = contests["dcp"][-1:]  # several threads: to try more takes long
            cases = [contests[name] for name in SAVES if name in contests]
            return race(cases, state, options, seconds, changed=True)

    return Block("G4", titled("durable save", mesh, kind, scratch), 2, run)


def load_block(
    scratch: Path,
    kind: str,
    options: Namespace,
    mesh: DeviceMesh,
    *,
    cold: bool = False,
    tensors: int | None = None,
) -> Block:
    """G5 and G6: loads from the page cache or from the disk."""

    def run(seconds: float) -> Rows:
        options.states.clear()
        state = make_state(options.nbytes, kind, mesh, tensors=tensors)
        stored = {name: local.clone() for name, local in common.locals_of(state.tensors()).items()}
        more = {"kind": kind, "scenario": "same", "cold": cold, "only": ""}
        check = partial(common.check_equal, common.locals_of(state.tensors()), stored)
        of_kind = Namespace(**{**vars(options), **more, "check": check})
        names = [*(COLD_LOADS if cold else LOADS), *WHOLE_LOADS]
        if tensors is not None:
            names.remove("dcp")  # minutes
        common.empty(scratch)
        bench_load.write_sources(scratch, state, of_kind, for_dcp="dcp" in names)
        with ExitStack() as owned:
            contests = (
                bench_load.raw_contests(scratch, state, of_kind)
                | bench_load.unified_contests(scratch, state, of_kind, owned)
                | bench_load.peer_contests(scratch, state, of_kind)
            )
            cases = [contests[name] for name in names if contests.get(name)]
            return race(cases, state, options, seconds)

    what = "cold load" if cold else "load from the page cache"
    if tensors is not None:
        what += f" of {tensors:,} tensors"
    return Block("G6" if cold else "G5", titled(what, mesh, kind, scratch), 2, run)


def titled(what: str, mesh: DeviceMesh, kind: str, scratch: Path) -> str:
    ranks = "1 rank" if mesh.size() == 1 else f"{mesh.size()} ranks, {kind}"
    return f"{what}, {ranks}, {'RAM disk' if in_memory(scratch) else 'disk'}"


def race(
    contests: Sequence[Sequence[Case]],
    state: State,
    options: Namespace,
    seconds: float,
    *,
    changed: bool = False,
) -> Rows:
    """Collective. Return the rows of the cases, and those of peers that failed.

    `changed`: every element changes before a round, so that no save can reuse an earlier one.
    """
    failures: dict[str, str] = {}
    trials = measure.race(
        [list(map(quick, variants)) for variants in contests],
        repeats=options.repeats,
        before_round=partial(common.bump, state) if changed else dist.barrier,
        seconds=seconds,
        failures=failures,
    )
    return measure.rows(trials, same=same_columns(state)) + skipped(failures)


def skipped(failures: Mapping[str, str]) -> Rows:
    return [{"case": name, "skipped": f"failed: {why}"} for name, why in failures.items()]


def quick(case: Case) -> Case:
    """Return a peer's case without its check, which the other benchmarks run."""
    is_checked = case.name.startswith("unified") or case.name == case.limit
    return case if is_checked else replace(case, check=dict)


def same_columns(state: State) -> dict[str, object]:
    own = sum(local.nbytes for local in common.locals_of(state.tensors()).values())
    return {
        "device": common.device_of(state).type,
        "ranks": dist.get_world_size(),
        "nbytes": over_ranks(own, dist.ReduceOp.SUM),
        "load_average": os.getloadavg()[0],
    }


def blocks(options: Namespace, mesh: DeviceMesh) -> list[Block]:
    """Return the blocks, the most telling first. One rank has only one layout."""
    scratches = [scratch_of(folder) for folder in options.scratch.split(",")]
    disks = [scratch for scratch in scratches if not in_memory(scratch)]
    kinds = ["dim0"] if mesh.size() == 1 else ["dim0", "inner"]
    listed = [background_block(scratches[0], options, mesh)]
    if mesh.size() == 1:
        listed.append(lazy_block(scratches[0], options, mesh))
    for kind in kinds:
        listed.append(save_block(scratches[0], kind, options, mesh))
        listed.append(load_block(scratches[0], kind, options, mesh))
    listed += [
        save_block(scratch, kind, options, mesh) for scratch in scratches[1:] for kind in kinds
    ]
    listed += [load_block(disk, "dim0", options, mesh, cold=True) for disk in disks[:1]]
    if mesh.size() == 1:
        small = options.small_tensors
        listed.append(load_block(scratches[0], "dim0", options, mesh, tensors=small))
    goals = options.only.split(",") if options.only else GOALS
    return [block for block in listed if block.goal in goals]


def scratch_of(folder: str) -> Path:
    return Path(folder) / "bench_machine"


def in_memory(path: Path) -> bool:
    return common.filesystem(path, Path("/proc/mounts").read_text()).endswith(" tmpfs")

"""How a case is timed: its seconds, its memory and its bytes, whatever the case does."""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import CDLL, byref, c_uint64
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from common import agree

T = TypeVar("T")
COUNTED = {
    "bytes_written": "write_bytes",
    "bytes_read": "rchar",
    "bytes_read_disk": "read_bytes",
}  # column: field of /proc/self/io
SLOW = 4  # times as long as unified_ckpt
MIN_ROUNDS = 2
CACHESTAT = 451  # number of the system call on every architecture


@dataclass(frozen=True, slots=True)
class Case:
    """One case of the benchmark. All three functions are collective; only `run` is timed."""

    name: str
    limit: str  # name of the case that does the physical minimum of the same work
    reset: Callable[[], object]
    run: Callable[[], object]
    # runs after the first and the last run: raises on wrong bytes, returns more columns
    check: Callable[[], Mapping[str, object]]
    columns: Mapping[str, object]
    settings: Mapping[str, object] = field(default_factory=dict)
    finish: Callable[[], object] = lambda: None  # what `run` began; not timed


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. `seconds` is from the first rank's start to the last rank's end.

    The other fields are those of this rank.
    """

    seconds: float
    peak_growth: int  # highest resident bytes during the run, over those before it
    growth: int  # resident bytes after the run, over those before it
    io: Mapping[str, int]
    cpu_seconds: float  # of all threads
    device_growth: int  # highest bytes on the GPU during the run, over those before it


@dataclass(slots=True)
class Trial:
    case: Case
    first: Sample
    warmups: list[Sample]
    steady: list[Sample] = field(default_factory=list)
    columns: dict[str, object] = field(default_factory=dict)

    def samples(self) -> list[Sample]:
        """The runs that count: the first only if there was time for no other."""
        return self.steady or [self.first]

    def seconds(self) -> list[float]:
        return [sample.seconds for sample in self.samples()]


def resident_bytes(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) << 10


def io_counts() -> dict[str, int]:
    return {
        key: int(value)
        for key, value in (
            line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()
        )
    }


def dirty_bytes(path: Path) -> int:
    """Return the bytes of the file that are not yet on disk: cachestat(2), Linux 6.5."""
    descriptor, span, counts = (
        os.open(path, os.O_RDONLY),
        (c_uint64 * 2)(0, 0),
        (c_uint64 * 5)(),
    )  # counts: cached, dirty, writeback, …
    try:
        if CDLL(None).syscall(CACHESTAT, descriptor, byref(span), byref(counts), 0):
            raise OSError(
                f"{path}: cachestat failed; a kernel of 6.5 or later is needed to see whether a "
                f"save is durable"
            )
    finally:
        os.close(descriptor)
    return (counts[1] + counts[2]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system


def device_bytes() -> int:
    """Return the bytes of the GPU that tensors take, and begin to note their maximum."""
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def timed(run: Callable[[], object]) -> Sample:
    """Collective. Start all ranks together, and read the one clock of their node.

    What a run leaves to be done on its GPU counts.
    """
    gc.collect()
    device_before = device_bytes()
    # resets the high-water mark to what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    before, io_before = resident_bytes("VmRSS"), io_counts()
    dist.barrier()
    cpu_before, start = cpu_seconds(), time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    end, cpu_after = time.perf_counter(), cpu_seconds()
    device_peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    peak, after, io_after = resident_bytes("VmHWM"), resident_bytes("VmRSS"), io_counts()
    times = torch.tensor([-start, end], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return Sample(
        float(times.sum()),
        max(0, peak - before),
        after - before,
        {key: io_after[key] - io_before[key] for key in io_after},
        cpu_after - cpu_before,
        device_peak - device_before,
    )


def run_once(case: Case) -> Sample:
    """Collective."""
    case.reset()
    sample = timed(case.run)
    case.finish()
    return sample


def try_out(variants: Sequence[Case]) -> Trial:
    """Collective. Run the case for the first time.

    If it has variants, the one with the fastest second run stays in the race.
    """
    trials = []
    for case in variants:
        # memory that another case freed must not hide what this one takes
        CDLL(None).malloc_trim(0)
        trial = Trial(case, run_once(case), [])
        trial.columns.update(case.check())
        if len(variants) > 1:
            trial.warmups.append(run_once(case))
        trials.append(trial)
    return min(trials, key=second_run)


def attempt(name: str, act: Callable[[], T], failures: dict[str, str]) -> T | None:
    """Collective. Call `act`, and return its result. If a peer fails, note that in `failures`."""
    result, error = None, "on another rank"
    try:
        result = act()
    except Exception as raised:
        if name.startswith(("unified", "raw", "memcpy")):
            raise
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    if agree(float(result is None)):
        failures[name] = error
        return None
    return result


def second_run(trial: Trial) -> float:
    return trial.warmups[0].seconds if trial.warmups else trial.first.seconds


def race(
    contests: Iterable[Sequence[Case]],
    *,
    repeats: int,
    before_round: Callable[[], object],
    seconds: float = math.inf,
    failures: dict[str, str] | None = None,
) -> list[Trial]:
    """Collective. Run each case once per round, in order (A B C, A B C, …).

    So drift of the machine affects all cases alike. Where the time is limited to `seconds`, there
    may be fewer rounds, and cases that take much longer than unified_ckpt run only once. With
    `failures`, it gets the error of each peer that fails at first, and the others go on.
    """
    started = time.perf_counter()
    trials = [
        trial
        for variants in contests
        if (
            trial := try_out(variants)
            if failures is None
            else attempt(variants[0].name, partial(try_out, variants), failures)
        )
    ]
    racing = trials if seconds == math.inf else fast_enough(trials)
    round_start = 0.0
    for number in range(repeats):
        now = time.perf_counter()
        if number >= MIN_ROUNDS and agree(2 * now - round_start - started) > seconds:
            break  # a round like the last would take too long
        round_start = now
        before_round()
        for trial in racing:
            trial.steady.append(run_once(trial.case))
            if number == 0:
                trial.columns.update(trial.case.check())
    return trials


def fast_enough(trials: Sequence[Trial]) -> list[Trial]:
    ours = [trial for trial in trials if trial.case.name.startswith("unified")]
    bound = SLOW * min((second_run(trial) for trial in ours), default=math.inf)
    return [trial for trial in trials if trial in ours or second_run(trial) <= bound]


def peak_extra_bytes(samples: Iterable[Sample]) -> int:
    """Return the peak memory of a case on this rank. Kept buffers count in every later run."""
    growth = peak = 0
    for sample in samples:
        peak = max(peak, growth + sample.peak_growth)
        growth = max(0, growth + sample.growth)
    return peak


def over_ranks(value: int, operation: dist.ReduceOp.RedOpType) -> int:
    reduced = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(reduced, operation)
    return int(reduced)


def round_ratios(seconds: Sequence[float], limit: Sequence[float]) -> list[float]:
    """Return the ratio of each round that both ran in."""
    return [value / bound for value, bound in zip(seconds, limit, strict=False)]


def spread(seconds: Sequence[float]) -> dict[str, object]:
    return {
        "seconds_median": round(statistics.median(seconds), 4),
        "seconds_min": round(min(seconds), 4),
        "seconds_max": round(max(seconds), 4),
        "n": len(seconds),
        "rounds": [round(value, 4) for value in seconds],
    }


def row(trial: Trial, limit: Trial, *, same: Mapping[str, object]) -> dict[str, object]:
    """Collective. Return the trial as one row; all rows of this run share `same`."""
    last, samples = trial.samples()[-1].io, [trial.first, *trial.warmups, *trial.steady]
    cpu = agree(min(sample.cpu_seconds for sample in trial.samples()))
    device = max(sample.device_growth for sample in samples)
    ratio = statistics.median(round_ratios(trial.seconds(), limit.seconds()))
    return {
        **same,
        "case": trial.case.name,
        **spread(trial.seconds()),
        "first_seconds": round(trial.first.seconds, 4),
        "ratio": round(ratio, 3),
        "ratio_of_mins": round(min(trial.seconds()) / min(limit.seconds()), 3),
        "ratio_of": limit.case.name,
        "cpu_seconds": round(cpu, 3),
        "peak_extra_bytes": over_ranks(peak_extra_bytes(samples), dist.ReduceOp.MAX),
        "peak_extra_device_bytes": over_ranks(device, dist.ReduceOp.MAX),
        **{name: over_ranks(last[key], dist.ReduceOp.SUM) for name, key in COUNTED.items()},
        **trial.case.columns,
        **trial.columns,
        "settings": dict(trial.case.settings),
    }


def rows(trials: Sequence[Trial], *, same: Mapping[str, object]) -> list[dict[str, object]]:
    by_name = {trial.case.name: trial for trial in trials}
    return [row(trial, by_name[trial.case.limit], same=same) for trial in trials]


def chosen(contests: Mapping[str, Sequence[Case]], only: str) -> list[Sequence[Case]]:
    """Return the contests named in `only` (all if empty) with their limits, in the order given.

    A contest without variants does not apply here.
    """
    requested = {name for name in only.split(",") if name} or set(contests)
    if unknown := requested - contests.keys():
        raise SystemExit(f"--only: no case {sorted(unknown)}; there are {', '.join(contests)}")
    requested |= {case.limit for name in requested for case in contests[name]}
    return [variants for name, variants in contests.items() if name in requested and variants]

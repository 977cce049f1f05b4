"""How a case is timed: what counts as its seconds, its memory and its bytes. Knows nothing of what
a case does.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import CDLL, byref, c_uint64
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

COUNTED = {
    "bytes_written": "write_bytes",
    "bytes_read": "rchar",
    "bytes_read_disk": "read_bytes",
}  # column: count of /proc/self/io
CACHESTAT = 451  # number of the system call on every architecture


@dataclass(frozen=True, slots=True)
class Case:
    """One way to do the job. All three functions are collective; only `run` is timed."""

    name: str
    limit: str  # name of the case that does the physical minimum of the same work
    reset: Callable[[], object]
    run: Callable[[], object]
    check: Callable[
        [], Mapping[str, object]
    ]  # after the first and the last run: raises on wrong bytes; gives more columns
    columns: Mapping[str, object]
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. `seconds`: first rank's start to last rank's end. The others are this rank's own."""

    seconds: float
    peak_growth: int  # highest resident bytes during the run, over those before it
    kept: int  # resident bytes after the run, over those before it
    io: Mapping[str, int]


@dataclass(slots=True)
class Trial:
    case: Case
    first: Sample
    warmups: list[Sample]
    steady: list[Sample] = field(default_factory=list)
    columns: dict[str, object] = field(default_factory=dict)

    def seconds(self) -> list[float]:
        return [sample.seconds for sample in self.steady]


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
    """Bytes of the file that are in memory only, or on their way to the disk: cachestat(2), Linux
    6.5.
    """
    descriptor, span, found = (
        os.open(path, os.O_RDONLY),
        (c_uint64 * 2)(0, 0),
        (c_uint64 * 5)(),
    )  # found: cached, dirty, writeback, …
    try:
        if CDLL(None).syscall(CACHESTAT, descriptor, byref(span), byref(found), 0):
            raise OSError(
                f"{path}: cachestat failed; a kernel of 6.5 or later is needed to see whether a "
                f"save is durable"
            )
    finally:
        os.close(descriptor)
    return (found[1] + found[2]) * os.sysconf("SC_PAGE_SIZE")


def timed(run: Callable[[], object]) -> Sample:
    """Collective. All ranks start together and read the one clock of their node."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # the high-water mark starts again at what is resident now
    before, io_before = resident_bytes("VmRSS"), io_counts()
    dist.barrier()
    start = time.perf_counter()
    run()
    end = time.perf_counter()
    peak, after, io_after = resident_bytes("VmHWM"), resident_bytes("VmRSS"), io_counts()
    times = torch.tensor([-start, end], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return Sample(
        float(times.sum()),
        max(0, peak - before),
        after - before,
        {key: io_after[key] - io_before[key] for key in io_after},
    )


def try_out(variants: Sequence[Case]) -> Trial:
    """Collective. First run of the case; where it has variants, the fastest of them by its second
    run stays in the race.
    """
    trials = []
    for case in variants:
        CDLL(None).malloc_trim(
            0
        )  # memory that another case freed must not hide what this one takes
        case.reset()
        trial = Trial(case, timed(case.run), [])
        trial.columns.update(case.check())
        if len(variants) > 1:
            case.reset()
            trial.warmups.append(timed(case.run))
        trials.append(trial)
    return min(trials, key=second_run)


def second_run(trial: Trial) -> float:
    return trial.warmups[0].seconds if trial.warmups else trial.first.seconds


def race(
    contests: Iterable[Sequence[Case]], *, repeats: int, before_round: Callable[[], object]
) -> list[Trial]:
    """Collective. Every round runs each case once, in order (A B C, A B C, …), so that drift of the
    machine hits all alike.
    """
    trials = [try_out(variants) for variants in contests]
    for number in range(repeats):
        before_round()
        for trial in trials:
            trial.case.reset()
            trial.steady.append(timed(trial.case.run))
            if number == repeats - 1:
                trial.columns.update(trial.case.check())
    return trials


def peak_extra_bytes(samples: Iterable[Sample]) -> int:
    """Return the peak memory of a case on this rank. Kept buffers count in every later run."""
    held = peak = 0
    for sample in samples:
        peak = max(peak, held + sample.peak_growth)
        held = max(0, held + sample.kept)
    return peak


def over_ranks(value: int, operation: dist.ReduceOp.RedOpType) -> int:
    reduced = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(reduced, operation)
    return int(reduced)


def round_ratios(seconds: Sequence[float], of: Sequence[float]) -> list[float]:
    return [mine / other for mine, other in zip(seconds, of, strict=True)]


def spread(seconds: Sequence[float]) -> dict[str, object]:
    return {
        "seconds_median": round(statistics.median(seconds), 4),
        "seconds_min": round(min(seconds), 4),
        "seconds_max": round(max(seconds), 4),
        "n": len(seconds),
        "rounds": [round(value, 4) for value in seconds],
    }


def row(trial: Trial, limit: Trial, *, same: Mapping[str, object]) -> dict[str, object]:
    """Collective. The trial as one JSON line; `same` is what all rows of this run share."""
    last = trial.steady[-1].io
    ratio = statistics.median(round_ratios(trial.seconds(), limit.seconds()))
    return {
        **same,
        "case": trial.case.name,
        **spread(trial.seconds()),
        "first_seconds": round(trial.first.seconds, 4),
        "ratio": round(ratio, 3),
        "ratio_of_mins": round(min(trial.seconds()) / min(limit.seconds()), 3),
        "ratio_of": limit.case.name,
        "peak_extra_bytes": over_ranks(
            peak_extra_bytes([trial.first, *trial.warmups, *trial.steady]), dist.ReduceOp.MAX
        ),
        **{name: over_ranks(last[key], dist.ReduceOp.SUM) for name, key in COUNTED.items()},
        **trial.case.columns,
        **trial.columns,
        "settings": dict(trial.case.settings),
    }


def rows(trials: Sequence[Trial], *, same: Mapping[str, object]) -> list[dict[str, object]]:
    by_name = {trial.case.name: trial for trial in trials}
    return [row(trial, by_name[trial.case.limit], same=same) for trial in trials]


def chosen(contests: Mapping[str, Sequence[Case]], only: str) -> list[Sequence[Case]]:
    """The contests named in `only` (all when empty) with their limits, in the order given. One
    without variants does not apply here.
    """
    wanted = {name for name in only.split(",") if name} or set(contests)
    if unknown := wanted - contests.keys():
        raise SystemExit(f"--only: no case {sorted(unknown)}; there are {', '.join(contests)}")
    wanted |= {case.limit for name in wanted for case in contests[name]}
    return [variants for name, variants in contests.items() if name in wanted and variants]

r"""Measure how long a background save blocks training, and how fast training runs during one.

python benchmarks/bench_async.py --size 1GiB --ranks 1,2 --kind dim0,inner,replica \
    --out results/async.jsonl
"""

import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import async_cases
import common
import torch
import torch.distributed as dist
from async_cases import Rate, Way
from bench_save import check_save
from common import State, make_state, parse_size
from measure import Case, Trial, over_ranks, peak_extra_bytes, race, round_ratios, spread
from torch import nn

QUESTIONS = ("blocked", "throttled", "steps")
THROTTLE = 100e6  # bytes a second
COMPUTE_TIMES_COPY = 4  # how long forward and backward last
STEP_SECONDS = 0.010
# The ways that training runs against: of each engine, the one that leaves most steps.
STEPS_CASES = ("unified", "dcp_thread_cached", "dcp_process_cached", "torch_save")
SLOWED = (
    "memcpy",
    "unified",
    "unified_lazy",
    "dcp_thread_cached",
    "dcp_process_cached",
    "torch_save",
)


# ---- what training computes during a save


class Compute:
    """Stands for forward and backward: one thread that multiplies matrices."""

    def __init__(self) -> None:
        self._a, self._b, self._c = (torch.ones(384, 384) for _ in range(3))

    def rate(self, seconds: float) -> float:
        """Multiply for `seconds`; return the products per second."""
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            torch.matmul(self._a, self._b, out=self._c)
            count += 1
        return count / (now - start)


def training(width: int, rows: int) -> Callable[[int], None]:
    """Return a function that trains a small network of `layers` layers for one step."""
    layer = nn.Linear(width, width)
    x, optimizer = (
        torch.ones(rows, width),
        torch.optim.SGD(layer.parameters(), lr=0.0, foreach=False),
    )

    def step(layers: int) -> None:
        y = x
        for _ in range(layers):
            y = layer(y).relu()
        torch.autograd.backward(y.sum())
        optimizer.step()
        optimizer.zero_grad()

    return step


def calibrated(step: Callable[[int], None]) -> Callable[[], None]:
    """Return the step with as many layers as take about STEP_SECONDS."""
    layers = 8
    for _ in range(4):
        step(layers)
        start = time.perf_counter()
        for _ in range(10):
            step(layers)
        layers = max(1, round(layers * STEP_SECONDS * 10 / (time.perf_counter() - start)))
    return partial(step, layers)


# ---- one save, and what it cost


@dataclass(slots=True)
class Times:
    """Times of every run on this rank, in order; `blocked` and `durable` cover all ranks later."""

    start: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    compute_ratios: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)

    def gather(self) -> None:
        """Collective. Reduce to the time from the first rank's start to the last rank's end.

        The ranks are on one machine and share its clock.
        """
        stamps = torch.tensor(
            [[-start for start in self.start], self.returned, self.waited, self.end],
            dtype=torch.float64,
        )
        dist.all_reduce(stamps, dist.ReduceOp.MAX)
        self.blocked = (stamps[0] + stamps[1] + stamps[2]).tolist()
        self.durable = (stamps[0] + stamps[3]).tolist()


def save_once(
    way: Way, state: State, rate: Rate, times: Times, compute: Compute, compute_seconds: float
) -> None:
    """Collective. Begin a save, change every element as soon as that is allowed, end the save.

    Afterwards the state is restored.
    """
    alone = compute.rate(compute_seconds) if way.wait else 0.0
    dist.barrier()
    times.start.append(time.perf_counter())
    pending = way.begin(rate)
    times.returned.append(time.perf_counter())
    waited = 0.0
    if way.wait is not None:
        times.compute_ratios.append(compute.rate(compute_seconds) / alone)
        start = time.perf_counter()
        way.wait(pending)
        waited = time.perf_counter() - start
    times.waited.append(waited)
    common.bump(state)
    way.end(pending)
    times.end.append(time.perf_counter())
    common.bump(state, by=-1)


def check_way(way: Way) -> Mapping[str, object]:
    if way.folder is None:
        way.check()
        return {}
    return {**check_save(way.check, way.folder, durable=True), **way.columns()}


def raced(
    chosen: Sequence[tuple[Way, Rate]], state: State, options: Namespace
) -> list[tuple[Trial, Times]]:
    """Collective. Run every way in every round; only the inside of `save_once` is timed."""
    compute, all_times, contests = Compute(), [Times() for _ in chosen], []
    seconds = COMPUTE_TIMES_COPY * copy_seconds(state, options.kind)
    for (way, rate), times in zip(chosen, all_times, strict=True):
        run = partial(save_once, way, state, rate, times, compute, seconds)
        reset = partial(common.empty, scratch_of(options))
        contests.append(
            [Case(way.name, "memcpy", reset, run, partial(check_way, way), {}, way.settings)]
        )
    trials = race(contests, repeats=options.repeats, before_round=partial(common.bump, state))
    for times in all_times:
        times.gather()
    return list(zip(trials, all_times, strict=True))


def copy_seconds(state: State, kind: str) -> float:
    """Collective. Return how long the copy takes, the same on every rank."""
    way = async_cases.memcpy_way(state, kind)
    start = time.perf_counter()
    way.begin(None)
    return over_ranks(int((time.perf_counter() - start) * 1e6), dist.ReduceOp.MAX) / 1e6


# ---- rows


def ratios(seconds: Sequence[float], limit: Sequence[float]) -> dict[str, object]:
    return {
        "ratio": round(statistics.median(round_ratios(seconds, limit)), 4),
        "ratio_of_mins": round(min(seconds) / min(limit), 4),
    }


def blocked_row(
    trial: Trial, times: Times, limit: Times, *, same: Mapping[str, object]
) -> dict[str, object]:
    """Collective."""
    blocked, rounds = (
        times.blocked[1:],
        {"durable_rounds": [round(seconds, 4) for seconds in times.durable[1:]]},
    )
    row: dict[str, object] = {
        **same,
        "case": trial.case.name,
        **spread(blocked),
        "first_seconds": round(times.blocked[0], 4),
        **ratios(blocked, limit.blocked[1:]),
        "ratio_of": "memcpy",
        "peak_extra_bytes": over_ranks(
            peak_extra_bytes([trial.first, *trial.steady]), dist.ReduceOp.MAX
        ),
        **trial.columns,
        "settings": dict(trial.case.settings),
    }
    if trial.case.name != "memcpy":
        row |= {"durable_median": round(statistics.median(times.durable[1:]), 4), **rounds}
    if times.compute_ratios:
        waited = over_ranks(int(statistics.median(times.waited[1:]) * 1e6), dist.ReduceOp.MAX) / 1e6
        row |= {
            "waited_median": waited,
            "compute_kept": round(statistics.median(times.compute_ratios[1:]), 3),
        }
    return row


def measure_blocked(
    options: Namespace, state: State, chosen: Sequence[Way], same: Mapping[str, object]
) -> list[dict[str, object]]:
    """Measure how long training is blocked, when the save is durable, and the memory it uses."""
    results = raced([(way, None) for way in chosen], state, options)
    limit = results[0][1]
    return [
        blocked_row(trial, times, limit, same={**same, "bench": "async"})
        for trial, times in results
    ]


def measure_throttled(
    options: Namespace, state: State, chosen: Sequence[Way], same: Mapping[str, object]
) -> list[dict[str, object]]:
    """Measure how much longer a storage of 100 MB/s blocks training.

    The same ways run without and with the limit, in turn.
    """
    results = raced([(way, rate) for way in chosen for rate in (None, THROTTLE)], state, options)
    rows = []
    for (trial, fast), (_, throttled) in zip(results[::2], results[1::2], strict=True):
        blocked = throttled.blocked[1:]
        rows.append(
            {
                **same,
                "bench": "async_throttled",
                "case": trial.case.name,
                **spread(blocked),
                **ratios(blocked, fast.blocked[1:]),
                "ratio_of": "unthrottled",
                "unthrottled_rounds": [round(seconds, 4) for seconds in fast.blocked[1:]],
                "durable_median": round(statistics.median(throttled.durable[1:]), 4),
                "throttle": THROTTLE,
                "settings": dict(trial.case.settings),
            }
        )
    return rows


# ---- steps during saves that follow each other


def steps_alone(step: Callable[[], None], seconds: float) -> float:
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        step()
        count += 1
    return count / (time.perf_counter() - start)


def steps_during(
    step: Callable[[], None], way: Way, options: Namespace, seconds: float
) -> tuple[float, float]:
    """Return the steps per second while saves follow each other.

    The second value includes the time of their calls.
    """
    count, inside, blocked = 0, 0.0, 0.0
    while inside < seconds:
        common.empty(scratch_of(options))
        begun = time.perf_counter()
        pending = way.begin(None)
        start = time.perf_counter()
        while not way.done(pending):
            step()
            count += 1
        end = time.perf_counter()
        way.end(pending)
        inside, blocked = inside + end - start, blocked + start - begun
    return count / inside, count / (inside + blocked)


def check_save_during(way: Way, state: State, step: Callable[[], None], options: Namespace) -> None:
    """Check one more save, of a state that changes during it."""
    common.empty(scratch_of(options))
    pending = way.begin(None)
    common.bump(state)
    while not way.done(pending):
        step()
    way.end(pending)
    common.bump(state, by=-1)
    check_way(way)


def measure_steps(
    options: Namespace, state: State, chosen: Sequence[Way], same: Mapping[str, object]
) -> list[dict[str, object]]:
    """Measure the share of its step rate that training keeps during a save.

    One rank, so that one core is free.
    """
    rows: list[dict[str, object]] = []
    for ops, network in (("matmul", training(512, 64)), ("tiny", training(8, 2))):
        step = calibrated(network)
        rounds: dict[str, list[tuple[float, float, float]]] = {way.name: [] for way in chosen}
        for number in range(options.repeats + 1):
            for way in chosen:
                alone = steps_alone(step, options.seconds)
                rates = steps_during(step, way, options, options.seconds)
                if number:  # the first round creates plans and buffers
                    rounds[way.name].append((alone, *rates))
        for way in chosen:
            check_save_during(way, state, step, options)
            rows.append(
                {**same, "bench": "async_steps", "ops": ops, **steps_row(way, rounds[way.name])}
            )
    return rows


def steps_row(way: Way, rounds: Sequence[tuple[float, float, float]]) -> dict[str, object]:
    alone, during, over_all = zip(*rounds, strict=True)
    return {
        "case": way.name,
        "alone": round(statistics.median(alone), 1),
        "beside": round(statistics.median(during), 1),
        "rounds": [
            round(rate / alone_rate, 4) for rate, alone_rate in zip(during, alone, strict=True)
        ],
        "ratio": round(
            statistics.median(
                rate / alone_rate for rate, alone_rate in zip(during, alone, strict=True)
            ),
            3,
        ),
        "ratio_with_calls": round(
            statistics.median(
                rate / alone_rate for rate, alone_rate in zip(over_all, alone, strict=True)
            ),
            3,
        ),
        "n": len(rounds),
        "settings": dict(way.settings),
    }


# ---- the run


def scratch_of(options: Namespace) -> Path:
    return Path(options.scratch) / "bench_async"


def chosen_ways(options: Namespace, state: State, blank: Callable[[], State]) -> list[Way]:
    makers = async_cases.ways(
        scratch_of(options), state, options.kind, blank, max_file_bytes=options.max_file_bytes
    )
    requested = {name for name in options.only.split(",") if name} or set(makers)
    if unknown := requested - makers.keys():
        raise SystemExit(f"--only: no case {sorted(unknown)}; there are {', '.join(makers)}")
    suitable = {"blocked": set(makers), "throttled": set(SLOWED), "steps": set(STEPS_CASES)}[
        options.stage
    ]
    limit = set() if options.stage == "steps" else {"memcpy"}
    return [make() for name, make in makers.items() if name in (requested & suitable) | limit]


def work(options: Namespace) -> None:
    mesh = common.start_ranks()
    state = make_state(parse_size(options.size), options.kind, mesh)
    blank = partial(make_state, parse_size(options.size), options.kind, mesh, filled=False)
    same: dict[str, object] = {
        "run": options.stamp,
        "size": options.size,
        "ranks": mesh.size(),
        "kind": options.kind,
        "nbytes": state.nbytes,
        "load_average": os.getloadavg()[0],
    }
    measure = {"blocked": measure_blocked, "throttled": measure_throttled, "steps": measure_steps}[
        options.stage
    ]
    with ExitStack() as owned:
        owned.callback(async_cases.end_daemon)
        chosen = chosen_ways(options, state, blank)
        for way in chosen:
            owned.callback(way.close)
        rows = measure(options, state, chosen, same)
    if mesh.get_rank() == 0:
        common.write_rows(rows, options.out)
    common.empty(scratch_of(options))
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument(
        "--question", default="blocked", help=f"comma-separated, of {', '.join(QUESTIONS)}"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="of steps: how long each measurement of steps takes at least",
    )
    options = parser.parse_args(arguments)
    if options.stage:
        work(options)
        return
    run = time.strftime("%Y%m%d-%H%M%S")
    common.write_rows([{**common.environment(Path(options.scratch)), "run": run}], options.out)
    for question in options.question.split(","):
        for ranks in map(int, options.ranks.split(",")) if question != "steps" else [1]:
            for kind in options.kind.split(",") if ranks > 1 else ["dim0"]:  # one rank, one layout
                stage = [*arguments, "--stage", question, "--stamp", run, "--kind", kind]
                common.launch(__file__, stage, ranks=ranks)


if __name__ == "__main__":
    main(sys.argv[1:])

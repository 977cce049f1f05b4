"""How long does training stand still for a save in the background, whatever the storage, and how
well does it run beside one?

python benchmarks/bench_async.py --size 1GiB --ranks 1,2 --kind dim0,inner,replica --out results/async.jsonl
"""  # noqa: E501

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
# What training runs beside: of each engine what keeps most of the steps.
BESIDE = ("unified", "dcp_thread_cached", "dcp_process_cached", "torch_save")
SLOWED = (
    "memcpy",
    "unified",
    "unified_lazy",
    "dcp_thread_cached",
    "dcp_process_cached",
    "torch_save",
)


# ---- what training does meanwhile


class Compute:
    """Forward and backward, as far as a save in the background can tell: one thread that
    multiplies.
    """

    def __init__(self) -> None:
        self._a, self._b, self._c = (torch.ones(384, 384) for _ in range(3))

    def rate(self, seconds: float) -> float:
        """Goes on for so long; how many products a second that made."""
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            torch.matmul(self._a, self._b, out=self._c)
            count += 1
        return count / (now - start)


def training(width: int, rows: int) -> Callable[[int], None]:
    """Steps of a small network: forward, backward, update, as many layers as asked for."""
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
    """The step with as many layers as take about STEP_SECONDS."""
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
    compute_kept: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)

    def gather(self) -> None:
        """Collective. From the first rank's start to the last one's end; the ranks are on one
        machine and have one clock.
        """
        stamps = torch.tensor(
            [[-one for one in self.start], self.returned, self.waited, self.end],
            dtype=torch.float64,
        )
        dist.all_reduce(stamps, dist.ReduceOp.MAX)
        self.blocked = (stamps[0] + stamps[1] + stamps[2]).tolist()
        self.durable = (stamps[0] + stamps[3]).tolist()


def save_once(
    way: Way, state: State, rate: Rate, times: Times, compute: Compute, compute_seconds: float
) -> None:
    """Collective. Begins a save, changes every element as soon as it may change, ends the save; the
    state is then what it was.
    """
    alone = compute.rate(compute_seconds) if way.wait else 0.0
    dist.barrier()
    times.start.append(time.perf_counter())
    pending = way.begin(rate)
    times.returned.append(time.perf_counter())
    waited = 0.0
    if way.wait is not None:
        times.compute_kept.append(compute.rate(compute_seconds) / alone)
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
    """Collective. Every way in every round; only what happens inside `save_once` is timed."""
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
    """Collective. How long the copy takes, the same on every rank."""
    way = async_cases.memcpy_way(state, kind)
    start = time.perf_counter()
    way.begin(None)
    return over_ranks(int((time.perf_counter() - start) * 1e6), dist.ReduceOp.MAX) / 1e6


# ---- rows


def ratios(mine: Sequence[float], of: Sequence[float]) -> dict[str, object]:
    return {
        "ratio": round(statistics.median(round_ratios(mine, of)), 4),
        "ratio_of_mins": round(min(mine) / min(of), 4),
    }


def blocked_row(
    trial: Trial, times: Times, limit: Times, *, same: Mapping[str, object]
) -> dict[str, object]:
    """Collective."""
    mine, rounds = (
        times.blocked[1:],
        {"durable_rounds": [round(one, 4) for one in times.durable[1:]]},
    )
    found: dict[str, object] = {
        **same,
        "case": trial.case.name,
        **spread(mine),
        "first_seconds": round(times.blocked[0], 4),
        **ratios(mine, limit.blocked[1:]),
        "ratio_of": "memcpy",
        "peak_extra_bytes": over_ranks(
            peak_extra_bytes([trial.first, *trial.steady]), dist.ReduceOp.MAX
        ),
        **trial.columns,
        "settings": dict(trial.case.settings),
    }
    if trial.case.name != "memcpy":
        found |= {"durable_median": round(statistics.median(times.durable[1:]), 4), **rounds}
    if times.compute_kept:
        waited = over_ranks(int(statistics.median(times.waited[1:]) * 1e6), dist.ReduceOp.MAX) / 1e6
        found |= {
            "waited_median": waited,
            "compute_kept": round(statistics.median(times.compute_kept[1:]), 3),
        }
    return found


def ask_blocked(
    options: Namespace, state: State, chosen: Sequence[Way], same: Mapping[str, object]
) -> list[dict[str, object]]:
    """How long does training stand still, how long until the save is durable, how much memory does
    it take?
    """
    found = raced([(way, None) for way in chosen], state, options)
    limit = found[0][1]
    return [
        blocked_row(trial, times, limit, same={**same, "bench": "async"}) for trial, times in found
    ]


def ask_throttled(
    options: Namespace, state: State, chosen: Sequence[Way], same: Mapping[str, object]
) -> list[dict[str, object]]:
    """How much longer does it stand still when the storage takes 100 MB/s? The same ways, without
    and with, in turn.
    """
    found = raced([(way, rate) for way in chosen for rate in (None, THROTTLE)], state, options)
    rows = []
    for (trial, fast), (_, throttled) in zip(found[::2], found[1::2], strict=True):
        mine = throttled.blocked[1:]
        rows.append(
            {
                **same,
                "bench": "async_throttled",
                "case": trial.case.name,
                **spread(mine),
                **ratios(mine, fast.blocked[1:]),
                "ratio_of": "unthrottled",
                "unthrottled_rounds": [round(one, 4) for one in fast.blocked[1:]],
                "durable_median": round(statistics.median(throttled.durable[1:]), 4),
                "throttle": THROTTLE,
                "settings": dict(trial.case.settings),
            }
        )
    return rows


# ---- steps beside a save that goes on all the time


def steps_alone(step: Callable[[], None], seconds: float) -> float:
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        step()
        count += 1
    return count / (time.perf_counter() - start)


def steps_beside(
    step: Callable[[], None], way: Way, options: Namespace, seconds: float
) -> tuple[float, float]:
    """Steps a second while a save is on its way, saves following each other; and with the time that
    their calls took.
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


def check_beside(way: Way, state: State, step: Callable[[], None], options: Namespace) -> None:
    """One more save, of a state that changes while it goes on."""
    common.empty(scratch_of(options))
    pending = way.begin(None)
    common.bump(state)
    while not way.done(pending):
        step()
    way.end(pending)
    common.bump(state, by=-1)
    check_way(way)


def ask_steps(
    options: Namespace, state: State, chosen: Sequence[Way], same: Mapping[str, object]
) -> list[dict[str, object]]:
    """How many steps a second does training keep beside a save? On one rank, so that a core is
    free.
    """
    rows: list[dict[str, object]] = []
    for ops, made in (("matmul", training(512, 64)), ("tiny", training(8, 2))):
        step = calibrated(made)
        kept: dict[str, list[tuple[float, float, float]]] = {way.name: [] for way in chosen}
        for number in range(options.repeats + 1):
            for way in chosen:
                alone = steps_alone(step, options.seconds)
                beside = steps_beside(step, way, options, options.seconds)
                if number:  # the first one makes plans and buffers
                    kept[way.name].append((alone, *beside))
        for way in chosen:
            check_beside(way, state, step, options)
            rows.append(
                {**same, "bench": "async_steps", "ops": ops, **steps_row(way, kept[way.name])}
            )
    return rows


def steps_row(way: Way, kept: Sequence[tuple[float, float, float]]) -> dict[str, object]:
    alone, beside, over_all = zip(*kept, strict=True)
    return {
        "case": way.name,
        "alone": round(statistics.median(alone), 1),
        "beside": round(statistics.median(beside), 1),
        "rounds": [round(mine / other, 4) for mine, other in zip(beside, alone, strict=True)],
        "ratio": round(
            statistics.median(mine / other for mine, other in zip(beside, alone, strict=True)), 3
        ),
        "ratio_with_calls": round(
            statistics.median(mine / other for mine, other in zip(over_all, alone, strict=True)), 3
        ),
        "n": len(kept),
        "settings": dict(way.settings),
    }


# ---- the run


def scratch_of(options: Namespace) -> Path:
    return Path(options.scratch) / "bench_async"


def chosen_ways(options: Namespace, state: State, blank: Callable[[], State]) -> list[Way]:
    made = async_cases.ways(
        scratch_of(options), state, options.kind, blank, max_file_bytes=options.max_file_bytes
    )
    wanted = {name for name in options.only.split(",") if name} or set(made)
    if unknown := wanted - made.keys():
        raise SystemExit(f"--only: no case {sorted(unknown)}; there are {', '.join(made)}")
    apt = {"blocked": set(made), "throttled": set(SLOWED), "steps": set(BESIDE)}[options.stage]
    limit = set() if options.stage == "steps" else {"memcpy"}
    return [make() for name, make in made.items() if name in (wanted & apt) | limit]


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
    ask = {"blocked": ask_blocked, "throttled": ask_throttled, "steps": ask_steps}[options.stage]
    with ExitStack() as owned:
        owned.callback(async_cases.end_daemon)
        chosen = chosen_ways(options, state, blank)
        for way in chosen:
            owned.callback(way.close)
        found = ask(options, state, chosen, same)
    if mesh.get_rank() == 0:
        common.write_rows(found, options.out)
    common.empty(scratch_of(options))
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    made = common.parser(__doc__ or "")
    made.add_argument(
        "--question", default="blocked", help=f"comma-separated, of {', '.join(QUESTIONS)}"
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="of steps: how long each measurement of steps takes at least",
    )
    options = made.parse_args(arguments)
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

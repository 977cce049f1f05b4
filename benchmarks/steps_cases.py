"""Steps of training beside lazy background saves: how long the call and the steps take.

A step multiplies matrices where the state is, and its optimizer waits for the snapshot, as
`save_async(lazy=True)` needs. Steps alone run right before each save.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from async_cases import Way
from bench_async import check_way
from common import State, agree
from measure import attempt

STEP_SECONDS = {"cpu": 0.05, "cuda": 0.2}
ALONE_SECONDS = 0.5  # of steps right before each save
WIDTH = {"cpu": 384, "cuda": 4096}  # of the matrices


@dataclass(slots=True)
class Round:
    """Seconds of one save: its call, each step until its end, and a step alone."""

    call: float
    alone: float
    steps: list[float] = field(default_factory=list)

    def slowdown(self) -> float:
        return sum(self.steps) / (len(self.steps) * self.alone) - 1


class Steps:
    """Forward and backward of a model: one stream of matrix products."""

    def __init__(self, device: torch.device) -> None:
        width = WIDTH[device.type]
        self._a, self._b, self._c = (torch.ones(width, width, device=device) for _ in range(3))
        self._products, length = 1, STEP_SECONDS[device.type]
        while (seconds := min(self.run() for _ in range(3))) < length / 2:
            self._products *= 2
        self._products = max(1, round(self._products * length / seconds))
        self.alone = max(3, round(ALONE_SECONDS / length))

    def run(self, optimizer_step: Callable[[], object] | None = None) -> float:
        """Return the seconds of one step, with all that it leaves to the GPU."""
        start = time.perf_counter()
        for _ in range(self._products):
            torch.matmul(self._a, self._b, out=self._c)
        if optimizer_step is not None:
            optimizer_step()
        if self._a.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(
    ways: Sequence[Way],
    scratch: Path,
    state: State,
    *,
    repeats: int,
    seconds: float,
    failures: dict[str, str],
) -> list[dict[str, object]]:
    """Collective. Run the ways in turn, as many rounds as `seconds` allow; return a row for each.

    The first round is not counted: it makes plans and buffers, and what it saved is checked.
    `failures` gets the errors of peers that fail in it.
    """
    steps, start = Steps(common.device_of(state)), time.perf_counter()

    def first(way: Way) -> Round:
        saved = save_beside(way, scratch, steps, changes=state)
        check_way(way)
        return saved

    ways = [way for way in ways if attempt(way.name, partial(first, way), failures)]
    rounds: dict[str, list[Round]] = {way.name: [] for way in ways}
    for number in range(repeats):
        if number and agree(time.perf_counter() - start) > seconds:
            break
        for way in ways:
            rounds[way.name].append(save_beside(way, scratch, steps))
    return [row(way, rounds[way.name]) for way in ways]


def save_beside(way: Way, scratch: Path, steps: Steps, *, changes: State | None = None) -> Round:
    """Collective. Train until a save is done; `changes` changes once the first step allows it."""
    common.empty(scratch)
    alone = statistics.median(steps.run() for _ in range(steps.alone))
    start = time.perf_counter()
    pending = way.begin(None)
    result = Round(time.perf_counter() - start, alone)
    first = True
    while first or not way.done(pending):
        result.steps.append(steps.run(lambda pending=pending: wait(way, pending)))
        if first and changes is not None:
            common.bump(changes)
        first = False
    way.end(pending)
    if changes is not None:
        common.bump(changes, by=-1)
    return result


def wait(way: Way, pending: Any) -> None:
    if way.wait is not None:
        way.wait(pending)


def row(way: Way, rounds: Sequence[Round]) -> dict[str, object]:
    """Collective. Minima over the rounds, maxima over the ranks."""
    values: Mapping[str, float] = {
        "call_seconds": min(each.call for each in rounds),
        "slowdown": min(each.slowdown() for each in rounds),
        "longest_step_seconds": min(max(each.steps) for each in rounds),
        "alone_seconds": statistics.median(each.alone for each in rounds),
    }
    return {
        "case": way.name,
        **{name: round(agree(value), 5) for name, value in values.items()},
        "steps": min(len(each.steps) for each in rounds),
        "n": len(rounds),
        "settings": dict(way.settings),
    }

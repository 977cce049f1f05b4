"""Adam's step count from what Paddle keeps in its place: each beta to the power of steps + 1, multiplied up in float32.

Paddle does not store the betas. They follow from the powers and the step that the trainer counted, and every power is checked against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np

from unified_ckpt.errors import FormatError

_SMALLEST = 1e-37  # below, float32 loses digits, then all
_MOST = 2_000_000  # steps until 0.9999 ** n is gone
# For checkpoints whose trainer counted otherwise than the optimizer: it skips steps whose gradients overflow.
_USUAL = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.99), (0.9, 0.98), (0.8, 0.99), (0.95, 0.99))

Betas = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Clock:
    """`betas`: None where their power has underflowed, which happens after some 800 steps at 0.9. `steps`: the trainer's count."""

    betas: Betas
    steps: int | None


def powers(beta: float, count: int) -> Any:
    """float32 [count]: beta, beta squared, ... as repeated multiplication gives them."""
    with np.errstate(under="ignore"):
        return np.multiply.accumulate(np.full(count, beta, dtype=np.float32))


def power_after(beta: float | None, steps: int) -> float:
    """What Paddle's accumulator holds after so many steps; 0 for a beta whose power has underflowed."""
    return 0.0 if beta is None else float(powers(beta, min(steps, _MOST) + 1)[-1])


def clock_of(found: Sequence[float], steps: int | None) -> Clock:
    """From the powers of beta1 and beta2 of one parameter. FormatError where no betas explain both."""
    if steps is not None and steps >= 0:
        betas = [_beta(power, steps) for power in found]
        if all(
            beta is not None or _is_gone(power) for beta, power in zip(betas, found, strict=True)
        ):
            return Clock((betas[0], betas[1]), steps)
    for usual in _USUAL if not _is_gone(found[1]) else ():
        known = [
            beta if not _is_gone(power) else None for beta, power in zip(usual, found, strict=True)
        ]
        counts = {
            _count(power, beta)
            for power, beta in zip(found, known, strict=True)
            if beta is not None
        }
        if len(counts) == 1 and None not in counts:
            return Clock((known[0], known[1]), steps)
    raise FormatError(
        f"beta1_pow_acc_0 and beta2_pow_acc_0 are {found[0]} and {found[1]}, which no usual betas give after any number of steps, nor any "
        f"after {steps}; needed a trainer_state.json with the global_step of this optimizer"
    )


def steps_of(found: Sequence[float], clock: Clock) -> int:
    """Steps of one parameter. FormatError where its two powers disagree, or are gone and nobody counted."""
    counts = {
        _count(power, beta)
        for power, beta in zip(found, clock.betas, strict=True)
        if beta is not None and not _is_gone(power)
    }
    if len(counts) > 1 or None in counts or (not counts and not all(map(_is_gone, found))):
        raise FormatError(
            f"beta1_pow_acc_0 and beta2_pow_acc_0 are {found[0]} and {found[1]}; needed powers of {clock.betas}"
        )
    steps = next(iter(counts), clock.steps)
    if steps is None:
        raise FormatError(
            "beta1_pow_acc_0 and beta2_pow_acc_0 have underflowed; needed a trainer_state.json with the global_step"
        )
    return steps


def _is_gone(power: float) -> bool:
    return 0 <= power < _SMALLEST


def _beta(power: float, steps: int) -> float | None:
    """The shortest decimal whose power after so many steps it is."""
    if not _SMALLEST < power < 1:
        return None
    near = exp(log(power) / (steps + 1))
    for digits in range(1, 7):
        beta = round(near, digits)
        if 0 < beta < 1 and abs(power / power_after(beta, steps) - 1) < 2e-7 * (
            steps + 1
        ):  # as many roundings
            return beta
    return None


def _count(power: float, beta: float) -> int | None:
    """Steps after which the accumulator holds it; None where there are none."""
    if not _SMALLEST < power < 1:
        return None
    steps = max(0, round(log(power) / log(beta)) - 1)
    first = max(0, steps - 2)
    near = powers(beta, steps + 3)[first:]
    at = int(np.argmin(np.abs(near - np.float32(power))))
    return first + at if _is_power(power, float(near[at]), beta) else None


def _is_power(power: float, expected: float, beta: float) -> bool:
    """Within a quarter of what one step changes: devices may multiply in another precision."""
    return expected > 0 and abs(power / expected - 1) < (1 - beta) / 4

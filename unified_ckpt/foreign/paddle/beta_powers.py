"""Infers Adam's step count from Paddle's beta powers: beta ** (steps + 1) in float32.

Paddle does not store the betas. They follow from the powers and the trainer's step count, and
every power is checked against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np

from unified_ckpt.errors import FormatError

_MIN_POWER = 1e-37  # below, float32 is subnormal, then zero
_MAX_STEPS = 2_000_000  # 0.9999 ** n has underflowed
# For trainers that count more steps than the optimizer, which skips those with overflow.
_COMMON_BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.99), (0.9, 0.98), (0.8, 0.99), (0.95, 0.99))
_FEW_DIGITS, _MANY_DIGITS = 4, 6

# None for those whose power has underflowed, after some 800 steps at 0.9
Betas = tuple[float | None, float | None]


def beta_powers(beta: float, count: int) -> Any:
    """Return float32 [count]: beta, beta squared, ... by repeated multiplication."""
    with np.errstate(under="ignore"):
        return np.multiply.accumulate(np.full(count, beta, dtype=np.float32))


def beta_power(beta: float | None, steps: int) -> float:
    """Return Paddle's accumulator after `steps` steps; 0 if beta is None (underflowed)."""
    return 0.0 if beta is None else float(beta_powers(beta, min(steps, _MAX_STEPS) + 1)[-1])


def infer_betas(powers: Sequence[float], steps: int | None) -> Betas:
    """Infer the betas from one parameter's powers. Raises FormatError if no betas explain both.

    An optimizer may have made fewer steps than the trainer. So betas of few digits come first: with
    more digits, some explain almost any power.
    """
    betas = _betas_after(powers, steps, digits=_FEW_DIGITS) or _common_betas(powers)
    betas = betas or _betas_after(powers, steps, digits=_MANY_DIGITS)
    if betas is not None:
        if steps is not None:
            infer_steps(powers, betas, steps)  # raises
        return betas
    raise FormatError(
        f"beta1_pow_acc_0 and beta2_pow_acc_0 are {powers[0]} and {powers[1]}: no common betas "
        f"give these after any number of steps, and no betas after {steps}; add a "
        "trainer_state.json with the global_step of this optimizer"
    )


def _betas_after(powers: Sequence[float], steps: int | None, *, digits: int) -> Betas | None:
    """Return the betas with at most these digits whose powers these are after `steps` steps."""
    if steps is None or steps < 0:
        return None
    betas = [_infer_beta(power, steps, digits) for power in powers]
    is_known = all(
        beta is not None or _has_underflowed(power)
        for beta, power in zip(betas, powers, strict=True)
    )
    return (betas[0], betas[1]) if is_known else None


def _common_betas(powers: Sequence[float]) -> Betas | None:
    """Return the common betas whose powers these are after an equal number of steps."""
    for common_betas in _COMMON_BETAS if not _has_underflowed(powers[1]) else ():
        candidate = [
            beta if not _has_underflowed(power) else None
            for beta, power in zip(common_betas, powers, strict=True)
        ]
        counts = {
            _infer_step(power, beta)
            for power, beta in zip(powers, candidate, strict=True)
            if beta is not None
        }
        if len(counts) == 1 and None not in counts:
            return candidate[0], candidate[1]
    return None


def infer_steps(powers: Sequence[float], betas: Betas, trainer_steps: int | None) -> int:
    """Return the steps of one parameter; those of the trainer if its powers have underflowed.

    Raises FormatError if its powers disagree, have underflowed without a trainer's step count, or
    belong to more steps than the trainer made: it counts those that the optimizer skips, too.
    """
    counts = {
        _infer_step(power, beta)
        for power, beta in zip(powers, betas, strict=True)
        if beta is not None and not _has_underflowed(power)
    }
    if len(counts) > 1 or None in counts or (not counts and not all(map(_has_underflowed, powers))):
        raise FormatError(
            f"beta1_pow_acc_0 and beta2_pow_acc_0: got {powers[0]} and {powers[1]}, expected equal "
            f"powers of {betas}"
        )
    steps = next(iter(counts), trainer_steps)
    if steps is not None and trainer_steps is not None and steps > trainer_steps:
        raise FormatError(
            f"beta1_pow_acc_0 and beta2_pow_acc_0 are those of {steps} steps, but the trainer's "
            f"state has global_step {trainer_steps}: files of several saves are mixed; restore "
            "those of one save"
        )
    if steps is None:
        raise FormatError(
            "beta1_pow_acc_0 and beta2_pow_acc_0 have underflowed; add a trainer_state.json with "
            "the global_step"
        )
    return steps


def _has_underflowed(power: float) -> bool:
    return 0 <= power < _MIN_POWER


def _infer_beta(power: float, steps: int, max_digits: int) -> float | None:
    """Return the shortest decimal whose power after `steps` steps this is."""
    if not _MIN_POWER < power < 1:
        return None
    estimate = exp(log(power) / (steps + 1))
    for digits in range(1, max_digits + 1):
        beta = round(estimate, digits)
        tolerance = 2e-7 * (steps + 1)  # one rounding error per step
        if 0 < beta < 1 and abs(power / beta_power(beta, steps) - 1) < tolerance:
            return beta
    return None


def _infer_step(power: float, beta: float) -> int | None:
    """Return the number of steps after which the accumulator has this value, or None."""
    if not _MIN_POWER < power < 1:
        return None
    steps = max(0, round(log(power) / log(beta)) - 1)
    first = max(0, steps - 2)
    candidates = beta_powers(beta, steps + 3)[first:]
    nearest = int(np.argmin(np.abs(candidates - np.float32(power))))
    expected = float(candidates[nearest])
    # A quarter of what one step changes is allowed: devices may multiply in another precision.
    is_power = expected > 0 and abs(power / expected - 1) < (1 - beta) / 4
    return first + nearest if is_power else None

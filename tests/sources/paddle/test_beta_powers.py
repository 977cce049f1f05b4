"""Adam's steps follow exactly from the powers of its betas, or are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from unified_ckpt.errors import FormatError
from unified_ckpt.sources.paddle.beta_powers import (
    AdamBetas,
    beta_power,
    beta_powers,
    infer_betas,
    infer_steps,
)


def multiplied(beta: float, steps: int) -> float:
    """As Paddle does it: the accumulator starts at beta, and each step multiplies."""
    product = np.float32(beta)
    with np.errstate(under="ignore"):
        for _ in range(steps):
            product = np.float32(product * np.float32(beta))
    return float(product)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.85, 0.9875), (0.8, 0.99)])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 100, 700])
def test_betas_and_steps_from_the_trainers_count(betas: tuple[float, float], steps: int) -> None:
    powers = [multiplied(beta, steps) for beta in betas]
    assert powers == [beta_power(beta, steps) for beta in betas]
    clock = infer_betas(powers, steps)
    assert clock.betas == tuple(
        beta if power > 1e-37 else None for beta, power in zip(betas, powers, strict=True)
    )
    assert infer_steps(powers, clock) == steps


@pytest.mark.parametrize("steps", [2, 50, 760])
def test_common_betas_without_a_correct_count(steps: int) -> None:
    powers = [multiplied(0.9, steps), multiplied(0.999, steps)]
    for counted in (None, steps + 3):
        clock = infer_betas(powers, counted)
        assert clock.betas == (0.9, 0.999)
        assert infer_steps(powers, clock) == steps


@pytest.mark.parametrize("steps", [1200, 20_000, 80_000])
def test_steps_from_beta2_after_beta1_underflows(steps: int) -> None:
    powers = [multiplied(0.9, steps), multiplied(0.999, steps)]
    clock = infer_betas(powers, steps)
    assert clock.betas == (None, 0.999)
    assert infer_steps(powers, clock) == steps


def test_trainers_count_after_both_underflow() -> None:
    powers = [0.0, 0.0]
    assert infer_steps(powers, infer_betas(powers, 500_000)) == 500_000
    with pytest.raises(FormatError, match="no common betas"):
        infer_betas(powers, None)


def test_parameters_that_started_later_have_fewer_steps() -> None:
    clock = infer_betas([multiplied(0.9, 10), multiplied(0.999, 10)], 10)
    assert infer_steps([multiplied(0.9, 4), multiplied(0.999, 4)], clock) == 4


@pytest.mark.parametrize(
    "found", [(0.5, 0.5), (0.729, 0.5), (2.0, 0.9), (-0.1, 0.9), (float("nan"), 0.9)]
)
def test_powers_without_matching_betas_are_rejected(found: tuple[float, float]) -> None:
    with pytest.raises(FormatError, match="no common betas"):
        infer_betas(found, None)


def test_contradicting_powers_are_rejected() -> None:
    with pytest.raises(FormatError, match="expected equal powers of"):
        infer_steps([multiplied(0.9, 3), multiplied(0.999, 4)], AdamBetas((0.9, 0.999), 3))


def test_powers_are_repeated_products() -> None:
    assert [float(power) for power in beta_powers(0.9, 5)] == [
        multiplied(0.9, steps) for steps in range(5)
    ]

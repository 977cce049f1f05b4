"""Adam's steps follow exactly from the powers of its betas, or are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.paddle.beta_powers import (
    beta_power,
    beta_powers,
    infer_betas,
    infer_steps,
)


def multiplied(beta: float, steps: int) -> float:
    """Return the power as Paddle computes it: it starts at beta, and each step multiplies."""
    product = np.float32(beta)
    with np.errstate(under="ignore"):
        for _ in range(steps):
            product = np.float32(product * np.float32(beta))
    return float(product)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.85, 0.9875), (0.8, 0.99)])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 100, 700])
def test_betas_and_steps_from_the_trainers_count(betas: tuple[float, float], steps: int) -> None:
    """Parameters that started later have fewer steps."""
    powers = [multiplied(beta, steps) for beta in betas]
    assert powers == [beta_power(beta, steps) for beta in betas]
    assert powers == [float(beta_powers(beta, steps + 1)[steps]) for beta in betas]
    inferred = infer_betas(powers, steps)
    assert inferred == tuple(
        beta if power > 1e-37 else None for beta, power in zip(betas, powers, strict=True)
    )
    assert infer_steps(powers, inferred, steps) == steps
    earlier = [multiplied(beta, steps // 2) for beta in betas]
    assert infer_steps(earlier, inferred, steps) == steps // 2


@pytest.mark.parametrize("steps", [2, 50, 760])
def test_common_betas_without_a_correct_count(steps: int) -> None:
    powers = [multiplied(0.9, steps), multiplied(0.999, steps)]
    for counted in (None, steps + 3):
        inferred = infer_betas(powers, counted)
        assert inferred == (0.9, 0.999)
        assert infer_steps(powers, inferred, counted) == steps


@pytest.mark.parametrize(
    ("steps", "second"), [(1200, 0.999), (20_000, 0.999), (80_000, 0.999), (500_000, None)]
)
def test_steps_after_powers_underflow(steps: int, second: float | None) -> None:
    """They follow from beta2 alone, then from the trainer's count."""
    powers = [0.0, 0.0] if second is None else [multiplied(0.9, steps), multiplied(second, steps)]
    inferred = infer_betas(powers, steps)
    assert inferred == (None, second)
    assert infer_steps(powers, inferred, steps) == steps


@pytest.mark.parametrize(
    "powers", [(0.5, 0.5), (0.729, 0.5), (2.0, 0.9), (-0.1, 0.9), (float("nan"), 0.9), (0.0, 0.0)]
)
def test_powers_without_matching_betas_are_rejected(powers: tuple[float, float]) -> None:
    with pytest.raises(FormatError, match="no common betas"):
        infer_betas(powers, None)


def test_contradicting_powers_are_rejected() -> None:
    with pytest.raises(FormatError, match="expected equal powers of"):
        infer_steps([multiplied(0.9, 3), multiplied(0.999, 4)], (0.9, 0.999), 3)


def test_more_steps_than_the_trainer_made_are_rejected() -> None:
    """The trainer counts all steps, so such files are of several saves."""
    powers = [multiplied(beta, 3) for beta in (0.9, 0.999)]
    betas = infer_betas(powers, 4)
    assert infer_steps(powers, betas, 4) == infer_steps(powers, betas, None) == 3
    with pytest.raises(FormatError, match=r"are those of 3 steps, .* global_step 2: files of"):
        infer_betas(powers, 2)
    with pytest.raises(FormatError, match=r"are those of 3 steps, .* global_step 2: files of"):
        infer_steps(powers, betas, 2)

"""The least size of encoded moments at an error of the update, for Gaussian sources.

The bound is reverse water-filling (Cover and Thomas, Elements of Information Theory, section
10.3.3): independent Gaussian components with variances s need max(0, log2(s / t) / 2) bits each if
their squared errors min(s, t) add up to the error that is allowed. Components are the elements of
blocks of 64: those of m, and the logarithms of those of sqrt(v), both as they move u. Means and
variances of blocks are free, where an encoding pays for scales. No source of these variances needs
more bits than a Gaussian one; real blocks are not Gaussian, so a form may come below the bound.
"""

import numpy as np
from numpy.typing import NDArray
from trained_states import EPSILON

from unified_ckpt.format.encodings import BLOCK_SIZE

Floats = NDArray[np.float32]


def update(first: Floats, second: Floats) -> NDArray[np.float64]:
    """Return the direction of a step of Adam."""
    return first / (np.sqrt(second.astype(np.float64)) + EPSILON)


def block_variances(values: NDArray[np.float64], weights: NDArray[np.float64]) -> list[float]:
    """Return, for each element, the weighted variance of its block of 64 in a row."""
    blocks = np.arange(values.shape[-1]) // BLOCK_SIZE
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    sizes = np.diff(starts, append=values.shape[-1])
    means = np.add.reduceat(values, starts, axis=-1) / sizes
    deviations = (values - np.repeat(means, sizes, axis=-1)) ** 2 * weights
    variances = np.add.reduceat(deviations, starts, axis=-1) / sizes
    return np.repeat(variances, sizes, axis=-1).reshape(-1).tolist()


def least_bits(variances: NDArray[np.float64], squared_error: float) -> float:
    """Return the bits of Gaussian components at this sum of squared errors."""
    low, high = 0.0, float(variances.max())
    for _ in range(100):
        level = (low + high) / 2
        if np.minimum(variances, level).sum() < squared_error:
            low = level
        else:
            high = level
    return float(np.log2(np.maximum(variances / high, 1)).sum() / 2)


def bound_bytes(pairs: list[list[Floats]], squared_error: float) -> float:
    """Return the least bytes for these moments at this error of the updates."""
    variances: list[float] = []
    for first, second in pairs:
        exact = update(first, second)
        divisors = np.sqrt(second.astype(np.float64)) + EPSILON
        variances += block_variances(first.astype(np.float64), divisors**-2)
        variances += block_variances(np.log(divisors), exact**2)
    return least_bits(np.array(variances), squared_error) / 8 if squared_error else 0.0

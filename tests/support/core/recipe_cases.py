"""Draws recipes, with the same numpy calls as oracle."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from unified_ckpt.core import recipes
from unified_ckpt.core.recipes import Recipe, Stored

Values = dict[tuple[str, str], np.ndarray]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=3)))


@st.composite
def refactored(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Draw a shape of this many elements."""
    if count == 1 and draw(st.booleans()):
        return ()
    size = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    return (size,) if size == count else (size, *draw(refactored(count // size)))


@st.composite
def recipe(draw: st.DrawFn, depth: int = 4) -> tuple[Recipe, np.ndarray, Values]:
    """Draw a recipe, its result, and the stored tensors."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        shape, key = draw(shapes()), ("model", f"w{draw(st.integers(0, 10**9))}")
        value = (
            np.random.default_rng(draw(st.integers(0, 99)))
            .integers(0, 1000, shape)
            .astype(np.float32)
        )
        return Stored(key, shape), value, {key: value}
    base, value, stored = draw(recipe(depth - 1))
    dims = list(range(value.ndim))
    kind = draw(st.sampled_from(["turn", "reshape", "cut", "pick", "join", "stack", "scale"]))
    if kind == "turn":
        order = draw(st.permutations(dims))
        return recipes.permute(base, order), value.transpose(order), stored
    if kind == "reshape":
        shape = draw(refactored(value.size))
        return recipes.reshape(base, shape), value.reshape(shape), stored
    if kind == "scale":
        return recipes.scale(base, 0.5), value * np.float32(0.5), stored
    if kind == "stack":
        dim = draw(st.integers(0, value.ndim))
        return recipes.stack([base, base], dim), np.stack([value, value], dim), stored
    if not dims:
        return base, value, stored
    dim = draw(st.sampled_from(dims))
    if kind == "join":
        return recipes.concat([base, base, base], dim), np.concatenate([value] * 3, dim), stored
    if kind == "pick":
        index = draw(st.integers(0, value.shape[dim] - 1))
        return recipes.select_index(base, dim, index), value.take(index, dim), stored
    low = draw(st.integers(0, value.shape[dim] - 1))
    high = draw(st.integers(low + 1, value.shape[dim]))
    return (
        recipes.slice_dim(base, dim, low, high),
        value[(*[slice(None)] * dim, slice(low, high))],
        stored,
    )

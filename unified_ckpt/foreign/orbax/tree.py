"""Classifies the leaves of a pytree: weights, Adam's moments, step counts, others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MODEL, OPTIMIZER

Path = tuple[str, ...]
_PARAMS_KEYS = ("params", "model")  # keys of a train state, likeliest first
_OPTIMIZER_KEYS = ("opt_state", "optimizer", "optimizer_state")
_STEP_KEYS = ("step", "global_step")
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}  # optax's name -> torch's


@dataclass(frozen=True, slots=True)
class LeafRoles:
    """What each leaf is.

    `tensors` maps a path to (part, name); `step_counts` maps Adam's counts to their weights.
    `scalars` are the other leaves without a shape, outside of trees with arrays.
    """

    tensors: Mapping[Path, Key]
    step_counts: Mapping[Path, tuple[str, ...]]
    scalars: tuple[Path, ...]
    step: Path | None


def params_prefix(paths: Collection[Path]) -> Path:
    """Return the path above the weights' own names; Flax nests a second `params`."""
    for top in _PARAMS_KEYS:
        below = [path[1:] for path in paths if path[0] == top]
        if any(below):
            nested = all(len(path) > 1 and path[0] == "params" for path in below)
            return (top, "params") if nested else (top,)
    return ()


def classify_leaves(shapes: Mapping[Path, tuple[int, ...]]) -> LeafRoles:
    """Assign a role to each array. Raises FormatError if two arrays would share a name."""
    prefix = params_prefix(shapes)
    step = next(((name,) for name in _STEP_KEYS if shapes.get((name,)) == ()), None)
    moments, step_counts = _adam_state(shapes, prefix)
    tensors: dict[Path, Key] = dict(moments)
    scalars = []
    trees = {path[0] for path, shape in shapes.items() if shape and len(path) > 1}
    trees -= {*_OPTIMIZER_KEYS}  # counts of other optimizers are no weights
    for path, shape in shapes.items():
        if path in moments or path in step_counts or path == step:
            continue
        part = path[0] if prefix else MODEL
        if prefix and path[: len(prefix)] == prefix:
            part = MODEL
        elif path[0] in _OPTIMIZER_KEYS:
            part = "opt_state"
        if part == MODEL and (shape or prefix):
            tensors[path] = MODEL, ".".join(path[len(prefix) :])
        elif not shape and not (prefix and path[0] in trees):
            scalars.append(path)
        else:
            tensors[path] = part, ".".join(path[1:] or path)
    seen: dict[Key, Path] = {}
    for path, key in tensors.items():
        if seen.setdefault(key, path) != path:
            first, second = ".".join(seen[key]), ".".join(path)
            raise FormatError(
                f"{first} and {second}: both are {key[0]}:{key[1]}, expected different names"
            )
    return LeafRoles(tensors, step_counts, tuple(scalars), step)


def _adam_state(
    shapes: Mapping[Path, tuple[int, ...]], prefix: Path
) -> tuple[dict[Path, Key], dict[Path, tuple[str, ...]]]:
    """Find optax's ScaleByAdamState anywhere in the tree.

    It is a `count` next to `mu` and `nu`, two trees that mirror the weights or some of them.
    """
    weights = {
        path[len(prefix[:1]) :]: shape
        for path, shape in shapes.items()
        if path[: len(prefix)] == prefix
    }
    moments: dict[Path, Key] = {}
    step_counts: dict[Path, tuple[str, ...]] = {}
    for count in [path for path, shape in shapes.items() if path[-1] == "count" and not shape]:
        mu, nu = (
            {path[len(top) :]: shape for path, shape in shapes.items() if path[: len(top)] == top}
            for top in ((*count[:-1], moment) for moment in _MOMENTS)
        )
        if not mu or mu != nu or any(weights.get(path) != shape for path, shape in mu.items()):
            continue
        names = {path: ".".join(path[len(prefix[1:]) :]) for path in mu}
        for optax_name, torch_name in _MOMENTS.items():
            moments |= {
                (*count[:-1], optax_name, *path): (OPTIMIZER, f"{name}/{torch_name}")
                for path, name in names.items()
            }
        step_counts[count] = tuple(names.values())
    return moments, step_counts

"""What the leaves of a pytree are: weights, Adam's moments of which weight, or something else.
Pure; knows paths, no files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER

Path = tuple[str, ...]
_PARAMS_KEYS = ("params", "model")  # where train states have them, likeliest first
_OPTIMIZER_KEYS = ("opt_state", "optimizer", "optimizer_state")
_STEP_KEYS = ("step", "global_step")
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}  # optax's, and torch's


@dataclass(frozen=True, slots=True)
class LeafRoles:
    """`tensors`: where an array belongs. `step_counts`: Adam's step counts -> the weights that are
    theirs. `scalars`: the rest, scalars.
    """

    tensors: Mapping[Path, Key]
    step_counts: Mapping[Path, tuple[str, ...]]
    scalars: tuple[Path, ...]
    step: Path | None


def params_prefix(paths: Collection[Path]) -> Path:
    """What stands before the weights' own names: Flax has a second `params`."""
    top = next(
        (name for name in _PARAMS_KEYS if any(path[0] == name and len(path) > 1 for path in paths)),
        None,
    )
    if top is None:
        return ()
    children = {path[1] for path in paths if path[0] == top}
    return (
        (top, "params")
        if children == {"params"} and all(len(path) > 2 for path in paths if path[0] == top)
        else (top,)
    )


def classify_leaves(shapes: Mapping[Path, tuple[int, ...]]) -> LeafRoles:
    """`shapes`: of all arrays. FormatError where two would have one name."""
    prefix = params_prefix(shapes)
    step = next(((name,) for name in _STEP_KEYS if shapes.get((name,)) == ()), None)
    moments, step_counts = _adam_state(shapes, prefix)
    tensors: dict[Path, Key] = dict(moments)
    scalars = []
    for path, shape in shapes.items():
        if path in moments or path in step_counts or path == step:
            continue
        part = _part_name(path, prefix)
        if part == MODEL and (shape or prefix):
            tensors[path] = MODEL, ".".join(path[len(prefix) :])
        elif not shape:
            scalars.append(path)
        else:
            tensors[path] = part, ".".join(path[1:] or path)
    seen: dict[Key, Path] = {}
    for path, key in tensors.items():
        if seen.setdefault(key, path) != path:
            raise FormatError(
                f"{'.'.join(path)} and {'.'.join(seen[key])}: both are {key[1]} of {key[0]}; needed names that differ"
            )
    return LeafRoles(tensors, step_counts, tuple(scalars), step)


def _part_name(path: Path, prefix: Path) -> str:
    if prefix:
        return (
            MODEL
            if path[: len(prefix)] == prefix
            else "opt_state"
            if path[0] in _OPTIMIZER_KEYS
            else path[0]
        )
    return "opt_state" if path[0] in _OPTIMIZER_KEYS else MODEL


def _adam_state(
    shapes: Mapping[Path, tuple[int, ...]], prefix: Path
) -> tuple[dict[Path, Key], dict[Path, tuple[str, ...]]]:
    """optax's ScaleByAdamState, wherever it stands: `count` beside `mu` and `nu`, two trees like
    the weights or a part of them.
    """
    weights = {
        path[len(prefix[:1]) :]: shape
        for path, shape in shapes.items()
        if path[: len(prefix)] == prefix
    }
    moments: dict[Path, Key] = {}
    step_counts: dict[Path, tuple[str, ...]] = {}
    for count in [path for path, shape in shapes.items() if path[-1] == "count" and not shape]:
        moment_trees = {moment: _subtree(shapes, (*count[:-1], moment)) for moment in _MOMENTS}
        paths = set(moment_trees["mu"])
        if (
            not paths
            or paths != set(moment_trees["nu"])
            or any(
                weights.get(path) != shape
                for moment_tree in moment_trees.values()
                for path, shape in moment_tree.items()
            )
        ):
            continue
        names = {path: ".".join(path[len(prefix[1:]) :]) for path in moment_trees["mu"]}
        for optax_name, torch_name in _MOMENTS.items():
            moments |= {
                (*count[:-1], optax_name, *path): (OPTIMIZER, f"{name}/{torch_name}")
                for path, name in names.items()
            }
        step_counts[count] = tuple(names.values())
    return moments, step_counts


def _subtree(shapes: Mapping[Path, tuple[int, ...]], top: Path) -> dict[Path, tuple[int, ...]]:
    return {path[len(top) :]: shape for path, shape in shapes.items() if path[: len(top)] == top}

"""What the leaves of a pytree are: weights, Adam's moments of which weight, or something else. Pure; knows paths, no files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER

Path = tuple[str, ...]
_WEIGHTS = ("params", "model")  # where train states have them, likeliest first
_OPTIMIZERS = ("opt_state", "optimizer", "optimizer_state")
_STEPS = ("step", "global_step")
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}  # optax's, and torch's


@dataclass(frozen=True, slots=True)
class Places:
    """`tensors`: where an array belongs. `counts`: Adam's step counts -> the weights that are theirs. `values`: the rest, scalars."""

    tensors: Mapping[Path, Key]
    counts: Mapping[Path, tuple[str, ...]]
    values: tuple[Path, ...]
    step: Path | None


def weights_root(paths: Collection[Path]) -> Path:
    """What stands before the weights' own names: Flax has a second `params`."""
    first = next(
        (name for name in _WEIGHTS if any(path[0] == name and len(path) > 1 for path in paths)),
        None,
    )
    if first is None:
        return ()
    inner = {path[1] for path in paths if path[0] == first}
    return (
        (first, "params")
        if inner == {"params"} and all(len(path) > 2 for path in paths if path[0] == first)
        else (first,)
    )


def places(shapes: Mapping[Path, tuple[int, ...]]) -> Places:
    """`shapes`: of all arrays. FormatError where two would have one name."""
    root = weights_root(shapes)
    step = next(((name,) for name in _STEPS if shapes.get((name,)) == ()), None)
    moments, counts = _adam(shapes, root)
    tensors: dict[Path, Key] = dict(moments)
    values = []
    for path, shape in shapes.items():
        if path in moments or path in counts or path == step:
            continue
        part = _part(path, root)
        if part == MODEL and (shape or root):
            tensors[path] = MODEL, ".".join(path[len(root) :])
        elif not shape:
            values.append(path)
        else:
            tensors[path] = part, ".".join(path[1:] or path)
    seen: dict[Key, Path] = {}
    for path, key in tensors.items():
        if seen.setdefault(key, path) != path:
            raise FormatError(
                f"{'.'.join(path)} and {'.'.join(seen[key])}: both are {key[1]} of {key[0]}; needed names that differ"
            )
    return Places(tensors, counts, tuple(values), step)


def _part(path: Path, root: Path) -> str:
    if root:
        return (
            MODEL
            if path[: len(root)] == root
            else "opt_state"
            if path[0] in _OPTIMIZERS
            else path[0]
        )
    return "opt_state" if path[0] in _OPTIMIZERS else MODEL


def _adam(
    shapes: Mapping[Path, tuple[int, ...]], root: Path
) -> tuple[dict[Path, Key], dict[Path, tuple[str, ...]]]:
    """optax's ScaleByAdamState, wherever it stands: `count` beside `mu` and `nu`, two trees like the weights or a part of them."""
    weights = {
        path[len(root[:1]) :]: shape for path, shape in shapes.items() if path[: len(root)] == root
    }
    moments: dict[Path, Key] = {}
    counts: dict[Path, tuple[str, ...]] = {}
    for count in [path for path, shape in shapes.items() if path[-1] == "count" and not shape]:
        beside = {one: _below(shapes, (*count[:-1], one)) for one in _MOMENTS}
        inner = set(beside["mu"])
        if (
            not inner
            or inner != set(beside["nu"])
            or any(
                weights.get(path) != shape for of in beside.values() for path, shape in of.items()
            )
        ):
            continue
        names = {path: ".".join(path[len(root[1:]) :]) for path in beside["mu"]}
        for theirs, ours in _MOMENTS.items():
            moments |= {
                (*count[:-1], theirs, *path): (OPTIMIZER, f"{name}/{ours}")
                for path, name in names.items()
            }
        counts[count] = tuple(names.values())
    return moments, counts


def _below(shapes: Mapping[Path, tuple[int, ...]], top: Path) -> dict[Path, tuple[int, ...]]:
    return {path[len(top) :]: shape for path, shape in shapes.items() if path[: len(top)] == top}

"""Checkpoints whose every element is the step, and what is left of them after a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import unified_ckpt as uc
from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.format import names

SAVE = uc.SaveOptions(timeout_seconds=30, max_file_bytes=9000, if_exists="replace")
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "model": {"w": (3000,), "b": (5,), "v": (40, 20)},
    "optimizer": {"w/exp_avg": (3000,)},
}
SHARDED = ("w", "v", "w/exp_avg")


def state(step: int, *, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Return the parts of a step: this rank's rows of sharded tensors, and the others whole."""

    def shape(name: str) -> tuple[int, ...]:
        rows, *others = next(part[name] for part in SHAPES.values() if name in part)
        return (rows // world if name in SHARDED else rows, *others)

    return {
        part: {name: torch.full(shape(name), float(step)) for name in tensors}
        for part, tensors in SHAPES.items()
    }


def layout(world: int) -> uc.Layout:
    """Return which rows the ranks hold."""
    rules = {"w": {"dp": 0}, "v": {"dp": 0}}
    shapes = {name: shape for name, shape in SHAPES["model"].items() if name in rules}
    return uc.Layout({"dp": world}, rules, shapes)


def check_state(tensors: dict[str, Any], step: int) -> None:
    """Fail unless every element of these parts is the step."""
    for part, by_name in tensors.items():
        for name, tensor in by_name.items():
            assert torch.all(tensor == step), f"{part}:{name} is not that of step {step}"


def whole_step(path: Path) -> int | None:
    """Return the step of a checkpoint of any format, None for what is none.

    It is one if it opens, and all names, sizes and headers in its manifest are right. Then every
    byte of it must be right.
    """
    try:
        source = uc.open(path)
    except uc.CheckpointError:
        return None
    with source:
        if (path / names.MANIFEST).exists():
            if not uc.verify(path).ok:
                return None
            assert uc.verify(path, deep=True).problems == ()
        tensors = {
            part: {name: tensor[...] for name, tensor in source[part].items()}
            for part in source.parts
        }
        step = int(tensors["model"]["b"][0])
    check_state(tensors, step)
    if not any(part.endswith(SHARD_SUFFIX) for part in tensors):  # else of one node
        assert all(by_name.keys() == SHAPES[part].keys() for part, by_name in tensors.items())
        assert tensors.keys() == SHAPES.keys() or not (path / names.MANIFEST).exists()
    assert source.step in (None, step)
    return step


def checkpoints(root: Path) -> dict[str, int]:
    """Return path -> step of every checkpoint below a folder.

    Also of those in hidden folders, except what is being deleted, and is not of our format.
    """
    steps: dict[str, int] = {}
    for path in _candidates(root):
        step = whole_step(path)
        if step is not None:
            steps[os.path.relpath(path, root)] = step
    return steps


def _candidates(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        is_ours = (path / names.MANIFEST).exists()
        if not names.is_trash(path.name) and (is_ours or not path.name.startswith(".")):
            yield path
            if path.is_dir() and not is_ours:
                yield from _candidates(path)

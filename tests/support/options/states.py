"""Small states for random options, and what a rank holds of them: the oracle of each value.

Uses torch alone. Everything is drawn from a `random.Random`, so a seed replays a case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

import unified_ckpt as uc

Tensors = dict[str, Tensor]
FLOATS = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
MESHES = ({"dp": 1}, {"dp": 2}, {"tp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}, {"pp": 1, "tp": 4})


@dataclass(frozen=True)
class WholeState:
    """Whole tensors by part, as the caller of a save names the parts. Parts may be absent."""

    parts: Mapping[str, Tensors]
    extra: object = None
    has_rank_extra: bool = False
    differs: bool = False  # whether each rank passes another `extra`

    @property
    def masters(self) -> Tensors:
        return self.parts.get("master_weights", {})


@dataclass(frozen=True)
class Cut:
    """How ranks hold tensors: `rules` by parameter name as in a `Layout`."""

    mesh: Mapping[str, int]
    rules: Mapping[str, Mapping[str, int]]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        world = 1
        for size in self.mesh.values():
            world *= size
        return world

    def layout(self) -> uc.Layout:
        return uc.Layout(self.mesh, self.rules, self.shapes)

    def local(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of what a rank holds: chunks as by `torch.chunk`, in the rule's order."""
        sizes, position = list(self.mesh.items()), {}
        for dim, size in reversed(sizes):
            rank, position[dim] = divmod(rank, size)
        for mesh_dim, dim in self.rules.get(name, {}).items():
            if whole.dim() == 0:
                continue
            length = whole.shape[dim]
            chunk = -(-length // self.mesh[mesh_dim])
            first = min(position[mesh_dim] * chunk, length)
            whole = whole.narrow(dim, first, min(chunk, length - first))
        return whole.clone(memory_format=torch.contiguous_format)

    def arguments(self, parts: Mapping[str, Tensors], rank: int) -> dict[str, Any]:
        """Return parts as the arguments of a save or a load."""
        local = {
            part: {
                name: self.local(name.partition("/")[0], whole, rank)
                for name, whole in tensors.items()
            }
            for part, tensors in parts.items()
        }
        arguments: dict[str, Any] = {"layout": self.layout(), **local}
        if "ema" in local:
            arguments["parts"] = {"ema": arguments.pop("ema")}
        return arguments


def draw_cut(random: Random, tensors: Tensors, meshes: tuple[dict[str, int], ...] = MESHES) -> Cut:
    """Draw a mesh and rules for the tensors of a model."""
    mesh = random.choice(meshes)
    rules, shapes = dict[str, dict[str, int]](), dict[str, tuple[int, ...]]()
    for name, tensor in tensors.items():
        dims = [mesh_dim for mesh_dim in mesh if random.random() < 0.6]
        if tensor.dim() and dims:
            random.shuffle(dims)
            rules[name] = {mesh_dim: random.randrange(tensor.dim()) for mesh_dim in dims}
            shapes[name] = tuple(tensor.shape)
    return Cut(mesh, rules, shapes)


def draw_state(random: Random) -> WholeState:
    """Draw a model, and perhaps masters, Adam's state, an average and values of the caller."""
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    width = random.choice((1, 3, 33, 70))
    shapes = {
        "layers.0.w": (random.choice((2, 5)), width),
        "layers.1.w": (random.choice((2, 5)), width),
        "emb": (7, random.choice((4, 40))),
        "norm": (random.choice((0, 1, 6)),),
        "scale": (),
    }
    shapes["layers.1.w"] = shapes["layers.0.w"]  # layers that can be stacked
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    dtype = FLOATS[random.choice(("float32", "bfloat16", "bfloat16", "float16", "float64"))]
    model = {name: tensor.to(dtype) for name, tensor in whole.items()}
    parts: dict[str, Tensors] = {"model": model}
    if dtype in (torch.bfloat16, torch.float16) and random.random() < 0.6:
        parts["master_weights"] = whole
        if random.random() < 0.3:
            model["emb"][0, 0] += 1  # is not the rounded master
    if random.random() < 0.3:
        model["count"] = torch.tensor(random.randrange(100))
    if random.random() < 0.6:
        state_dtype = random.choice((torch.float32, torch.float32, dtype))
        count = torch.tensor(float(random.randrange(9)))
        parts["optimizer"] = {
            f"{name}/{key}": tensor.to(state_dtype)
            for name, shape in shapes.items()
            for key, tensor in {
                "exp_avg": torch.randn(shape, generator=generator) * 1e-3,
                "exp_avg_sq": torch.rand(shape, generator=generator) * 1e-6,
                "step": count,
            }.items()
        }
        if random.random() < 0.2:
            parts["optimizer"]["emb/exp_avg"][0, :2] = torch.tensor([float("inf"), 0.0])
    if random.random() < 0.3:
        parts["ema"] = {name: tensor.float() + 0.5 for name, tensor in whole.items()}
    extra = random.choice((None, None, {"epoch": 3, "bytes": b"x" * 2000}))
    differs = extra is not None and random.random() < 0.2
    return WholeState(parts, extra, random.random() < 0.3, differs)

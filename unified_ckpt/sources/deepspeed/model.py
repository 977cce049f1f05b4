"""The model's file of a DeepSpeed folder, `*mp_rank_00_model_states.pt`: weights, names and shapes, and what the job said beside them.

Under stage 3 each rank has one, with empty tensors in place of the parameters, and its parts of those that are frozen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.torch_state.modules import is_extra_state
from unified_ckpt.sources.deepspeed.layout import Span, in_parts
from unified_ckpt.sources.deepspeed.optimizer_files import STUBS, check_whole, unstubbed
from unified_ckpt.sources.deepspeed.parameters import spans_tensor
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import Assembly

MODEL_FILE = (
    "mp_rank_00_model_states.pt"  # without stage 3; with it "zero_pp_rank_<rank>_" stands before
)
_OURS = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """`held`: the module's tensors. `groups`: trained parameters by flat group, in order. `shapes`: of these and of the frozen ones.
    `parts`: this rank's of frozen parameters that are cut. `aliases`: of tied weights. `world`: ranks of data parallelism. `modules`: extra
    state."""

    path: str
    held: Mapping[str, torch.Tensor]
    buffers: frozenset[str]
    groups: Sequence[Shapes]
    shapes: Shapes
    parts: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    step: int | None
    world: int
    extra: Mapping[str, Any]
    modules: Mapping[str, Any]

    @property
    def is_cut(self) -> bool:
        """Whether it is of stage 3."""
        return os.path.split(self.path)[1] != MODEL_FILE

    def lacks(self, name: str) -> bool:
        """Whether `held` has an empty tensor in place of this one."""
        one = self.held[name]
        return (
            self.is_cut
            and name not in self.buffers
            and not one.numel()
            and self.shapes.get(name) != tuple(one.shape)
        )


def read_model_file(path: str) -> ModelFile:
    """FormatError where it is not what DeepSpeed writes."""
    told = load_torch(path, stubs=STUBS)
    try:
        found = _model_file(path, told)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(
            f"{path}: is not what DeepSpeed writes: {type(error).__name__}: {error}"
        ) from error
    absent = [name for name in found.shapes if name not in found.held]
    if absent:
        raise FormatError(listed(f"{path}: has shapes and no tensors of", absent))
    for name, shape in found.shapes.items():
        if tuple(found.held[name].shape) != shape and not found.lacks(name):
            raise FormatError(
                f"{path}: {name}: has shape {tuple(found.held[name].shape)}; its shapes of parameters say {shape}"
            )
    return found


def _model_file(path: str, told: Mapping[str, Any]) -> ModelFile:
    if told["module"] is None:
        raise FormatError(
            f"{path}: has no weights, as those of pipelines; needed a model that is whole in this file"
        )
    modules = {name: unstubbed(one) for name, one in told["module"].items() if is_extra_state(name)}
    held = {
        name: one.detach()
        for name, one in told["module"].items()
        if isinstance(one, torch.Tensor) and name not in modules
    }
    groups = [_shapes(group) for group in told.get("param_shapes") or ()]
    shapes = {name: shape for group in groups for name, shape in group.items()} | _shapes(
        told.get("frozen_param_shapes") or {}
    )
    shared = {
        alias: name
        for alias, name in (told.get("shared_params") or {}).items()
        if alias not in shapes and name in held
    }
    step = told.get("global_steps")
    return ModelFile(
        path,
        held,
        frozenset(told.get("buffer_names") or ()),
        groups,
        shapes,
        {name: one.detach() for name, one in (told.get("frozen_param_fragments") or {}).items()},
        shared if groups else _one_memory(held),
        step if isinstance(step, int) else None,
        int(told.get("dp_world_size") or 1),
        {
            key: unstubbed(value)
            for key, value in told.items()
            if key not in _OURS and value is not None
        },
        modules,
    )


def _shapes(told: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(int, shape)) for name, shape in told.items()}


def _one_memory(held: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that are one piece of memory -> the first of them."""
    first: dict[object, str] = {}
    seen = {
        name: first.setdefault(
            (one.data_ptr(), one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()), name
        )
        for name, one in held.items()
        if one.numel()
    }
    return {name: stored for name, stored in seen.items() if name != stored}


class FrozenParts:
    """Frozen parameters that stage 3 has cut: each of `world` ranks has a part in its own model file. IncompleteError naming those that
    are missing."""

    def __init__(self, first: ModelFile, world: int) -> None:
        self._paths = [
            first.path.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_") for rank in range(world)
        ]
        check_whole(self._paths)
        self._first, self._open = first, {0: first.parts}

    def tensor(self, name: str) -> Assembly:
        shape, part = self._first.shapes[name], self._first.parts[name]
        world = len(self._paths)
        if part.numel() != -(-prod(shape) // world):
            needed = f"needed {-(-prod(shape) // world)} of shape {shape} on {world} ranks"
            raise FormatError(
                f"{self._paths[0]}: {name}: has a part of {part.numel()} elements; {needed}"
            )
        spans = tuple(in_parts(prod(shape), world=world, group=0, start=0))
        return spans_tensor(
            shape,
            part.dtype,
            spans,
            partial(self._load, name, spans),
            lambda span: self._paths[span.rank],
        )

    def _load(self, name: str, spans: Sequence[Span], number: int) -> torch.Tensor:
        span = spans[number]
        if span.rank not in self._open:
            self._open[span.rank] = read_model_file(self._paths[span.rank]).parts
        if name not in self._open[span.rank]:
            raise FormatError(
                f"{self._paths[span.rank]}: has no part of {name}; needed {span.numel} elements of it"
            )
        return self._open[span.rank][name][span.start : span.start + span.numel]

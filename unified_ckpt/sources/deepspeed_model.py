"""The model's file of a DeepSpeed folder, `*mp_rank_00_model_states.pt`: weights, names and shapes, and what the job said beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.errors import FormatError
from unified_ckpt.sources.deepspeed_ranks import STUBS
from unified_ckpt.sources.pickles import load_torch

_OURS = ("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """`held`: the module's tensors, empty ones in place of what stage 3 has cut. `groups`: trained parameters by flat group, in order.
    `frozen`: parameters without an optimizer. `cut`: this rank's part of each of those, under stage 3. `aliases`: of tied weights."""

    path: str
    held: Mapping[str, torch.Tensor]
    buffers: frozenset[str]
    groups: Sequence[Shapes]
    frozen: Shapes
    cut: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    step: int | None
    extra: Mapping[str, Any]


def read_model_file(path: str) -> ModelFile:
    """FormatError where it is not what DeepSpeed writes."""
    told = load_torch(path, stubs=STUBS)
    try:
        return _model_file(path, told)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{path}: is not what DeepSpeed writes: {type(error).__name__}: {error}") from error


def _model_file(path: str, told: Mapping[str, Any]) -> ModelFile:
    if told["module"] is None:
        raise FormatError(f"{path}: has no weights, as those of pipelines; needed a model that is whole in this file")
    held = {name: one.detach() for name, one in told["module"].items() if isinstance(one, torch.Tensor)}
    groups = [_shapes(group) for group in told.get("param_shapes") or ()]
    frozen = _shapes(told.get("frozen_param_shapes") or {})
    stored = {name for group in groups for name in group} | frozen.keys()
    shared = {alias: name for alias, name in (told.get("shared_params") or {}).items() if alias not in stored}
    step = told.get("global_steps")
    return ModelFile(
        path,
        held,
        frozenset(told.get("buffer_names") or ()),
        groups,
        frozen,
        {name: one.detach() for name, one in (told.get("frozen_param_fragments") or {}).items()},
        shared if groups else _one_memory(held),
        step if isinstance(step, int) else None,
        {key: value for key, value in told.items() if key not in _OURS and value is not None},
    )


def _shapes(told: Mapping[str, Any]) -> Shapes:
    return {name: tuple(map(int, shape)) for name, shape in told.items()}


def _one_memory(held: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that are one piece of memory -> the first of them."""
    first: dict[object, str] = {}
    seen = {name: first.setdefault((one.data_ptr(), one.dtype, one.shape, one.stride()), name) for name, one in held.items() if one.numel()}
    return {name: stored for name, stored in seen.items() if name != stored}

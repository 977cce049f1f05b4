"""PaddleNLP's older folders: `model_state*.pdparams` and `optimizer*.pdopt`, pickles of arrays, one for each rank of the mesh.

The optimizer's state is keyed by Paddle's own names of parameters, which the rank's `.pdparams` maps to the model's. Nothing in the files
says how ranks split a parameter: that follows from the layer's name, and must make up the sizes of the config.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.sources.paddle.lazy_pickles import held_arrays, load_arrays, mapping, plain
from unified_ckpt.sources.paddle.names import GATE_UP, Model, layer_of, needed_shape, split_axis
from unified_ckpt.sources.paddle.ranks import RankFile, is_spread, rank_files
from unified_ckpt.sources.paddle.slices import Held, joined
from unified_ckpt.sources.paddle.tensors import POWERS, STATES, Slabs, State

_NAMES = "StructuredToParameterName@@"
_MASTERS, _SCHEDULER, _MASTER_WORD = "master_weights", "LR_Scheduler", "_fp32_master_0"

_Slices = dict[
    str, dict[int, list[Held]]
]  # by parameter, by tensor parallel rank; several are copies


@dataclass(slots=True)
class _Found:
    model: _Slices = field(default_factory=dict)
    masters: _Slices = field(default_factory=dict)
    optimizer: dict[str, _Slices] = field(default_factory=dict)
    statics: dict[str, str] = field(default_factory=dict)
    scheduler: Any = None


def legacy_state(
    root: str, entries: Collection[str], model: Model
) -> tuple[State, Mapping[str, Any]]:
    """The tensors, and the learning rate's state if an optimizer's file has it. IncompleteError naming files that are missing."""
    found = _Found()
    of_ranks: dict[tuple[int, ...], dict[str, str]] = {}
    files = rank_files(root, entries, "model_state", "pdparams")
    for one in files:
        of_ranks[_place(one)] = _read_model(os.path.join(root, one.file), one, found)
    optimizers = rank_files(root, entries, "optimizer", "pdopt")
    for one in optimizers:
        if _place(one) not in of_ranks:
            raise IncompleteError(
                f"{root}: {one.file} is there, and no model_state of its rank; needed it for the parameters' names"
            )
        _read_optimizer(os.path.join(root, one.file), one, of_ranks[_place(one)], found)
    degree = 1 + max(one.at.get("tp", 0) for one in files)
    axes = _axes(root, found, model, degree)
    whole_ones = [_joined(root, slices, axes, degree) for slices in (found.model, found.masters)]
    states = {
        kind: _joined(root, slices, axes if kind in STATES else {}, degree)
        for kind, slices in found.optimizer.items()
    }
    state = State(whole_ones[0], whole_ones[1], states, found.statics, spread=is_spread(optimizers))
    return state, {"scheduler": found.scheduler} if found.scheduler else {}


def _place(one: RankFile) -> tuple[int, ...]:
    return one.within(("tp", "pp", "moe"))


def _read_model(path: str, rank: RankFile, found: _Found) -> dict[str, str]:
    """Adds its slices; gives Paddle's names of its parameters -> the model's."""
    told = load_arrays(path)
    if not isinstance(told, dict):
        raise FormatError(f"{path}: holds a {type(told).__name__}; needed arrays by name")
    table = mapping(path, told, _NAMES)
    held = held_arrays(path, told)
    strangers = sorted(
        str(name) for name in told if str(name) not in held and "@@" not in str(name)
    )  # Paddle's own entries have that
    if strangers or not held:
        raise FormatError(
            listed(f"{path}: has entries that are no arrays, or none at all", strangers)
        )
    for name, one in held.items():
        found.model.setdefault(name, {}).setdefault(rank.at.get("tp", 0), []).append(one)
    found.statics |= {str(name): str(static) for name, static in table.items()}
    return {str(static): str(name) for name, static in table.items()}


def _read_optimizer(path: str, rank: RankFile, names: Mapping[str, str], found: _Found) -> None:
    told = load_arrays(path)
    if not isinstance(told, dict):
        raise FormatError(f"{path}: holds a {type(told).__name__}; needed arrays by name")
    found.scheduler = found.scheduler or plain(told.pop(_SCHEDULER, None))
    masters = mapping(path, told, _MASTERS)
    tp, unknown = rank.at.get("tp", 0), []
    for key, held in held_arrays(path, told).items():
        kind = next((kind for kind in (*STATES, *POWERS) if key.endswith(f"_{kind}")), None)
        owner = names.get(key.removesuffix(f"_{kind}").removesuffix(_MASTER_WORD))
        if kind is None or owner is None:
            unknown.append(key)
            continue
        found.optimizer.setdefault(kind, {}).setdefault(owner, {}).setdefault(tp, []).append(held)
    for static, held in held_arrays(path, masters).items():
        if static in names:
            found.masters.setdefault(names[static], {}).setdefault(tp, []).append(held)
        else:
            unknown.append(static)
    if unknown:
        raise FormatError(
            listed(
                f"{path}: has state that is not read, or of parameters that its .pdparams does not name",
                unknown,
            )
        )


def _axes(root: str, found: _Found, model: Model, degree: int) -> dict[str, int]:
    """The axis of each parameter that tensor parallel ranks have parts of. One that has its whole size on a rank is not split: key heads
    that are fewer than ranks, a vocabulary that does not divide."""
    if degree == 1:
        return {}
    if not model.alike or None in (model.hidden, model.heads, model.intermediate, model.vocab):
        raise FormatError(
            f"{root}: slices of {degree} tensor parallel ranks are joined by the model's sizes; needed its config.json"
        )
    axes = {}
    for name, slices in found.model.items():
        shape = next(iter(slices.values()))[0].shape
        axis = split_axis(
            name, len(shape), layer_of(name, static=found.statics.get(name)), tied=bool(model.tied)
        )
        if axis is not None and shape[axis] != needed_shape(name, len(shape), model)[axis]:
            axes[name] = axis
    return axes


def _joined(root: str, of: _Slices, axes: Mapping[str, int], degree: int) -> dict[str, Slabs]:
    made = {}
    for name, by_rank in of.items():
        axis = axes.get(name)
        if axis is not None and len(by_rank) != degree:
            raise IncompleteError(
                f"{root}: {name}: is in files of {len(by_rank)} tensor parallel ranks of {degree}"
            )
        copies = [
            joined(name, held, None, sections=1)[0].held for _, held in sorted(by_rank.items())
        ]
        made[name] = joined(name, copies, axis, sections=2 if f".{GATE_UP}." in name else 1)
    return made

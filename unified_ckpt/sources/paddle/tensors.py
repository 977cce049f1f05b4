"""Paddle's parameters and optimizer state as torch's tensors: names, orientation, state names, ties. Knows no files.

How state could be lost: a parameter's state is not whole, or belongs to no parameter. Both are errors here, before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from unified_ckpt.core.sharding.boxes import whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.paddle.beta_powers import Betas, Clock, clock_of, steps_of
from unified_ckpt.sources.paddle.names import (
    Cut,
    Model,
    check_shape,
    cuts_of,
    is_adapter,
    is_head,
    is_turned,
    layer_of,
    settled,
    torch_name,
)
from unified_ckpt.sources.paddle.slices import Held, Slab, alike, fragments, shape_of
from unified_ckpt.views.shards import Assembly, Fragment, assembly

STATES = {"moment1_0": "exp_avg", "moment2_0": "exp_avg_sq", "velocity_0": "momentum_buffer"}
BETAS = "betas"  # in `extra`, where one of them is not known
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")

Slabs = list[Slab]


@dataclass(frozen=True, slots=True)
class State:
    """A folder's tensors in Paddle's names and orientation. `optimizer`: by Paddle's name of the state, by parameter. `statics`:
    parameter -> Paddle's own name of it, where it is known. `spread`: the files of each rank have the state of some parameters."""

    model: Mapping[str, Slabs]
    masters: Mapping[str, Slabs] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Slabs]] = field(default_factory=dict)
    statics: Mapping[str, str] = field(default_factory=dict)
    spread: bool = False


@dataclass(frozen=True, slots=True)
class Translated:
    """`names`: of the optimizer's parameters, torch's. `betas`: of Adam, None where they are not known; `counts`: whether it is Adam."""

    tensors: Mapping[Key, Assembly]
    aliases: Mapping[str, Mapping[str, str]]
    names: list[str]
    betas: Betas
    counts: bool


def translated(
    root: str, state: State, model: Model, *, rename: bool, steps: int | None
) -> Translated:
    """`rename`: into Hugging Face's names. `steps`: the trainer's count. FormatError or IncompleteError naming parameters."""
    model = settled(model, {name: shape_of(slabs) for name, slabs in state.model.items()})
    ties = _ties(state, model)
    weights, masters = _untied(state.model, ties), _untied(state.masters, ties)
    states = {kind: _untied(slabs, ties) for kind, slabs in state.optimizer.items()}
    _check_whole(root, weights, masters, states, spread=state.spread)
    _check_layers(root, weights, model)
    cuts = {
        name: _cuts(root, name, shape_of(slabs), state.statics.get(name), model, rename=rename)
        for name, slabs in weights.items()
    }
    found: dict[Key, Assembly] = {}
    moments = [(OPTIMIZER, f"/{STATES[kind]}", states[kind]) for kind in STATES if kind in states]
    for part, kind, named in ((MODEL, "", weights), (MASTER, "", masters), *moments):
        for name, slabs in named.items():
            for cut in cuts[name]:
                found[part, cut.name + kind] = _assembly(root, cut, slabs)
    clock = _clock(root, states, steps)
    if clock is not None:
        for name in states[POWERS[0]]:
            held = tuple(states[kind][name][0].held for kind in POWERS)
            step = Fragment(
                whole(()), partial(_step, f"{root}: {name}", held, clock), held[0].where
            )
            found |= {
                (OPTIMIZER, f"{cut.name}/step"): assembly(torch.float32, (), [step])
                for cut in cuts[name]
            }
    names = [
        cut.name
        for name in cuts
        if any(name in named for named in states.values())
        for cut in cuts[name]
    ]
    theirs = {
        (torch_name(tied, model) if rename else tied): cuts[one][0].name
        for tied, one in ties.items()
    }
    return Translated(
        found,
        _aliases(found, theirs),
        names,
        clock.betas if clock else (None, None),
        counts=clock is not None,
    )


def _ties(state: State, model: Model) -> dict[str, str]:
    """lm_head -> the embedding, of a model in which they are one."""
    embedding = next((name for name in state.model if name.endswith("embed_tokens.weight")), None)
    heads = [
        name
        for named in (state.model, state.masters, *state.optimizer.values())
        for name in named
        if is_head(name)
    ]
    return dict.fromkeys(heads, embedding) if embedding and model.tied else {}


def _untied(named: Mapping[str, Slabs], ties: Mapping[str, str]) -> dict[str, Slabs]:
    """By the name of the one that is tied to; what is stored twice must be the same."""
    copies: dict[str, list[Slabs]] = {}
    for name, slabs in named.items():
        copies.setdefault(ties.get(name, name), []).append(slabs)
    return {name: alike(name, of) for name, of in copies.items()}


def _check_whole(
    root: str,
    weights: Mapping[str, Slabs],
    masters: Mapping[str, Slabs],
    states: Mapping[str, Mapping[str, Slabs]],
    *,
    spread: bool,
) -> None:
    """Every state has a parameter and its shape; a parameter that has some state has all of it.

    `spread`: all parameters need state, as those of a rank whose file is missing have none.
    """
    unknown = sorted(set(states) - STATES.keys() - set(POWERS))
    if unknown:
        raise FormatError(
            listed(
                f"{root}: has optimizer state that is not read; needed AdamW's or Momentum's",
                unknown,
            )
        )
    owners = [
        name for named in (masters, *states.values()) for name in named if name not in weights
    ]
    if owners:
        raise FormatError(
            listed(f"{root}: has state of parameters that the model has not", sorted(set(owners)))
        )
    trained = (
        list(weights)
        if spread
        else list(dict.fromkeys(name for named in states.values() for name in named))
    )
    lost = [
        f"{name}/{kind}" for kind, named in states.items() for name in trained if name not in named
    ]
    lost += [f"{name} (master weight)" for name in trained if masters and name not in masters]
    if lost:
        raise IncompleteError(listed(f"{root}: optimizer state is missing", lost))
    for kind, named in ((MASTER, masters), *states.items()):
        for name, slabs in named.items():
            has, needed = shape_of(slabs), shape_of(weights[name])
            if has != needed and kind not in POWERS:
                raise IncompleteError(
                    f"{root}: {name}: {kind} has shape {has} in {_files(slabs)}; needed the parameter's, {needed}"
                )
            if kind in POWERS and has not in ((), (1,)):
                raise FormatError(f"{root}: {name}: {kind} has shape {has}; needed one element")


def _check_layers(root: str, weights: Mapping[str, Slabs], model: Model) -> None:
    """The config's number of layers: the files of a pipeline's last rank may be missing without a gap in the others' numbers."""
    found = {int(match[1]) for name in weights if (match := re.search(r"\.layers\.(\d+)\.", name))}
    lost = [f"layer {number}" for number in range(model.layers or 0) if number not in found]
    if lost and model.alike and not any(is_adapter(name) for name in weights):
        raise IncompleteError(
            listed(f"{root}: config.json says {model.layers} layers; in no file are", lost)
        )


def _files(slabs: Slabs) -> str:
    return ", ".join(dict.fromkeys(slab.held.where for slab in slabs))


def _cuts(
    root: str, name: str, shape: tuple[int, ...], static: str | None, model: Model, *, rename: bool
) -> list[Cut]:
    try:
        check_shape(name, shape, model)
        turned = is_turned(name, shape, layer_of(name, static=static), tied=model.tied)
        return cuts_of(name, shape, model, turned=turned, rename=rename)
    except CheckpointError as error:
        raise type(error)(f"{root}: {error}") from error


def _assembly(root: str, cut: Cut, slabs: Slabs) -> Assembly:
    try:
        return assembly(slabs[0].held.dtype, cut.shape, fragments(slabs, cut))
    except CheckpointError as error:
        raise type(error)(f"{root}: {cut.name}: {error}") from error


def _clock(root: str, states: Mapping[str, Mapping[str, Slabs]], steps: int | None) -> Clock | None:
    """From one parameter's powers, which are read; None for an optimizer without."""
    one = next(iter(states.get(POWERS[0], ())), None)
    if one is None:
        return None
    if POWERS[1] not in states:
        raise IncompleteError(
            f"{root}: has {POWERS[0]} and no {POWERS[1]}; needed both to tell Adam's steps"
        )
    try:
        return clock_of([_number(states[kind][one][0].held) for kind in POWERS], steps)
    except FormatError as error:
        raise FormatError(f"{root}: {one}: {error}") from error


def _number(held: Held) -> float:
    return float(held.load(whole(held.shape)).reshape(-1)[0])


def _step(where: str, held: tuple[Held, ...], clock: Clock) -> torch.Tensor:
    try:
        return torch.tensor(float(steps_of([_number(one) for one in held], clock)), device="cpu")
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


def _aliases(found: Mapping[Key, Assembly], ties: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Of every part, names of tied tensors -> the ones that are stored."""
    made: dict[str, dict[str, str]] = {}
    for part, name in found:
        owner, slash, kind = name.partition("/") if part == OPTIMIZER else (name, "", "")
        for tied, one in ties.items():
            if owner == one:
                made.setdefault(part, {})[tied + slash + kind] = name
    return made

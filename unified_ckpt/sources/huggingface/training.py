"""Folders of a Hugging Face Trainer (`checkpoint-N`) and of Accelerate's `save_state`: model, optimizer, scheduler, random states.

Read: the model as safetensors, pickled, as adapters, or of FSDP as `torch.distributed.checkpoint` folders, one file, or a file of each
rank. Not read: `training_args.bin`, `sampler.bin`, `custom_checkpoint_*.pkl`, which are pickles of classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.folder.backup import JIT_MARKER
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.sources.detect.names import BIN, BIN_INDEX, DCP_METADATA, TRAINER_STATE
from unified_ckpt.sources.files.json import read_object
from unified_ckpt.sources.files.safetensors import model_files, whole_tensors
from unified_ckpt.sources.huggingface.adapters import adapter_tensors
from unified_ckpt.sources.huggingface.fsdp_ranks import (
    extra_states,
    model_of_ranks,
    optimizer_of_ranks,
    rank_files,
)
from unified_ckpt.sources.pytorch.dcp import open_dcp
from unified_ckpt.sources.pytorch.optimizer_names import Found, by_position, parse_groups
from unified_ckpt.sources.pytorch.parameter_order import order_of
from unified_ckpt.sources.pytorch.state_dict import State, read_bins, read_state
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import Assembled, Assembly

_PLAIN = ("scheduler", "scaler", "dl_state_dict")  # files of plain values, which go to `extra`
_RANDOM = (
    re.compile(r"rng_state()\.pth"),
    re.compile(r"rng_state_(\d+)\.pth"),
    re.compile(r"random_states_(\d+)\.pkl"),
)
_RANDOM_NAMES = {  # the Trainer's and Accelerate's -> those of `RandomStates`
    "python": "python", "numpy": "numpy", "cpu": "torch", "cuda": "cuda",
    "random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "torch", "torch_cuda_manual_seed": "cuda",
}  # fmt: skip


# Numbers from 1 on, which only further models and optimizers have.
_MODEL_NUMBER = re.compile(
    r"(?:model|pytorch_model|pytorch_model_fsdp)_(\d{1,6})(?:\.safetensors|\.bin|_rank\d+\.bin)?"
)
_OPTIMIZER_NUMBER = re.compile(r"optimizer_(\d{1,6})(?:\.pt|\.bin|_rank\d+\.bin)?")


def open_trainer(root: str, options: SourceOptions) -> Source:
    """A Trainer's `checkpoint-N`. IncompleteError naming files that are missing, FormatError for what is damaged."""
    return _open(root, options, Found(root, "trainer"))


def open_accelerate(root: str, options: SourceOptions) -> Source:
    """A folder of `Accelerator.save_state`. Same errors."""
    return _open(root, options, Found(root, "accelerate"))


def _open(root: str, options: SourceOptions, found: Found) -> Source:
    entries = frozenset(os.listdir(root))
    if JIT_MARKER in entries:
        raise IncompleteError(f"{root}: has {JIT_MARKER}: the Trainer was stopped while it saved")
    _read_models(root, entries, found)
    _read_optimizers(root, entries, found)
    step, extra = _extra(root, entries)
    randoms = _random_files(root, entries)
    extra |= found.said.extra or {}
    found.said = replace(found.said, step=step, extra=extra or None, rank_extras=len(randoms))
    found.rank_extra = partial(_random_states, randoms)
    place = options.config or root
    return by_position(
        found, options, own={f"the model of {place}": partial(order_of, place, len(found.unnamed))}
    )


# ---- models


def _read_models(root: str, entries: frozenset[str], found: Found) -> None:
    """Every model of the folder: the first is the part `model`, others `model_1`, ...; what they hold beside is said."""
    number = 0
    values: dict[str, Any] = {}
    while True:
        part = f"model_{number}" if number else MODEL
        one = _one_model(root, entries, part, number)
        if not one.tensors:
            break
        found.tensors |= one.tensors
        found.aliases[part] = one.aliases
        if part == MODEL:
            found.said = replace(found.said, modules=one.modules)
        values |= (
            {part: of} if (of := one.values if part == MODEL else one.values | one.modules) else {}
        )
        number += 1
    found.said = replace(found.said, extra=values)
    _check_numbers(root, entries, _MODEL_NUMBER, number)
    found.tensors |= adapter_tensors(root)
    if not found.tensors:
        raise IncompleteError(
            f"{root}: holds no weights: neither safetensors, nor {BIN}, nor a folder or file pytorch_model_fsdp"
        )


def _check_numbers(
    root: str, entries: frozenset[str], pattern: re.Pattern[str], count: int
) -> None:
    """IncompleteError where there are some with higher numbers: one between them is lost."""
    beyond = sorted(
        name
        for name in entries
        if (match := pattern.fullmatch(name)) and int(match[1]) >= max(count, 1)
    )
    if beyond:
        raise IncompleteError(listed(f"{root}: number {count} is missing, and there are", beyond))


def _one_model(root: str, entries: frozenset[str], part: str, number: int) -> State:
    """What a model holds; no tensors where there is no such model."""
    fsdp, suffix = f"pytorch_model_fsdp_{number}", f"_{number}" if number else ""
    if fsdp in entries:
        opened = _dcp(os.path.join(root, fsdp))
        tensors = {(part, name): one for (of, name), one in opened.tensors.items() if of == MODEL}
        return State(tensors, {}, dict(opened.said().modules), {})
    ranks = rank_files(root, fsdp)
    if ranks:
        return State(model_of_ranks(ranks, part), {}, extra_states(ranks[0]), {})
    full, pickled = f"pytorch_model_fsdp{suffix}.bin", f"pytorch_model{suffix}.bin"
    files = model_files(root, part=part)
    if files:
        return State(whole_tensors(files, part=part), {}, {}, {})
    if full in entries or (pickled in entries and number):
        path = os.path.join(root, full if full in entries else pickled)
        return read_state(path, load_torch(path, numbered=True), part=part)
    if not number and entries & {BIN, BIN_INDEX}:
        return read_bins(root)
    return State({}, {}, {}, {})


def _dcp(root: str) -> Assembled:
    if not os.path.isfile(os.path.join(root, DCP_METADATA)):
        raise IncompleteError(
            f"{root}: has no {DCP_METADATA}, which is written last: the save did not end"
        )
    opened = open_dcp(root, SourceOptions())
    for part in opened.refused:
        opened.names(part)  # says why
    return opened


# ---- optimizers


def _read_optimizers(root: str, entries: frozenset[str], found: Found) -> None:
    """Every optimizer of the folder, by name where it is of FSDP, else by position. FormatError where it has both."""
    number = 0
    while True:
        suffix, folder = f"_{number}" if number else "", f"optimizer_{number}"
        files = [
            name for name in (f"optimizer{suffix}.pt", f"optimizer{suffix}.bin") if name in entries
        ]
        if folder in entries:
            opened = _dcp(os.path.join(root, folder))
            _add_optimizer(
                os.path.join(root, folder),
                found,
                opened.tensors,
                opened.said(),
                prefix=_prefix(found, number),
            )
        elif ranks := rank_files(root, folder):
            _add_optimizer(
                ranks[0], found, *optimizer_of_ranks(ranks), prefix=_prefix(found, number)
            )
        elif files:
            if len(files) > 1:
                raise FormatError(f"{root}: has {' and '.join(files)}; needed one of them")
            found.where.append(os.path.join(root, files[0]))
            found.unnamed += parse_groups(
                found.where[-1], load_torch(found.where[-1], numbered=True)
            )
        else:
            break
        number += 1
    _check_numbers(root, entries, _OPTIMIZER_NUMBER, number)
    if found.unnamed and (found.said.groups or found.said.scalars):
        raise FormatError(
            f"{root}: has optimizers both as folders and as files; needed one of the two"
        )


def _prefix(found: Found, number: int) -> str:
    """What names of an optimizer begin with: Accelerate prepares optimizer n with model n, whose names are its own."""
    part = f"{MODEL}_{number}"
    return f"{part}." if any(key[0] == part for key in found.tensors) else ""


def _add_optimizer(
    where: str, found: Found, tensors: Mapping[Key, Assembly], said: Said, *, prefix: str
) -> None:
    """FormatError where another optimizer has state of a parameter of that name."""
    named = {
        (OPTIMIZER, prefix + name): one
        for (part, name), one in tensors.items()
        if part == OPTIMIZER
    }
    scalars = {prefix + fqn: state for fqn, state in said.scalars.items()}
    twice = sorted(
        {name for _, name in named.keys() & found.tensors.keys()}
        | (scalars.keys() & found.said.scalars.keys())
    )
    if twice:
        raise FormatError(
            listed(
                f"{where}: has state of parameters that another optimizer of the folder has too",
                twice,
            )
        )
    groups = [
        {**group, "names": [prefix + name for name in group["names"]]} for group in said.groups
    ]
    found.tensors |= named
    found.said = replace(
        found.said, groups=[*found.said.groups, *groups], scalars={**found.said.scalars, **scalars}
    )


# ---- what is no tensor of a part


def _extra(root: str, entries: frozenset[str]) -> tuple[int | None, dict[str, Any]]:
    """The step, and plain values by the name of their file."""
    extra: dict[str, Any] = {}
    for name in sorted(entries):
        stem, _, suffix = name.rpartition(".")
        if suffix in ("pt", "bin") and any(
            re.fullmatch(rf"{kind}(_\d+)?", stem) for kind in _PLAIN
        ):
            extra[stem] = load_torch(os.path.join(root, name), numbered=True)
    if TRAINER_STATE in entries:
        extra["trainer_state"] = read_object(os.path.join(root, TRAINER_STATE))
    step = extra.get("trainer_state", {}).get("global_step")
    return (step if isinstance(step, int) else None), extra


def _random_files(root: str, entries: frozenset[str]) -> list[str]:
    """The files of random states, one for each rank. IncompleteError where one in between is missing."""
    found = {
        int(match[1] or 0): name
        for name in entries
        for kind in _RANDOM
        if (match := kind.fullmatch(name))
    }
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise IncompleteError(
            f"{root}: random states of rank {missing[0]} are missing; there are {', '.join(sorted(found.values()))}"
        )
    return [os.path.join(root, found[rank]) for rank in sorted(found)]


def _random_states(files: Sequence[str], rank: int) -> dict[str, Any] | None:
    """What a rank left, as `RandomStates` takes it; what that does not know under the name that it has."""
    if not 0 <= rank < len(files):
        return None
    told = load_torch(files[rank], numbered=True)
    if not isinstance(told, Mapping):
        raise FormatError(
            f"{files[rank]}: holds a {type(told).__name__}; needed random states by name"
        )
    states = {_RANDOM_NAMES.get(key, str(key)): value for key, value in told.items()}
    if isinstance(states.get("cuda"), torch.Tensor):  # of one device
        states["cuda"] = [states["cuda"]]
    return states

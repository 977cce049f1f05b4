"""Folders of a Hugging Face Trainer (`checkpoint-N`) and of Accelerate's `save_state`: model,
optimizer, scheduler, random states.

Read: the model as safetensors, pickled, as adapters, or of FSDP as `torch.distributed.checkpoint`
folders, one file, or a file of each rank. Not read: `training_args.bin`, `sampler.bin`,
`custom_checkpoint_*.pkl`, which are pickles of classes.
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
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder.backup import JIT_MARKER
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.sources.detect.names import BIN, BIN_INDEX, DCP_METADATA, TRAINER_STATE
from unified_ckpt.sources.files.json import read_json_object
from unified_ckpt.sources.files.safetensors import open_model_files, whole_tensors
from unified_ckpt.sources.huggingface.adapters import adapter_tensors
from unified_ckpt.sources.huggingface.fsdp_ranks import (
    extra_states_from_rank,
    model_from_ranks,
    optimizer_from_ranks,
    rank_files,
)
from unified_ckpt.sources.pytorch.dcp import open_dcp
from unified_ckpt.sources.pytorch.optimizer_names import (
    ForeignCheckpoint,
    parse_groups,
    with_optimizer_names,
)
from unified_ckpt.sources.pytorch.parameter_order import config_order
from unified_ckpt.sources.pytorch.state_dict import ParsedStateDict, parse_state_dict, read_bins
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import ShardedSource, ShardedTensor

_PLAIN_FILES = (
    "scheduler",
    "scaler",
    "dl_state_dict",
)  # files of plain values, which go to `extra`
_RNG_FILES = (
    re.compile(r"rng_state()\.pth"),
    re.compile(r"rng_state_(\d+)\.pth"),
    re.compile(r"random_states_(\d+)\.pkl"),
)
_RNG_KEYS = {  # the Trainer's and Accelerate's -> those of `RandomStates`
    "python": "python", "numpy": "numpy", "cpu": "torch", "cuda": "cuda",
    "random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "torch", "torch_cuda_manual_seed": "cuda",
}  # fmt: skip


# Numbers from 1 on, which only further models and optimizers have.
_MODEL_NUMBER = re.compile(
    r"(?:model|pytorch_model|pytorch_model_fsdp)_(\d{1,6})(?:\.safetensors|\.bin|_rank\d+\.bin)?"
)
_OPTIMIZER_NUMBER = re.compile(r"optimizer_(\d{1,6})(?:\.pt|\.bin|_rank\d+\.bin)?")


def open_trainer(root: str, options: SourceOptions) -> Source:
    """A Trainer's `checkpoint-N`. IncompleteError naming files that are missing, FormatError for
    what is damaged.
    """
    return _open(root, options, ForeignCheckpoint(root, "trainer"))


def open_accelerate(root: str, options: SourceOptions) -> Source:
    """A folder of `Accelerator.save_state`. Same errors."""
    return _open(root, options, ForeignCheckpoint(root, "accelerate"))


def _open(root: str, options: SourceOptions, checkpoint: ForeignCheckpoint) -> Source:
    entries = frozenset(os.listdir(root))
    if JIT_MARKER in entries:
        raise IncompleteError(f"{root}: has {JIT_MARKER}: the Trainer was stopped while it saved")
    _read_models(root, entries, checkpoint)
    _read_optimizers(root, entries, checkpoint)
    step, extra = _read_extra(root, entries)
    rng_files = _list_rng_files(root, entries)
    extra |= checkpoint.metadata.extra or {}
    checkpoint.metadata = replace(
        checkpoint.metadata, step=step, extra=extra or None, rank_extras=len(rng_files)
    )
    checkpoint.rank_extra = partial(_read_rng_state, rng_files)
    config_path = options.config or root
    return with_optimizer_names(
        checkpoint,
        options,
        stored_orders={
            f"the model of {config_path}": partial(
                config_order, config_path, len(checkpoint.indexed_groups)
            )
        },
    )


# ---- models


def _read_models(root: str, entries: frozenset[str], checkpoint: ForeignCheckpoint) -> None:
    """Every model of the folder: the first is the part `model`, others `model_1`, ...; what they
    hold beside is said.
    """
    index = 0
    values: dict[str, Any] = {}
    while True:
        part = f"model_{index}" if index else MODEL
        model = _read_model(root, entries, part, index)
        if not model.tensors:
            break
        checkpoint.tensors |= model.tensors
        checkpoint.aliases[part] = model.aliases
        if part == MODEL:
            checkpoint.metadata = replace(checkpoint.metadata, modules=model.extra_states)
        values |= (
            {part: model_values}
            if (
                model_values := model.values if part == MODEL else model.values | model.extra_states
            )
            else {}
        )
        index += 1
    checkpoint.metadata = replace(checkpoint.metadata, extra=values)
    _check_no_gap(root, entries, _MODEL_NUMBER, index)
    checkpoint.tensors |= adapter_tensors(root)
    if not checkpoint.tensors:
        raise IncompleteError(
            f"{root}: holds no weights: neither safetensors, nor {BIN}, nor a folder or file pytorch_model_fsdp"
        )


def _check_no_gap(root: str, entries: frozenset[str], pattern: re.Pattern[str], count: int) -> None:
    """IncompleteError where there are some with higher numbers: one between them is lost."""
    surplus = sorted(
        name
        for name in entries
        if (match := pattern.fullmatch(name)) and int(match[1]) >= max(count, 1)
    )
    if surplus:
        raise IncompleteError(
            format_list(f"{root}: number {count} is missing, and there are", surplus)
        )


def _read_model(root: str, entries: frozenset[str], part: str, index: int) -> ParsedStateDict:
    """What a model holds; no tensors where there is no such model."""
    fsdp_name, suffix = f"pytorch_model_fsdp_{index}", f"_{index}" if index else ""
    if fsdp_name in entries:
        source = _open_complete_dcp(os.path.join(root, fsdp_name))
        tensors = {
            (part, name): tensor
            for (source_part, name), tensor in source.tensors.items()
            if source_part == MODEL
        }
        return ParsedStateDict(tensors, {}, dict(source.metadata().modules), {})
    rank_paths = rank_files(root, fsdp_name)
    if rank_paths:
        return ParsedStateDict(
            model_from_ranks(rank_paths, part), {}, extra_states_from_rank(rank_paths[0]), {}
        )
    full_file, bin_file = f"pytorch_model_fsdp{suffix}.bin", f"pytorch_model{suffix}.bin"
    files = open_model_files(root, part=part)
    if files:
        return ParsedStateDict(whole_tensors(files, part=part), {}, {}, {})
    if full_file in entries or (bin_file in entries and index):
        path = os.path.join(root, full_file if full_file in entries else bin_file)
        return parse_state_dict(path, load_torch(path, numbered=True), part=part)
    if not index and entries & {BIN, BIN_INDEX}:
        return read_bins(root)
    return ParsedStateDict({}, {}, {}, {})


def _open_complete_dcp(root: str) -> ShardedSource:
    if not os.path.isfile(os.path.join(root, DCP_METADATA)):
        raise IncompleteError(
            f"{root}: has no {DCP_METADATA}, which is written last: the save did not end"
        )
    source = open_dcp(root, SourceOptions())
    for part in source.refused:
        source.names(part)  # says why
    return source


# ---- optimizers


def _read_optimizers(root: str, entries: frozenset[str], checkpoint: ForeignCheckpoint) -> None:
    """Every optimizer of the folder, by name where it is of FSDP, else by position. FormatError
    where it has both.
    """
    index = 0
    while True:
        suffix, folder = f"_{index}" if index else "", f"optimizer_{index}"
        files = [
            name for name in (f"optimizer{suffix}.pt", f"optimizer{suffix}.bin") if name in entries
        ]
        if folder in entries:
            source = _open_complete_dcp(os.path.join(root, folder))
            _add_optimizer(
                os.path.join(root, folder),
                checkpoint,
                source.tensors,
                source.metadata(),
                prefix=_optimizer_prefix(checkpoint, index),
            )
        elif rank_paths := rank_files(root, folder):
            _add_optimizer(
                rank_paths[0],
                checkpoint,
                *optimizer_from_ranks(rank_paths),
                prefix=_optimizer_prefix(checkpoint, index),
            )
        elif files:
            if len(files) > 1:
                raise FormatError(f"{root}: has {' and '.join(files)}; needed one of them")
            checkpoint.optimizer_paths.append(os.path.join(root, files[0]))
            checkpoint.indexed_groups += parse_groups(
                checkpoint.optimizer_paths[-1],
                load_torch(checkpoint.optimizer_paths[-1], numbered=True),
            )
        else:
            break
        index += 1
    _check_no_gap(root, entries, _OPTIMIZER_NUMBER, index)
    if checkpoint.indexed_groups and (checkpoint.metadata.groups or checkpoint.metadata.scalars):
        raise FormatError(
            f"{root}: has optimizers both as folders and as files; needed one of the two"
        )


def _optimizer_prefix(checkpoint: ForeignCheckpoint, index: int) -> str:
    """What names of an optimizer begin with: Accelerate prepares optimizer n with model n, whose
    names are its own.
    """
    part = f"{MODEL}_{index}"
    return f"{part}." if any(key[0] == part for key in checkpoint.tensors) else ""


def _add_optimizer(
    path: str,
    checkpoint: ForeignCheckpoint,
    tensors: Mapping[Key, ShardedTensor],
    metadata: SourceMetadata,
    *,
    prefix: str,
) -> None:
    """FormatError where another optimizer has state of a parameter of that name."""
    prefixed = {
        (OPTIMIZER, prefix + name): tensor
        for (part, name), tensor in tensors.items()
        if part == OPTIMIZER
    }
    scalars = {prefix + fqn: state for fqn, state in metadata.scalars.items()}
    duplicates = sorted(
        {name for _, name in prefixed.keys() & checkpoint.tensors.keys()}
        | (scalars.keys() & checkpoint.metadata.scalars.keys())
    )
    if duplicates:
        raise FormatError(
            format_list(
                f"{path}: has state of parameters that another optimizer of the folder has too",
                duplicates,
            )
        )
    groups = [
        {**group, "names": [prefix + name for name in group["names"]]} for group in metadata.groups
    ]
    checkpoint.tensors |= prefixed
    checkpoint.metadata = replace(
        checkpoint.metadata,
        groups=[*checkpoint.metadata.groups, *groups],
        scalars={**checkpoint.metadata.scalars, **scalars},
    )


# ---- what is no tensor of a part


def _read_extra(root: str, entries: frozenset[str]) -> tuple[int | None, dict[str, Any]]:
    """The step, and plain values by the name of their file."""
    extra: dict[str, Any] = {}
    for name in sorted(entries):
        stem, _, suffix = name.rpartition(".")
        if suffix in ("pt", "bin") and any(
            re.fullmatch(rf"{file_stem}(_\d+)?", stem) for file_stem in _PLAIN_FILES
        ):
            extra[stem] = load_torch(os.path.join(root, name), numbered=True)
    if TRAINER_STATE in entries:
        extra["trainer_state"] = read_json_object(os.path.join(root, TRAINER_STATE))
    step = extra.get("trainer_state", {}).get("global_step")
    return (step if isinstance(step, int) else None), extra


def _list_rng_files(root: str, entries: frozenset[str]) -> list[str]:
    """The files of random states, one for each rank. IncompleteError where one in between is
    missing.
    """
    names = {
        int(match[1] or 0): name
        for name in entries
        for pattern in _RNG_FILES
        if (match := pattern.fullmatch(name))
    }
    missing = sorted(set(range(len(names))) - set(names))
    if missing:
        raise IncompleteError(
            f"{root}: random states of rank {missing[0]} are missing; there are {', '.join(sorted(names.values()))}"
        )
    return [os.path.join(root, names[rank]) for rank in sorted(names)]


def _read_rng_state(files: Sequence[str], rank: int) -> dict[str, Any] | None:
    """What a rank left, as `RandomStates` takes it; what that does not know under the name that it
    has.
    """
    if not 0 <= rank < len(files):
        return None
    content = load_torch(files[rank], numbered=True)
    if not isinstance(content, Mapping):
        raise FormatError(
            f"{files[rank]}: holds a {type(content).__name__}; needed random states by name"
        )
    states = {_RNG_KEYS.get(key, str(key)): value for key, value in content.items()}
    if isinstance(states.get("cuda"), torch.Tensor):  # of one device
        states["cuda"] = [states["cuda"]]
    return states

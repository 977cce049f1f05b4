"""Opens folders of a Hugging Face Trainer (`checkpoint-N`) and of Accelerate's `save_state`.

Reads the model, optimizers, schedulers and random states. The model may be safetensors,
pickled, or adapters; under FSDP a DCP folder, one file, or one file per rank.
Does not read `training_args.bin`, `sampler.bin` and `custom_checkpoint_*.pkl`, which are
pickled classes; `left_out` has the names of the last two, which hold state.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.folder.backup import JIT_MARKER
from unified_ckpt.engine.source.protocol import (
    IndexedOptimizerSource,
    Order,
    Source,
    SourceMetadata,
)
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.foreign.dcp.detect import DCP_METADATA
from unified_ckpt.foreign.dcp.source import open_dcp
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.files.parsing import expect_dict
from unified_ckpt.foreign.files.safetensors import open_model_files, whole_tensors
from unified_ckpt.foreign.huggingface.adapters import adapter_tensors
from unified_ckpt.foreign.huggingface.bins import read_bins
from unified_ckpt.foreign.huggingface.detect import BIN, BIN_INDEX, TRAINER_STATE
from unified_ckpt.foreign.pytorch.optimizer_names import ForeignCheckpoint, with_optimizer_names
from unified_ckpt.foreign.pytorch.state_dict import ParsedStateDict, parse_state_dict
from unified_ckpt.foreign.restricted_pickle.load import load_torch, read_torch
from unified_ckpt.foreign.transformers_models import config_order, meta_model, model_order
from unified_ckpt.format.names import MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder
from unified_ckpt.views.sharded_source import ShardedSource
from unified_ckpt.views.shards import ShardedTensor

_PLAIN_FILES = ("scheduler", "scaler", "dl_state_dict")  # plain values, stored in `extra`
_RNG_FILE = r"rng_state(?:_(\d+))?\.pth|random_states_(\d+)\.pkl"
_UNREAD_STATE = re.compile(r"custom_checkpoint_\d+\.pkl|sampler(_\d+)?\.bin")
_RNG_KEYS = {  # keys of the Trainer and of Accelerate -> those of `RandomStates`
    "python": "python",
    "numpy": "numpy",
    "cpu": "torch",
    "cuda": "cuda",
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch",
    "torch_cuda_manual_seed": "cuda",
}

# Only further models and optimizers have a number, from 1 on.
_MODEL_NUMBER = re.compile(
    r"(?:model|pytorch_model|pytorch_model_fsdp)_(\d{1,6})(?:\.safetensors|\.bin|_rank\d+\.bin)?"
)
_OPTIMIZER_NUMBER = re.compile(r"optimizer_(\d{1,6})(?:\.pt|\.bin|_rank\d+\.bin)?")


def open_trainer(root: str, options: SourceOptions) -> Source:
    """Open a Trainer's `checkpoint-N`.

    IncompleteError names missing files, FormatError reports damaged ones.
    """
    return _open(root, options, ForeignCheckpoint(root, "trainer"))


def open_accelerate(root: str, options: SourceOptions) -> Source:
    """Open a folder of `Accelerator.save_state`. Same errors as `open_trainer`."""
    return _open(root, options, ForeignCheckpoint(root, "accelerate"))


def _open(root: str, options: SourceOptions, checkpoint: ForeignCheckpoint) -> Source:
    entries = frozenset(list_folder(root))
    if JIT_MARKER in entries:
        raise IncompleteError(f"{root}: got {JIT_MARKER}: the Trainer was stopped during the save")
    _read_models(root, entries, checkpoint)
    _read_optimizers(root, entries, checkpoint)
    run_files = read_run_files(root, entries)
    extra = {**run_files.extra, **(checkpoint.metadata.extra or {})}
    checkpoint.metadata = replace(
        checkpoint.metadata,
        step=run_files.step,
        extra=extra or None,
        rank_extras=run_files.rank_extras,
        left_out=unread_state(entries),
    )
    checkpoint.rank_extra = run_files.rank_extra
    config_path = options.config or root
    group_count = len(checkpoint.indexed_groups)
    order = partial(config_order, config_path, group_count)
    source = with_optimizer_names(
        checkpoint, options, stored_orders={f"the model of {config_path}": order}
    )
    return _with_config_names(source, config_path, group_count)


def _with_config_names(source: Source, config: str, group_count: int) -> Source:
    """Return a source whose optimizer state by position is named as the config's model is.

    If the model has hub names, all parts get the names in memory, which optimizers go by.
    """
    indexed = source.indexed
    if indexed is None or indexed.by_index is None:
        return source

    def with_order(order: Order | None) -> Source:
        if order is not None:
            return indexed.with_order(order)
        from unified_ckpt.foreign.huggingface.hub_names import in_model_names  # imports torch

        try:
            model = meta_model(config)
        except (NotFoundError, FormatError):
            return indexed.with_stored_order  # raises what is wrong with each order
        if in_model_names(indexed.without_optimizer, model) is indexed.without_optimizer:
            return indexed.with_stored_order
        return in_model_names(indexed.with_order(model_order(model, group_count)), model)

    return IndexedOptimizerSource(indexed.without_optimizer, with_order, by_index=indexed.by_index)


# ---- models


def _read_models(root: str, entries: frozenset[str], checkpoint: ForeignCheckpoint) -> None:
    """Read all models: the first is the part `model`, others are `model_1`, ...."""
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
        model_values = model.values if part == MODEL else model.values | model.extra_states
        if model_values:
            values[part] = model_values
        index += 1
    checkpoint.metadata = replace(checkpoint.metadata, extra=values)
    _check_no_gap(root, entries, _MODEL_NUMBER, index)
    checkpoint.tensors |= adapter_tensors(root)
    if not checkpoint.tensors:
        raise IncompleteError(
            f"{root}: no weights found; expected safetensors, {BIN}, or pytorch_model_fsdp*"
        )


def _check_no_gap(root: str, entries: frozenset[str], pattern: re.Pattern[str], count: int) -> None:
    """Raise IncompleteError if numbers above `count` exist: one in between is missing."""
    raise_if_any(
        IncompleteError,
        f"{root}: number {count} is missing, but found",
        sorted(
            name
            for name in entries
            if (match := pattern.fullmatch(name)) and int(match[1]) >= max(count, 1)
        ),
    )


def _read_model(root: str, entries: frozenset[str], part: str, index: int) -> ParsedStateDict:
    """Read one model; no tensors if the folder has no model of this index."""
    fsdp_name, suffix = f"pytorch_model_fsdp_{index}", f"_{index}" if index else ""
    if fsdp_name in entries:
        source = _open_complete_dcp(os.path.join(root, fsdp_name), MODEL)
        tensors = {(part, name): tensor for (_, name), tensor in source.tensors.items()}
        metadata = source.metadata()
        return ParsedStateDict(tensors, {}, dict(metadata.modules), metadata.extra or {})
    rank_paths = _rank_files(root, entries, rf"{fsdp_name}_rank(\d+)\.bin")
    if rank_paths:
        from unified_ckpt.foreign.huggingface.fsdp_ranks import model_from_ranks  # imports DTensor

        return model_from_ranks(rank_paths, part)
    full_file, bin_file = f"pytorch_model_fsdp{suffix}.bin", f"pytorch_model{suffix}.bin"
    files = open_model_files(root, part=part)
    if files:
        return ParsedStateDict(whole_tensors(files, part=part), {}, {}, {})
    if full_file in entries or (bin_file in entries and index):
        path = os.path.join(root, full_file if full_file in entries else bin_file)
        return parse_state_dict(path, read_torch(path, numbered=True), part=part)
    if not index and entries & {BIN, BIN_INDEX}:
        return read_bins(root)
    return ParsedStateDict({}, {}, {}, {})


def _rank_files(root: str, entries: Collection[str], pattern: str) -> list[str]:
    """Return the paths of the files of ranks 0, 1, ...; [] if there are none.

    `pattern`: of their names, with the rank as a group, 0 without. IncompleteError names missing
    files in between.
    """
    matches = [match for name in entries if (match := re.fullmatch(pattern, name))]
    by_rank = {int(match[match.lastindex]) if match.lastindex else 0: match for match in matches}
    ranks = sorted(by_rank)
    raise_if_any(
        IncompleteError,
        f"{root}: files are missing",
        [
            _name_for_rank(rank, by_rank[ranks[-1]])
            for rank in range(max(ranks, default=0))
            if rank not in by_rank
        ],
    )
    return [os.path.join(root, by_rank[rank][0]) for rank in ranks]


def _name_for_rank(rank: int, match: re.Match[str]) -> str:
    """Return the name of a rank's file, given the match of another rank's."""
    start, stop = match.span(match.lastindex or 0)
    return f"{match.string[:start]}{rank}{match.string[stop:]}"


def _open_complete_dcp(root: str, part: str) -> ShardedSource:
    """Open a DCP folder of one part. FormatError if it has tensors of others."""
    if not is_file(os.path.join(root, DCP_METADATA)):
        raise IncompleteError(
            f"{root}: no {DCP_METADATA}, which is written last: the save did not complete"
        )
    source = open_dcp(root, SourceOptions())
    for refused in source.refused:
        source.names(refused)  # raises the reason
    others = sorted(":".join(key) for key in source.tensors if key[0] != part)
    raise_if_any(FormatError, f"{root}: expected only {part}, got", others)
    return source


# ---- optimizers


def _read_optimizers(root: str, entries: frozenset[str], checkpoint: ForeignCheckpoint) -> None:
    """Read all optimizers: FSDP's by name, others by position. FormatError for both kinds."""
    index = 0
    while True:
        suffix, folder = f"_{index}" if index else "", f"optimizer_{index}"
        files = [
            name for name in (f"optimizer{suffix}.pt", f"optimizer{suffix}.bin") if name in entries
        ]
        if folder in entries:
            source = _open_complete_dcp(os.path.join(root, folder), OPTIMIZER)
            state = source.tensors, source.metadata()
            _add_named_optimizer(checkpoint, os.path.join(root, folder), index, state)
        elif rank_paths := _rank_files(root, entries, rf"{folder}_rank(\d+)\.bin"):
            from unified_ckpt.foreign.huggingface.fsdp_ranks import optimizer_from_ranks

            state = optimizer_from_ranks(rank_paths)
            _add_named_optimizer(checkpoint, rank_paths[0], index, state)
        elif files:
            if len(files) > 1:
                raise FormatError(f"{root}: got {' and '.join(files)}, expected one of them")
            path = os.path.join(root, files[0])
            checkpoint.optimizer_paths.append(path)
            checkpoint.add_optimizer(path, folder, read_torch(path, numbered=True))
        else:
            break
        index += 1
    _check_no_gap(root, entries, _OPTIMIZER_NUMBER, index)
    if checkpoint.indexed_groups and (checkpoint.metadata.groups or checkpoint.metadata.scalars):
        raise FormatError(
            f"{root}: got optimizers by name (FSDP) and by position, expected only one kind"
        )


def _add_named_optimizer(
    checkpoint: ForeignCheckpoint,
    path: str,
    index: int,
    state: tuple[Mapping[Key, ShardedTensor], SourceMetadata],
) -> None:
    """Add an optimizer by name. FormatError if another one has state of the same parameter.

    Accelerate prepares optimizer n together with model n, whose part starts its parameters' names.
    """
    tensors, metadata = state
    part = f"{MODEL}_{index}"
    prefix = f"{part}." if any(key[0] == part for key in checkpoint.tensors) else ""
    prefixed = {(OPTIMIZER, prefix + name): tensor for (_, name), tensor in tensors.items()}
    scalars = {prefix + fqn: state for fqn, state in metadata.scalars.items()}
    raise_if_any(
        FormatError,
        f"{path}: another optimizer also has state of these parameters",
        sorted(
            {name for _, name in prefixed.keys() & checkpoint.tensors.keys()}
            | (scalars.keys() & checkpoint.metadata.scalars.keys())
        ),
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
    checkpoint.add_extra(os.path.split(path)[1], metadata.extra)


# ---- everything else


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What the Trainer and Accelerate write beside models and optimizers, also beside those of
    DeepSpeed.

    `extra`: plain values by the name of their file. `rank_extra` returns the random states of one
    of `rank_extras` ranks.
    """

    step: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    rank_extras: int = 0
    rank_extra: Callable[[int], Any] = lambda _: None


def unread_state(entries: Collection[str]) -> list[str]:
    """Return the names of files with state that is not read."""
    return sorted(filter(_UNREAD_STATE.fullmatch, entries))


def read_run_files(root: str, entries: Collection[str]) -> RunFiles:
    """Read these files of a folder. FormatError if one is damaged, IncompleteError for a gap."""
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
    rng_files = _rank_files(root, entries, _RNG_FILE)
    return RunFiles(
        step if isinstance(step, int) else None,
        extra,
        len(rng_files),
        partial(_read_rng_state, rng_files),
    )


def _read_rng_state(files: Sequence[str], rank: int) -> dict[str, Any] | None:
    """Return a rank's random states under `RandomStates`' keys; unknown keys are unchanged."""
    if not 0 <= rank < len(files):
        return None
    content = load_torch(files[rank], numbered=True)
    content = expect_dict(content, files[rank], "a dict of random states")
    states = {_RNG_KEYS.get(key, str(key)): value for key, value in content.items()}
    if "cuda" in states and not isinstance(states["cuda"], list | tuple):  # a single device
        states["cuda"] = [states["cuda"]]
    return states

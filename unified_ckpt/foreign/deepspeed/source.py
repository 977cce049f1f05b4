"""Opens a folder that DeepSpeed's `save_checkpoint` wrote: ZeRO 1 to 3, or BF16_Optimizer.

Reads fp32 weights and optimizer state under the module's names, from the step that `latest`
names or from a step's own folder. Without ZeRO, optimizer state is by position. The Trainer and
Lightning write the same folders.
Does not read models split by tensor or pipeline parallelism, or with experts spread over ranks.

How wrong bytes could be read: a rank's file is missing, or left from another save; or the
parameters are in another order than in the flat groups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    NotFoundError,
    error_prefix,
)
from unified_ckpt.foreign.deepspeed.detect import DEEPSPEED_LATEST, DEEPSPEED_MODEL
from unified_ckpt.foreign.deepspeed.layout import FlatLayout, zero3_layout, zero12_layout
from unified_ckpt.foreign.deepspeed.model import (
    MODEL_FILE,
    ModelFile,
    frozen_tensors,
    read_model_file,
)
from unified_ckpt.foreign.deepspeed.optimizer_files import (
    FP32,
    OptimizerFiles,
    ParamGroups,
    RankFile,
    check_archives,
    read_rank_file,
)
from unified_ckpt.foreign.deepspeed.parameters import TrainedParameter, parameter_tensors
from unified_ckpt.foreign.deepspeed.universal import (
    STATE_FILE,
    UNIVERSAL_FOLDER,
    read_universal_parameters,
)
from unified_ckpt.foreign.deepspeed.without_zero import open_without_zero
from unified_ckpt.foreign.files.parsing import read_text
from unified_ckpt.foreign.files.safetensors import open_model_files
from unified_ckpt.foreign.huggingface.training import RunFiles, read_run_files, unread_state
from unified_ckpt.format.names import MODEL
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.mapped_pages import PageReclaimer
from unified_ckpt.runtime.storage.regular_files import is_folder, list_folder
from unified_ckpt.views.sharded_source import ShardedSource, SourceExtras
from unified_ckpt.views.shards import ShardedTensor, whole_tensor

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNSUPPORTED = re.compile(r"layer_\d+-model.*|.*expert_\d+.*|expp_rank_.*|.*mp_rank_(?!00)\d+_.*")


def open_deepspeed(root: str, options: SourceOptions) -> Source:
    """Open a DeepSpeed checkpoint.

    FormatError if the folder is damaged or of a kind that is not read. IncompleteError names
    missing and truncated files.
    """
    folder = step_folder(root)
    try:
        return _open(root, folder, options)
    except CheckpointError as error:
        raise error if folder in str(error) else type(error)(f"{folder}: {error}") from error


def _open(root: str, folder: str, options: SourceOptions) -> Source:
    entries = frozenset(list_folder(folder))
    raise_if_any(
        FormatError,
        "got a model split by tensor, pipeline or expert parallelism, which is not read",
        sorted(name for name in entries if _UNSUPPORTED.fullmatch(name)),
    )
    model = read_model_file(_model_path(folder, entries))
    state = _read_training_state(model, folder, entries)
    tensors, reclaimer = dict[Key, ShardedTensor](), PageReclaimer()
    # The Trainer writes Hugging Face's weights there; under stage 3 no other file has the weights.
    hf_weights = {
        name: (file.tensor(name), file.path)
        for file in (open_model_files(root) if model.is_partitioned and root != folder else ())
        for name in file.entries
    }
    for name, parameter in state.parameters.items():
        weights, weights_path = _model_weights(model, hf_weights, name, parameter.shape)
        tensors |= parameter_tensors(
            name,
            parameter,
            weights,
            dtype=model.tensors[name].dtype,
            weights_path=weights_path,
            reclaimer=reclaimer,
        )
    tensors |= _untrained_tensors(model, state.parameters, state.world_size)
    beside = read_run_files(root, list_folder(root)) if root != folder else RunFiles()
    scaler = {} if state.loss_scaler is None else {"loss_scaler": state.loss_scaler}
    metadata = SourceMetadata(
        step=model.step,
        extra={**beside.extra, **model.extra, **scaler} or None,
        modules=model.extra_states,
        groups=[
            {
                "names": [name for index in indices for name in model.flat_groups[index]],
                "options": group_options,
            }
            for group_options, indices in state.param_groups
        ],
        left_out=state.left_out
        if root == folder
        else [*state.left_out, *_unread(folder, entries), *unread_state(list_folder(root))],
    )
    if model.optimizer is not None and not model.flat_groups:
        return open_without_zero(root, model, tensors, metadata, options)
    return ShardedSource(
        root,
        tensors,
        format="deepspeed",
        metadata=replace(metadata, rank_extras=beside.rank_extras),
        aliases={MODEL: model.aliases},
        extras=replace(state.extras, rank_extra=beside.rank_extra),
    )


def _unread(folder: str, entries: Collection[str]) -> list[str]:
    """Return the entries of a step's folder that are not DeepSpeed's, as paths below the root."""
    patterns = (DEEPSPEED_MODEL, _OPTIMIZER, re.compile(UNIVERSAL_FOLDER))
    return sorted(
        f"{os.path.split(folder)[1]}/{name}"
        for name in entries
        if not any(pattern.fullmatch(name) for pattern in patterns)
    )


@dataclass(frozen=True, slots=True)
class _TrainingState:
    """What a step holds beside its model.

    `parameters`: by name, those with optimizer state. `left_out`: what is not read.
    """

    parameters: Mapping[str, TrainedParameter]
    param_groups: ParamGroups
    loss_scaler: Any
    world_size: int
    extras: SourceExtras = field(default_factory=SourceExtras)
    left_out: Sequence[str] = ()


def _read_training_state(model: ModelFile, folder: str, entries: frozenset[str]) -> _TrainingState:
    """Read a universal folder, or else optimizer files, or nothing."""
    if UNIVERSAL_FOLDER in entries:
        universal = os.path.join(folder, UNIVERSAL_FOLDER)
        parameters, param_groups, loss_scaler = read_universal_parameters(universal, model)
        read = {*parameters, STATE_FILE}
        return _TrainingState(
            parameters,
            param_groups,
            loss_scaler,
            model.world_size,
            left_out=[
                f"{UNIVERSAL_FOLDER}/{name}"
                for name in sorted(list_folder(universal))
                if name not in read
            ],
        )
    if not model.flat_groups:
        return _TrainingState({}, (), None, model.world_size)
    rank0_file, paths = _list_optimizer_files(folder, entries)
    layout = _flat_layout(model, rank0_file)
    optimizer_files = OptimizerFiles(rank0_file, paths, layout)
    return _TrainingState(
        {
            name: TrainedParameter(
                shape,
                flat_tensors[FP32].dtype,
                layout.ranges[name],
                optimizer_files.elements,
                optimizer_files.file_path,
                {key: tensor.dtype for key, tensor in flat_tensors.items() if key != FP32},
                scalars,
            )
            for group, flat_tensors, scalars in zip(
                model.flat_groups, rank0_file.flat_tensors, rank0_file.scalars, strict=True
            )
            for name, shape in group.items()
        },
        rank0_file.param_groups,
        rank0_file.loss_scaler,
        rank0_file.world_size,
        SourceExtras(close=optimizer_files.close),
    )


# ---- files


def step_folder(root: str) -> str:
    """Return the folder of the step that `latest` names, or `root` itself.

    IncompleteError if that folder does not exist.
    """
    if not is_folder(root):
        raise NotFoundError(f"{root}: no such folder")
    entries = frozenset(list_folder(root))
    if any(DEEPSPEED_MODEL.fullmatch(name) for name in entries):
        return root
    tag_files = [name for name in DEEPSPEED_LATEST if name in entries]
    if not tag_files:
        raise FormatError(
            f"{root}: expected a DeepSpeed folder with {DEEPSPEED_LATEST[0]} or model state files"
        )
    tags = [_read_tag(root, tag_file) for tag_file in tag_files]
    # The step's own folder may have been deleted after its conversion to a universal checkpoint.
    converted = [tag for tag in tags[1:] if tag.startswith(f"{tags[0]}_")]
    for tag in (tags[0], *converted):
        if is_folder(os.path.join(root, tag)):
            return os.path.normpath(os.path.join(root, tag))
    raise IncompleteError(
        f"{root}/{tag_files[0]}: names {tags[0]!r}, which does not exist; "
        "pass the folder of an existing step"
    )


def _read_tag(root: str, tag_file: str) -> str:
    """Return the folder that `latest` or `latest_universal` names.

    FormatError if it is outside `root`.
    """
    tag = read_text(os.path.join(root, tag_file))
    if not tag or not os.path.normpath(os.path.join(root, tag)).startswith(os.path.join(root, "")):
        raise FormatError(f"{root}/{tag_file}: got {tag!r}, expected a folder in {root}")
    return tag


def _model_path(folder: str, entries: frozenset[str]) -> str:
    """Return the path of rank 0's model file; under stage 3 every rank has one."""
    names = [name for name in (MODEL_FILE, f"zero_pp_rank_0_{MODEL_FILE}") if name in entries]
    if len(names) > 1:
        raise FormatError(format_list("got files of two saves", names))
    is_partitioned = any(
        name.startswith("zero_pp_rank_") and name.endswith(MODEL_FILE) for name in entries
    )
    path = os.path.join(folder, f"zero_pp_rank_0_{MODEL_FILE}" if is_partitioned else MODEL_FILE)
    check_archives([path])
    return path


def _list_optimizer_files(folder: str, entries: frozenset[str]) -> tuple[RankFile, list[str]]:
    """Read rank 0's optimizer file and list the paths of all ranks.

    IncompleteError names missing files.
    """
    names_by_rank: dict[int, list[str]] = {}
    for name in sorted(entries):
        if match := _OPTIMIZER.fullmatch(name):
            names_by_rank.setdefault(int(match[1]), []).append(name)
    raise_if_any(
        FormatError,
        "got files of two saves",
        [name for names in names_by_rank.values() if len(names) > 1 for name in names],
    )
    if 0 not in names_by_rank:
        raise IncompleteError(
            "rank 0's optimizer file, zero_pp_rank_0_mp_rank_00_optim_states.pt, is missing"
        )
    rank0_name = names_by_rank[0][0]
    rank0_file = read_rank_file(os.path.join(folder, rank0_name))
    world_size = rank0_file.world_size
    surplus = sorted(set(names_by_rank) - set(range(world_size)))
    if surplus:
        raise FormatError(
            f"got files of ranks {surplus}, expected {world_size} ranks as in {rank0_file.path}: "
            "these are files of two saves"
        )
    names = [
        names_by_rank.get(rank, [rank0_name.replace("rank_0", f"rank_{rank}", 1)])[0]
        for rank in range(world_size)
    ]
    paths = [os.path.join(folder, name) for name in names]
    check_archives(paths)
    return rank0_file, paths


# ---- tensors


def _model_weights(
    model: ModelFile,
    hf_weights: Mapping[str, tuple[torch.Tensor, str]],
    name: str,
    shape: tuple[int, ...],
) -> tuple[torch.Tensor | None, str]:
    """Return the model's own weights of a trained parameter, or None, and the path of their file.

    FormatError if those beside the folder have another shape.
    """
    if not model.is_placeholder(name):
        return model.tensors[name], model.path
    if name not in hf_weights:
        return None, model.path
    weights, path = hf_weights[name]
    if tuple(weights.shape) != shape:
        raise FormatError(
            f"{path}: {name}: got shape {tuple(weights.shape)}, expected {shape} as in {model.path}"
        )
    return (weights, path) if weights.dtype == model.tensors[name].dtype else (None, model.path)


def _flat_layout(model: ModelFile, rank0_file: RankFile) -> FlatLayout:
    groups = [{name: prod(shape) for name, shape in group.items()} for group in model.flat_groups]
    partition_numels = [
        flat_tensors[FP32].numel() + padding
        for flat_tensors, padding in zip(rank0_file.flat_tensors, rank0_file.paddings, strict=True)
    ]
    with error_prefix(rank0_file.path):
        if rank0_file.stage == 3:
            return zero3_layout(groups, partition_numels, world_size=rank0_file.world_size)
        gaps = rank0_file.gaps
        if gaps is None:
            gaps = tuple((0,) * len(group) for group in groups)
        return zero12_layout(groups, gaps, partition_numels, world_size=rank0_file.world_size)


def _untrained_tensors(
    model: ModelFile, parameters: Mapping[str, TrainedParameter], world_size: int
) -> dict[Key, ShardedTensor]:
    """Return buffers and parameters that have no optimizer state.

    IncompleteError names parameters whose elements are in no file.
    """
    names = [name for name in model.tensors if name not in parameters and name not in model.aliases]
    frozen = [name for name in names if model.is_placeholder(name)]
    raise_if_any(
        IncompleteError,
        f"{model.path}: no file has the elements of",
        [name for name in frozen if name not in model.frozen_parts],
    )
    tensors = {
        name: whole_tensor(model.tensors[name], model.path) for name in names if name not in frozen
    }
    if frozen:
        tensors |= frozen_tensors(model, frozen, world_size)
    return {(MODEL, name): tensor for name, tensor in tensors.items()}

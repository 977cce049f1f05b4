"""PaddleNLP's Unified Checkpoints: safetensors with indices, of the model or an adapter, master
weights and the optimizer; merged or a file for each rank, compressed or not, with master weights,
without, or with nothing else.

How wrong state could be read: a file or a slice is missing, compressed bytes are taken as they are,
master weights for the model's. The indices, the headers and the numbers of ranks are compared
before anything is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.detect.paddle import PEFT, is_legacy, part_file
from unified_ckpt.sources.files.json import config_path
from unified_ckpt.sources.paddle.files import open_indexed, open_tensors, read_optional_json
from unified_ckpt.sources.paddle.legacy import read_legacy_state
from unified_ckpt.sources.paddle.names import (
    GATE_UP,
    ModelConfig,
    layer_kind,
    parse_config,
    split_axis,
)
from unified_ckpt.sources.paddle.quantized_moments import (
    MAX_SCALES,
    MIN_SCALES,
    SCALES,
    first_moment_o1,
    first_moment_o2,
    second_moment_o1,
    second_moment_o2,
)
from unified_ckpt.sources.paddle.ranks import is_sharded, rank_files
from unified_ckpt.sources.paddle.slices import StoredTensor, concat_tp, single_slice
from unified_ckpt.sources.paddle.tensors import BETAS, STATE_NAMES, PaddleTensors, Slices, to_torch
from unified_ckpt.sources.paddle.trainer_state import read_trainer_state, with_scheduler
from unified_ckpt.views.shards import ShardedSource

_FIRST_MOMENT, _SECOND_MOMENT = "moment1_0", "moment2_0"
_HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def open_paddle(root: str, options: SourceOptions) -> ShardedSource:
    """A Unified Checkpoint, or a folder of `.pdparams`. FormatError, or IncompleteError naming what
    is missing.
    """
    entries = frozenset(os.listdir(root)) if os.path.isdir(root) else frozenset()
    config = read_optional_config(options.config or root)
    if options.config and config is None:
        raise NotFoundError(f"{options.config}: is no config.json, nor a folder that has one")
    model, trainer_state = parse_config(config or {}), read_trainer_state(root, entries)
    if options.names == "huggingface" and not model.has_hf_names:
        raise FormatError(
            f"{root}: Hugging Face's names are not known for model_type {model.model_type!r}; needed a config.json, or names='own'"
        )
    unified = not entries.isdisjoint(_INDICES)
    if unified:
        _check_written_by_paddle(root, entries, config or {}, model)
        _check_indexed(root, entries)
        state = _read_state(root, entries, model)
    elif is_legacy(entries):
        state, pickled = read_legacy_state(root, entries, model)
        trainer_state = with_scheduler(trainer_state, pickled)
    else:
        raise NotFoundError(
            f"{root}: has no index of PaddleNLP's and no model_state*.pdparams; needed one of {', '.join(_INDICES)}"
        )
    torch_tensors = to_torch(
        root,
        state,
        model,
        rename=model.has_hf_names and options.names != "own",
        steps=trainer_state.step,
    )
    betas_known = None not in torch_tensors.betas
    groups = (
        [
            {
                "names": torch_tensors.names,
                "options": {
                    **trainer_state.group_options,
                    **({"betas": torch_tensors.betas} if betas_known else {}),
                },
            }
        ]
        if torch_tensors.names
        else []
    )
    betas_extra = (
        {BETAS: torch_tensors.betas} if torch_tensors.is_adam and not betas_known else {}
    )  # for who writes Paddle's powers again
    metadata = SourceMetadata(
        step=trainer_state.step, extra={**trainer_state.extra, **betas_extra} or None, groups=groups
    )
    return ShardedSource(
        root,
        torch_tensors.tensors,
        format="paddle" if unified else "paddle-legacy",
        metadata=metadata,
        aliases=torch_tensors.aliases,
    )


_INDICES = tuple(names.index_name(part) for part in (MODEL, PEFT, MASTER))


def read_optional_config(path: str) -> Mapping[str, Any] | None:
    """A model's config.json: a file, or in a folder; None where there is none."""
    folder, name = os.path.split(config_path(path))
    return _read_object(folder, name) if os.path.isfile(config_path(path)) else None


def _check_written_by_paddle(
    root: str, entries: Collection[str], config: Mapping[str, Any], model: ModelConfig
) -> None:
    """Names that Hugging Face's folders have too are no proof that weights are [in, out]: then the
    config's sizes must show it.
    """
    paddle_indexes = {names.index_name(OPTIMIZER), names.index_name(MASTER), names.index_name(PEFT)}
    if (
        paddle_indexes.isdisjoint(entries)
        and "paddlenlp_version" not in config
        and not (model.has_hf_names and model.hidden and model.intermediate)
    ):
        raise FormatError(
            f"{root}: nothing but headers says that PaddleNLP wrote it; needed its config.json, or --from huggingface if its weights are "
            "[out, in]"
        )


def _check_indexed(root: str, entries: Collection[str]) -> None:
    """Every part that has files has its index, without which none of them would be read; ranks'
    master weights go by the optimizer's.
    """
    indexed_parts = {
        part for part in (MODEL, PEFT, OPTIMIZER, MASTER) if names.index_name(part) in entries
    }
    exempt = {MODEL} if PEFT in indexed_parts else set()  # the adapter's base, which is not read
    if OPTIMIZER in indexed_parts and "weight_map" not in _read_object(
        root, names.index_name(OPTIMIZER)
    ):
        exempt |= {MASTER}
    for part in (MODEL, PEFT, OPTIMIZER, MASTER):
        files = sorted(entry for entry in entries if part_file(part).fullmatch(entry))
        if files and part not in indexed_parts | exempt:
            raise IncompleteError(
                format_list(
                    f"{root}: {names.index_name(part)} is missing, which tells what these files hold",
                    files,
                )
            )


def _read_state(root: str, entries: Collection[str], model: ModelConfig) -> PaddleTensors:
    optimizer_index = (
        _read_object(root, names.index_name(OPTIMIZER))
        if names.index_name(OPTIMIZER) in entries
        else None
    )
    is_adapter = names.index_name(PEFT) in entries
    if is_adapter and _read_object(root, names.index_name(PEFT)).get("type") != "lora":
        raise FormatError(
            f"{root}: {names.index_name(PEFT)} is of another adapter than LoRA; needed type 'lora'"
        )
    weights, masters = (
        {
            name: single_slice(tensor)
            for name, tensor in open_indexed(root, names.index_name(part)).items()
        }
        if names.index_name(part) in entries
        else {}
        for part in (PEFT if is_adapter else MODEL, MASTER)
    )
    states: Mapping[str, Mapping[str, Slices]] = {}
    if optimizer_index is not None and "weight_map" in optimizer_index:
        states = _merged_states(root, optimizer_index)
    elif optimizer_index is not None:
        masters, states = _unmerged_states(root, entries, weights, model, optimizer_index)
    if optimizer_index is not None and optimizer_index.get("master_weights") and not masters:
        masters = weights
        if any(slabs[0].tensor.dtype != torch.float32 for slabs in weights.values()):
            raise IncompleteError(
                f"{root}: {names.index_name(MASTER)} is missing, and the model's weights are not float32 in its place"
            )
    if masters and (
        not weights or masters is weights
    ):  # `skip_save_model_weight`: the master weights stand for both
        half_dtype = _HALF_DTYPES.get(model.dtype or "")
        weights = (
            {
                name: single_slice(_cast(slabs[0].tensor, half_dtype))
                for name, slabs in masters.items()
            }
            if half_dtype
            else masters
        )
    return PaddleTensors(
        weights,
        masters,
        states,
        is_sharded=optimizer_index is not None
        and "weight_map" not in optimizer_index
        and _is_sharded(root, entries),
    )


def _read_object(root: str, name: str) -> Mapping[str, Any]:
    value = read_optional_json(root, name)
    if not isinstance(value, dict):
        raise FormatError(f"{os.path.join(root, name)}: is no JSON object")
    return value


def _cast(tensor: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    return StoredTensor(
        dtype, tensor.shape, tensor.path, partial(_load_cast, tensor, dtype), computed=True
    )


def _load_cast(tensor: StoredTensor, dtype: torch.dtype, box: Box) -> torch.Tensor:
    return tensor.copy(box).to(dtype)


def _merged_states(root: str, optimizer_index: Mapping[str, Any]) -> dict[str, dict[str, Slices]]:
    """By state, by parameter."""
    stage = _quant_stage(root, optimizer_index)
    tensors = open_indexed(
        root, names.index_name(OPTIMIZER), absent=(f"/{_FIRST_MOMENT}",) if stage == "O2" else ()
    )
    return {
        state_name: {name: single_slice(tensor) for name, tensor in by_name.items()}
        for state_name, by_name in _group_by_state(root, tensors, stage).items()
    }


def _quant_stage(root: str, optimizer_index: Mapping[str, Any]) -> str:
    stage = optimizer_index.get("ckpt_quant_stage", "O0")
    if stage not in ("O0", "O1", "O2"):
        raise FormatError(f"{root}: ckpt_quant_stage is {stage!r}; needed O0, O1 or O2")
    return str(stage)


def _group_by_state(
    root: str, tensors: Mapping[str, StoredTensor], stage: str
) -> dict[str, dict[str, StoredTensor]]:
    """Tensors of an optimizer's file or files by state and parameter, decompressed."""
    values = {
        name: tensor for name, tensor in tensors.items() if "@" not in name.rpartition("/")[2]
    }
    malformed = sorted(name for name in values if name.count("/") != 1)
    if malformed:
        raise FormatError(
            format_list(f"{root}: names of optimizer state that are no parameter/state", malformed)
        )
    by_state: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in values.items():
        owner, _, state_name = name.partition("/")
        try:
            by_state.setdefault(state_name, {})[owner] = _dequantize(name, tensor, tensors, stage)
            if stage == "O2" and state_name == _SECOND_MOMENT and tensor.dtype == torch.int8:
                by_state.setdefault(_FIRST_MOMENT, {})[owner] = first_moment_o2(
                    tensor, tensors[f"{owner}/{_FIRST_MOMENT}{SCALES}"]
                )
        except KeyError as error:
            raise IncompleteError(
                f"{root}: {name}: is compressed, and {error.args[0]} is in no file"
            ) from None
        if state_name in STATE_NAMES and by_state[state_name][owner].dtype != torch.float32:
            raise FormatError(
                f"{tensor.path}: {name}: is {tensor.dtype} under ckpt_quant_stage {stage}; needed float32, or what that writes"
            )
    return by_state


def _dequantize(
    name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor], stage: str
) -> StoredTensor:
    if stage == "O1" and name.endswith(_FIRST_MOMENT) and tensor.dtype == torch.int8:
        return first_moment_o1(tensor, tensors[name + SCALES])
    if (
        stage != "O0"
        and name.endswith(_SECOND_MOMENT)
        and tensor.dtype in (torch.uint8, torch.int8)
    ):
        second_moment = second_moment_o1 if stage == "O1" else second_moment_o2
        return second_moment(tensor, tensors[name + MIN_SCALES], tensors[name + MAX_SCALES])
    return tensor


# ---- a file for each rank (`ignore_merge_optimizer`)


def _unmerged_states(
    root: str,
    entries: Collection[str],
    weights: Mapping[str, Slices],
    model: ModelConfig,
    optimizer_index: Mapping[str, Any],
) -> tuple[dict[str, Slices], dict[str, dict[str, Slices]]]:
    """Master weights and optimizer state from the ranks' files; the model's tensors, which are
    merged, say how large they are.
    """
    files_by_part = {
        part: rank_files(root, entries, part, "safetensors") for part in (OPTIMIZER, MASTER)
    }
    if not files_by_part[OPTIMIZER]:
        raise IncompleteError(
            f"{root}: {names.index_name(OPTIMIZER)} says that each rank has a file; found none of {OPTIMIZER}.*.safetensors"
        )
    endings = {
        tensor.file.removeprefix(part)
        for part, rank_files_of_part in files_by_part.items()
        for tensor in rank_files_of_part
    }
    absent = [
        part + ending
        for part, rank_files_of_part in files_by_part.items()
        for ending in sorted(endings)
        if rank_files_of_part and part + ending not in entries
    ]
    if absent:
        raise IncompleteError(format_list(f"{root}: files of some ranks are missing", absent))
    stage, pieces = (
        _quant_stage(root, optimizer_index),
        {part: dict[tuple[str, str], dict[int, list[StoredTensor]]]() for part in files_by_part},
    )
    for part, rank_files_of_part in files_by_part.items():
        for rank_file in rank_files_of_part:
            tensors = open_tensors(os.path.join(root, rank_file.file))
            for state_name, by_name in (
                _group_by_state(root, tensors, stage) if part == OPTIMIZER else {"": tensors}
            ).items():
                for name, tensor in by_name.items():
                    pieces[part].setdefault((state_name, name), {}).setdefault(
                        rank_file.coordinates.get("tp", 0), []
                    ).append(tensor)
    degree = 1 + max(rank_file.coordinates.get("tp", 0) for rank_file in files_by_part[OPTIMIZER])
    merged = {
        part: {
            key: _concat_ranks(root, key, by_rank, degree, weights, model)
            for key, by_rank in pieces_by_key.items()
        }
        for part, pieces_by_key in pieces.items()
    }
    states: dict[str, dict[str, Slices]] = {}
    for (state_name, name), slabs in merged[OPTIMIZER].items():
        states.setdefault(state_name, {})[name] = slabs
    return {name: slabs for (_, name), slabs in merged[MASTER].items()}, states


def _is_sharded(root: str, entries: Collection[str]) -> bool:
    return is_sharded(rank_files(root, entries, OPTIMIZER, "safetensors"))


def _concat_ranks(
    root: str,
    key: tuple[str, str],
    by_rank: Mapping[int, list[StoredTensor]],
    degree: int,
    weights: Mapping[str, Slices],
    model: ModelConfig,
) -> Slices:
    state_name, name = key
    first_tensor = by_rank[min(by_rank)][0]
    full_shape = weights[name][0].tensor.shape if name in weights else None
    if first_tensor.shape == full_shape or (state_name and state_name not in STATE_NAMES):
        return concat_tp(
            name, [tensor for rank in sorted(by_rank) for tensor in by_rank[rank]], None, sections=1
        )
    if len(by_rank) != degree:
        raise IncompleteError(
            f"{root}: {name}: {state_name or MASTER} is in files of {len(by_rank)} tensor parallel ranks of {degree}"
        )
    axis = split_axis(name, len(first_tensor.shape), layer_kind(name), tied=bool(model.tied))
    slices = [
        concat_tp(name, replicas, None, sections=1)[0].tensor
        for _, replicas in sorted(by_rank.items())
    ]
    return concat_tp(name, slices, axis, sections=2 if f".{GATE_UP}." in name else 1)

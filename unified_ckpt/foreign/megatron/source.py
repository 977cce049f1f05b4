"""Opens Megatron checkpoints: `mp_rank_*/model_optim_rng.pt`, torch_dist, or a root of either.

The former is read here, the latter by `dist.py`. Tensors get Hugging Face names if the model is
known, otherwise Megatron's own, with layers and experts numbered over all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.dcp.detect import DCP_METADATA
from unified_ckpt.foreign.files.parsing import step_folder
from unified_ckpt.foreign.megatron.arguments import Arguments
from unified_ckpt.foreign.megatron.detect import MEGATRON_TRACKER
from unified_ckpt.foreign.megatron.dist import open_dist, step_count
from unified_ckpt.foreign.megatron.files import (
    FLAT_FILE,
    RankFile,
    expert_tp_rank,
    read_rank_files,
)
from unified_ckpt.foreign.megatron.master_check import master_check
from unified_ckpt.foreign.megatron.names import OUTPUT, is_expert, parse_expert
from unified_ckpt.foreign.megatron.optimizer_states import (
    ParamKey,
    ParamState,
    read_optimizer_states,
)
from unified_ckpt.foreign.megatron.random_state import read_rng_state
from unified_ckpt.foreign.megatron.tensor_parallel import Slice, global_slices, is_parameter
from unified_ckpt.foreign.megatron.view import MegatronContent, build_source
from unified_ckpt.foreign.pytorch.optimizer_groups import groups_by_options
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import is_file
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor


@dataclass(slots=True)
class _GlobalTensor:
    """A tensor of the whole model while it is assembled.

    `options`: of its param group. `step`: of its optimizer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    # By "model", "master_weights", and names of optimizer state.
    shards: dict[str, list[TensorShard]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    step: float | None = None
    options: Mapping[str, Any] | None = None


def open_megatron(root: str, options: SourceOptions) -> Source:
    """Open a Megatron checkpoint.

    FormatError for files that are damaged or in an unknown order; IncompleteError names missing
    ranks and tensors.
    """
    folder = step_folder(root, MEGATRON_TRACKER, "iter_{:07d}".format, others=("release",))
    if is_file(os.path.join(folder, DCP_METADATA)):
        return open_dist(folder, options)
    args, rank_files = read_rank_files(folder)
    state_dict = rank_files[0].state_dict
    version = float(state_dict.get("checkpoint_version", 0))
    if version < 2:
        raise FormatError(
            f"{folder}: got checkpoint_version {version} with another order of queries, keys and "
            "values, expected 2 or later"
        )
    optimizer_states, refusal = _collect_optimizer_states(folder, rank_files, args)
    global_tensors = _merge_ranks(rank_files, args, optimizer_states)
    content = MegatronContent(
        folder,
        "megatron",
        dict(_sharded_tensors(folder, global_tensors)),
        state_dict,
        groups_by_options(
            (name, tensor.options)
            for name, tensor in global_tensors.items()
            if tensor.options is not None
        ),
        partial(read_rng_state, rank_files, args) if "rng_state" in state_dict else None,
        refusal,
        sorted(frozenset().union(*(rank_file.left_out for rank_file in rank_files))),
    )
    return build_source(content, args, options)


def _replica_group(rank_file: RankFile, name: str, args: Arguments) -> tuple[int, ...]:
    """Return the group of ranks that hold the same slice of a tensor."""
    if is_expert(name):
        return rank_file.pp, expert_tp_rank(rank_file, args), rank_file.ep
    return rank_file.pp, rank_file.tp


OptimizerStates = Mapping[tuple[tuple[int, ...], ParamKey], tuple[RankFile, ParamState]]


def _collect_optimizer_states(
    folder: str, rank_files: Sequence[RankFile], args: Arguments
) -> tuple[OptimizerStates, str]:
    """Return optimizer state by replica group and parameter; or none, and the reason.

    IncompleteError names tensors without state, if others have some.
    """
    collected: dict[tuple[tuple[int, ...], ParamKey], tuple[RankFile, ParamState]] = {}
    for rank_file in rank_files:
        try:
            for param_key, state in read_optimizer_states(rank_file, args).items():
                collected.setdefault(
                    (_replica_group(rank_file, param_key[1], args), param_key), (rank_file, state)
                )
        except FormatError as error:
            return {}, str(error)
    missing = {
        f"{rank_file.path}: {name}"
        for rank_file in rank_files
        for chunk_index, chunk in enumerate(rank_file.chunks)
        for name in chunk
        if is_parameter(name)
        and (_replica_group(rank_file, name, args), (chunk_index, name)) not in collected
    }
    if missing and any("optimizer" in rank_file.state_dict for rank_file in rank_files):
        problem = f"{folder}: tensors have no optimizer state; is {FLAT_FILE} missing?"
        raise IncompleteError(format_list(problem, sorted(missing)))
    return collected, ""


def _merge_ranks(
    rank_files: Sequence[RankFile], args: Arguments, optimizer_states: OptimizerStates
) -> dict[str, _GlobalTensor]:
    global_tensors: dict[str, _GlobalTensor] = {}
    seen: set[tuple[tuple[int, ...], ParamKey]] = set()
    tied = args.pp > 1 and not args.get_bool("untie_embeddings_and_output_weights")
    for rank_file in rank_files:
        for chunk_index, chunk in enumerate(rank_file.chunks):
            for name, tensor in chunk.items():
                key = _replica_group(rank_file, name, args), (chunk_index, name)
                # The last pipeline stage has a copy of a tied embedding.
                if key in seen or (tied and name == OUTPUT):
                    continue
                seen.add(key)
                with error_prefix(rank_file.path):
                    state = optimizer_states.get(key)
                    for tensor_slice in global_slices(rank_file, name, tensor, args):
                        _add_slice(global_tensors, rank_file, tensor_slice, tensor, state)
    _check_experts(global_tensors, args)
    return global_tensors


def _check_experts(tensor_names: Collection[str], args: Arguments) -> None:
    """Raise IncompleteError naming experts that no rank has, if the layer has others."""
    numbers_by_template: dict[str, set[int]] = {}
    for template, number in filter(None, map(parse_expert, tensor_names)):
        numbers_by_template.setdefault(template, set()).add(number)
    raise_if_any(
        IncompleteError,
        f"{args.path}: expected {args.experts} experts, missing or surplus tensors are",
        [
            name.format(n)
            for name, numbers in numbers_by_template.items()
            for n in sorted(set(range(args.experts)) ^ numbers)
        ],
    )


def _add_slice(
    global_tensors: dict[str, _GlobalTensor],
    rank_file: RankFile,
    tensor_slice: Slice,
    tensor: torch.Tensor,
    optimizer_state: tuple[RankFile, ParamState] | None,
) -> None:
    name, shape = tensor_slice.name, tensor_slice.shape
    global_tensor = global_tensors.setdefault(name, _GlobalTensor(shape, tensor.dtype))
    if global_tensor.shape != shape or global_tensor.dtype != tensor.dtype:
        raise FormatError(
            f"{name}: got shape {shape} and {tensor.dtype}, expected {global_tensor.shape} "
            f"and {global_tensor.dtype} as on other ranks"
        )

    def make_shard(kind: str, value: torch.Tensor, path: str) -> TensorShard:
        global_tensor.dtypes.setdefault(kind, value.dtype)
        return TensorShard(tensor_slice.box, partial(tensor_slice.extract, value), path)

    global_tensor.shards.setdefault(MODEL, []).append(make_shard(MODEL, tensor, rank_file.path))
    if optimizer_state is None:
        return
    path, state = optimizer_state[0].path, optimizer_state[1]
    optimizer_shards = {
        kind: make_shard(kind, value, path) for kind, value in state.tensors.items()
    }
    if state.master is not None:
        load_model = partial(tensor_slice.extract, tensor)
        load_master = partial(tensor_slice.extract, state.master)
        if tensor.dtype != torch.float32:
            optimizer_shards[MASTER] = make_shard(MASTER, state.master, path)
        checked = master_check(f"{path}: {name}", load_model, load_master)
        optimizer_shards = {kind: checked(shard) for kind, shard in optimizer_shards.items()}
    for kind, shard in optimizer_shards.items():
        global_tensor.shards.setdefault(kind, []).append(shard)
    if global_tensor.step not in (None, state.step):
        raise FormatError(
            f"{name}: got step {state.step}, expected {global_tensor.step} as on other ranks"
        )
    global_tensor.step, global_tensor.options = state.step, state.options


def _sharded_tensors(
    folder: str, global_tensors: Mapping[str, _GlobalTensor]
) -> Iterable[tuple[Key, ShardedTensor]]:
    for name, tensor in global_tensors.items():
        with error_prefix(f"{folder}: {name}"):
            for kind, shards in tensor.shards.items():
                key = (kind, name) if kind in (MODEL, MASTER) else (OPTIMIZER, f"{name}/{kind}")
                yield key, sharded_tensor(tensor.dtypes[kind], tensor.shape, shards)
            if tensor.step is not None:
                yield (OPTIMIZER, f"{name}/step"), step_count(tensor.step, folder)

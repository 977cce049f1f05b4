"""Optimizer state of Megatron-LM's ranks by parameter: from param groups or from flat buffers.

How state could go to the wrong parameter: nothing in the files names one. The order is that of
the model's state dict. Groups separate parameters without weight decay, and experts that are
spread over ranks; a flat buffer (`distrib_optim.pt`) stores parameters backwards. So counts,
shapes and sizes must all agree, and `master_check` compares values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.megatron.arguments import Arguments
from unified_ckpt.foreign.megatron.files import FLAT_FILE, RankFile
from unified_ckpt.foreign.megatron.names import EMBEDDING, OUTPUT, is_expert
from unified_ckpt.foreign.megatron.tensor_parallel import is_parameter
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.foreign.restricted_pickle.placeholders import to_plain
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder

_ALIGNMENT = 64  # elements; parameters start at multiples of it in a flat buffer
_EXCLUDED_OPTIONS = ("params", "step")
_MASTER_KEYS = ("fp32_from_fp16_params", "fp32_from_fp16")
_STATE_KEYS = ("optimizer", "state", "param_groups", "param_state", *_MASTER_KEYS)


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A parameter of a rank. `chunk`: index of its model chunk (virtual pipeline stage)."""

    chunk: int
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class ParamState:
    """Optimizer state of a parameter.

    `master`: its fp32 copy; None for an fp32 parameter. `options`: of its param group.
    """

    master: torch.Tensor | None
    tensors: Mapping[str, torch.Tensor]
    step: float
    options: Mapping[str, Any]


ParamKey = tuple[int, str]  # (model chunk, name)


def read_optimizer_states(rank_file: RankFile, args: Arguments) -> dict[ParamKey, ParamState]:
    """Return the optimizer state that this rank saved, by parameter.

    It may cover all parameters, only experts, or all but experts. FormatError if it does not fit
    the parameters in number or shape, or is in an unknown order.
    """
    state = rank_file.state_dict.get("optimizer")
    if state is None:
        return {}
    sibling_names = list_folder(os.path.dirname(rank_file.path))
    if any(name.startswith("layer_wise_optimizer_") for name in sibling_names):
        raise FormatError(
            f"{rank_file.path}: got a layer-wise optimizer, which is not read; "
            "save with another optimizer"
        )
    optimizers = list_optimizers(state)
    params = [
        ParamRef(index, name, tensor)
        for index, chunk in enumerate(rank_file.chunks)
        for name, tensor in chunk.items()
        if is_parameter(name)
    ]
    if len(optimizers) > 2:
        raise FormatError(
            f"{rank_file.path}: got {len(optimizers)} optimizers, "
            "expected one, and at most one more for experts"
        )
    params_by_optimizer = [params]
    if len(optimizers) == 2:
        params_by_optimizer = [
            [param for param in params if is_expert(param.name) == expert]
            for expert in (False, True)
        ]
    flat_buffers = _read_flat_buffers(rank_file, len(optimizers))
    param_states: dict[ParamKey, ParamState] = {}
    path = rank_file.path
    with parsing(path, "an optimizer of Megatron-LM"), error_prefix(path):
        for index, (optimizer, optimizer_params) in enumerate(
            zip(optimizers, params_by_optimizer, strict=True)
        ):
            groups = _torch_state(optimizer)["param_groups"]
            names = [(param.name, param.tensor.dim()) for param in optimizer_params]
            group_indices = assign_groups(groups, names, args) if names else []
            if all("params" in group for group in groups):
                params_by_group: list[list[ParamRef]] = [[] for _ in groups]
                for param, group_index in zip(optimizer_params, group_indices, strict=True):
                    params_by_group[group_index].append(param)
                param_states |= _from_groups(
                    optimizer, list(zip(groups, params_by_group, strict=True))
                )
            elif flat_buffers is not None and flat_buffers[index] is not None:
                param_states |= _from_flat_buffers(
                    flat_buffers[index],
                    optimizer_params,
                    rank_file,
                    args,
                    [groups[group_index] for group_index in group_indices],
                )
    return param_states


def list_optimizers(state: Any) -> list[Any]:
    """Return the chained optimizers, which are saved as a list, as a dict by index, or alone."""
    if isinstance(state, list):
        return list(state)
    return [state[index] for index in sorted(state)] if 0 in state else [state]


def other_optimizer_values(state: Any) -> list[dict[str, Any]]:
    """Return what each optimizer holds beside its state, such as the loss scaler; [] if nothing.

    `state` is None if no optimizer was saved.
    """
    values = [
        {
            key: to_plain(value)
            for key, value in {**optimizer, **_torch_state(optimizer)}.items()
            if key not in _STATE_KEYS
        }
        for optimizer in list_optimizers(state or {})
    ]
    return values if any(values) else []


def _param_key(param: ParamRef) -> ParamKey:
    return param.chunk, param.name


def _read_flat_buffers(rank_file: RankFile, count: int) -> list[Any] | None:
    """Return the distributed optimizers' buffers; None if this rank saved none."""
    path = os.path.join(os.path.dirname(rank_file.path), FLAT_FILE)
    if not is_file(path):
        return None
    content = load_torch(path)
    buffers = list(content) if isinstance(content, list) else [content]
    if len(buffers) != count:
        raise FormatError(
            f"{path}: got buffers of {len(buffers)} optimizers, expected {count} "
            f"as in {rank_file.path}"
        )
    return buffers


def _torch_state(optimizer: Mapping[str, Any]) -> Any:
    """Return the torch optimizer's state dict; optimizers without fp32 copies save only that."""
    return optimizer.get("optimizer", optimizer)


# ---- groups


def assign_groups(
    groups: Sequence[Mapping[str, Any]], params: Sequence[tuple[str, int]], args: Arguments
) -> list[int]:
    """Return the index of each parameter's group; `params` are (name, dims).

    A group is identified by weight decay, decoupled learning rate and expert parallelism.
    FormatError if two groups are of one kind, or a parameter has no group.
    """
    decoupled = any(group.get("is_decoupled_lr") for group in groups)
    separate_experts = any(group.get("is_expert_parallel") for group in groups)
    group_kinds = [
        (
            bool(group["wd_mult"] if "wd_mult" in group else group["weight_decay"]),
            bool(group.get("is_decoupled_lr")),
            bool(group.get("is_expert_parallel")),
        )
        for group in groups
    ]
    param_kinds = [
        (
            has_weight_decay(name, dims, args),
            decoupled and name in (EMBEDDING, OUTPUT),
            separate_experts and is_expert(name),
        )
        for name, dims in params
    ]
    unmatched = set(param_kinds) - set(group_kinds)
    if unmatched or len(set(group_kinds)) != len(group_kinds):
        raise FormatError(
            f"got param groups {sorted(group_kinds)} of (weight decay, decoupled lr, expert), "
            f"expected exactly one for each kind of parameter in {sorted(set(param_kinds))}"
        )
    return [group_kinds.index(kind) for kind in param_kinds]


def has_weight_decay(name: str, dims: int, args: Arguments) -> bool:
    """Return whether weight decay applies: not to biases and norms."""
    if args.get_bool("apply_wd_to_qk_layernorm") and (
        "q_layernorm." in name or "k_layernorm." in name
    ):
        return True
    return dims != 1 and not name.endswith(".bias")


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a param group."""
    return {key: value for key, value in group.items() if key not in _EXCLUDED_OPTIONS}


def _from_groups(
    optimizer: Mapping[str, Any],
    params_by_group: Sequence[tuple[Mapping[str, Any], list[ParamRef]]],
) -> Iterator[tuple[ParamKey, ParamState]]:
    torch_state = _torch_state(optimizer)
    masters = next((optimizer[key] for key in _MASTER_KEYS if key in optimizer), None)
    for number, (group, params) in enumerate(params_by_group):
        indices = list(group["params"])
        if len(indices) != len(params):
            raise FormatError(
                f"param group {number}: got {len(indices)} parameters, "
                f"expected {len(params)} of the model: {_format_params(params)}"
            )
        low_precision = [
            param for param in params if param.tensor.dtype in (torch.float16, torch.bfloat16)
        ]
        group_masters = list(masters[number]) if masters is not None else []
        if masters is not None and len(group_masters) != len(low_precision):
            raise FormatError(
                f"param group {number}: got {len(group_masters)} fp32 copies, expected "
                f"{len(low_precision)} of the model: {_format_params(low_precision)}"
            )
        masters_by_key = dict(zip(map(_param_key, low_precision), group_masters, strict=False))
        for index, param in zip(indices, params, strict=True):
            state = torch_state["state"].get(index)
            if state is None:
                raise FormatError(
                    f"{param.name}: no optimizer state of parameter {index}; "
                    "expected a save after at least one step"
                )
            tensors = {
                name: value
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and name != "step"
            }
            step = state.get("step", group.get("step", torch_state["state"].get("common_step")))
            yield (
                _param_key(param),
                _param_state(param, masters_by_key.get(_param_key(param)), tensors, step, group),
            )


def _param_state(
    param: ParamRef,
    master: torch.Tensor | None,
    tensors: Mapping[str, torch.Tensor],
    step: Any,
    group: Mapping[str, Any],
) -> ParamState:
    for label, tensor in {**tensors, **({} if master is None else {"fp32 copy": master})}.items():
        if tensor.shape != param.tensor.shape:
            raise FormatError(
                f"{param.name}: {label}: got shape {tuple(tensor.shape)}, "
                f"expected {tuple(param.tensor.shape)} as the parameter"
            )
    if not isinstance(step, int | float | torch.Tensor):
        raise FormatError(f"{param.name}: no step count in its optimizer state")
    return ParamState(master, tensors, float(step), group_options(group))


def _format_params(params: Sequence[ParamRef]) -> str:
    return ", ".join(param.name for param in params[:3]) + (", ..." if len(params) > 3 else "")


# ---- flat buffers


def _from_flat_buffers(
    content: Mapping[Any, Any],
    params: Sequence[ParamRef],
    rank_file: RankFile,
    args: Arguments,
    groups: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[ParamKey, ParamState]]:
    """Yield the states in flat buffers; each holds the parameters of one chunk and dtype."""
    if not content.get("buckets_coalesced"):
        raise FormatError(
            f"{FLAT_FILE}: got one buffer per bucket, which is not read; "
            "save with a Megatron version of 2024 or later"
        )
    groups_by_param = dict(zip(map(_param_key, params), groups, strict=True))
    buffers: dict[tuple[int, torch.dtype], list[ParamRef]] = {}
    for param in params:
        buffers.setdefault((param.chunk, param.tensor.dtype), []).append(param)
    # Embeddings that are tied over pipeline stages have a bucket of their own.
    ends = (EMBEDDING, OUTPUT)
    tied = args.pp > 1 and not args.get_bool("untie_embeddings_and_output_weights")
    numbers = sorted(key for key in content if isinstance(key, int))
    if len(numbers) != len(buffers):
        raise FormatError(
            f"{FLAT_FILE}: got {len(numbers)} buffers, "
            f"expected {len(buffers)} (one per model chunk and dtype)"
        )
    for number, ((chunk, dtype), buffer_params) in zip(numbers, buffers.items(), strict=True):
        (buffers_by_dtype,) = content[number].items()
        (stored, _), buffer = buffers_by_dtype
        if stored != dtype:
            raise FormatError(
                f"{FLAT_FILE}: buffer {number}: got {stored}, expected {dtype} as its parameters"
            )
        ranges = flat_ranges(
            [(param.tensor.numel(), tied and param.name in ends) for param in buffer_params],
            bucket_size(rank_file.pp, chunk, args),
        )
        total = max(stop for _, stop in ranges)
        tensors = {name: value for name, value in buffer.items() if isinstance(value, torch.Tensor)}
        numels = {name: value.numel() for name, value in tensors.items()}
        numels["numel_unpadded"] = int(buffer["numel_unpadded"])
        if any(numel != total for numel in numels.values()) or "param" not in tensors:
            raise FormatError(
                f"{FLAT_FILE}: buffer {number}: got numels {numels}, "
                f"expected {total}: the parameters are in another order"
            )
        for param, (start, stop) in zip(buffer_params, ranges, strict=True):
            shape, group = param.tensor.shape, groups_by_param[_param_key(param)]
            slices = {name: value[start:stop].view(shape) for name, value in tensors.items()}
            master = slices.pop("param")
            yield (
                _param_key(param),
                _param_state(param, master, slices, group.get("step"), group),
            )


def bucket_size(pp: int, chunk: int, args: Arguments) -> int | None:
    """Return the numel at which a bucket is full; None for a single bucket.

    The rule is that of Megatron's `DistributedDataParallel`.
    """
    if not args.get_bool("overlap_grad_reduce") or pp > 0 or chunk > 0:
        return None
    return args.get_int(
        "ddp_bucket_size", max(40_000_000, 1_000_000 * args.get_int("data_parallel_size", 1))
    )


def flat_ranges(
    sizes: Sequence[tuple[int, bool]], bucket_numel: int | None
) -> list[tuple[int, int]]:
    """Return [start, stop) of each parameter in a buffer, without the padding after each bucket.

    `sizes`: (numel, whether it has a bucket of its own). Parameters are laid out from last to
    first, each at a multiple of 64 elements from the start of its bucket, as in
    `_ParamAndGradBuffer` and `DistributedOptimizer.get_parameter_state_dp_zero`.
    """
    ranges: list[tuple[int, int]] = []
    bucket = offset = 0  # the bucket's start; the position within it
    for size, separate in reversed(sizes):
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        if separate and offset:
            bucket, offset = bucket + offset, 0
        ranges.append((bucket + offset, bucket + offset + size))
        offset += size
        if separate or (bucket_numel is not None and offset >= bucket_numel):
            bucket, offset = bucket + offset, 0
    return ranges[::-1]

"""Optimizer state that Megatron-LM saved by position, for each parameter of a rank: by groups, or
in flat buffers (`distrib_optim.pt`).

How it could be given to the wrong parameter: nothing in the files names one. The order is that of
the model's parameters, which is that of its state dict; groups take those without weight decay
apart, and experts that are spread over ranks; a flat buffer has them backwards. So counts, shapes
and sizes must all agree, and `megatron_twins` compares values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.sources.megatron.files import FLAT_FILE, Arguments, RankFile
from unified_ckpt.sources.megatron.names import EMBEDDING, OUTPUT, is_expert
from unified_ckpt.sources.megatron.tensor_parallel import is_parameter
from unified_ckpt.sources.restricted_pickle.load import load_torch

_ALIGNMENT = 64  # elements: where a parameter may start in a flat buffer
_EXCLUDED_OPTIONS = ("params", "step")


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A parameter of a rank: the virtual stage that it is in."""

    chunk: int
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class ParamState:
    """Of a parameter. `master`: its fp32 copy, None for one that is fp32 itself. `options`: its
    group's.
    """

    master: torch.Tensor | None
    tensors: Mapping[str, torch.Tensor]
    step: float
    options: Mapping[str, Any]


ParamKey = tuple[int, str]  # virtual stage, name there


def read_optimizer_states(rank_file: RankFile, args: Arguments) -> dict[ParamKey, ParamState]:
    """Of the parameters whose optimizer state this rank saved: all, those of experts alone, or
    those beside them.

    FormatError where the state does not fit the parameters in number or shape, or is in no order
    that is known.
    """
    state = rank_file.state_dict.get("optimizer")
    if state is None:
        return {}
    sibling_names = os.listdir(os.path.dirname(rank_file.path))
    if any(name.startswith("layer_wise_optimizer_") for name in sibling_names):
        raise FormatError(
            f"{rank_file.path}: its optimizer is divided by layers over data-parallel ranks, which is not read"
        )
    optimizers = (
        list(state)
        if isinstance(state, list)
        else [state[n] for n in sorted(state)]
        if 0 in state
        else [state]
    )
    params = [
        ParamRef(index, name, tensor)
        for index, chunk in enumerate(rank_file.chunks)
        for name, tensor in chunk.items()
        if is_parameter(name)
    ]
    if len(optimizers) > 2:
        raise FormatError(
            f"{rank_file.path}: has {len(optimizers)} optimizers; needed one, or one more for experts"
        )
    params_by_optimizer = (
        [params]
        if len(optimizers) == 1
        else [
            [param for param in params if is_expert(param.name) == expert]
            for expert in (False, True)
        ]
    )
    flat_buffers = _read_flat_buffers(rank_file, len(optimizers))
    param_states: dict[ParamKey, ParamState] = {}
    try:
        for index, (optimizer, optimizer_params) in enumerate(
            zip(optimizers, params_by_optimizer, strict=True)
        ):
            groups = _torch_state(optimizer)["param_groups"]
            group_indices = (
                assign_groups(
                    groups, [(param.name, param.tensor.dim()) for param in optimizer_params], args
                )
                if optimizer_params
                else []
            )
            if all("params" in group for group in groups):
                params_by_group = [
                    [
                        param
                        for param, assigned in zip(optimizer_params, group_indices, strict=True)
                        if assigned == group_index
                    ]
                    for group_index in range(len(groups))
                ]
                param_states |= _from_groups(
                    optimizer, list(zip(groups, params_by_group, strict=True))
                )
            elif flat_buffers is not None and flat_buffers[index] is not None:
                param_states |= _from_flat_buffers(
                    flat_buffers[index],
                    optimizer_params,
                    rank_file,
                    args,
                    [groups[assigned] for assigned in group_indices],
                )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(
            f"{rank_file.path}: its optimizer is not what Megatron-LM writes: {error!r}"
        ) from error
    except CheckpointError as error:
        raise type(error)(f"{rank_file.path}: {error}") from error
    return param_states


def _param_key(param: ParamRef) -> ParamKey:
    return param.chunk, param.name


def _read_flat_buffers(rank_file: RankFile, count: int) -> list[Any] | None:
    """What the distributed optimizers saved beside; None where this rank saved none."""
    path = os.path.join(os.path.dirname(rank_file.path), FLAT_FILE)
    if not os.path.isfile(path):
        return None
    content = load_torch(path)
    buffers = list(content) if isinstance(content, list) else [content]
    if len(buffers) != count:
        raise FormatError(f"{path}: is of {len(buffers)} optimizers; needed {count}, as beside it")
    return buffers


def _torch_state(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What torch's optimizer gave: an optimizer without fp32 copies saves just that."""
    state: Mapping[str, Any] = optimizer.get("optimizer", optimizer)
    return state


# ---- groups


def assign_groups(
    groups: Sequence[Mapping[str, Any]], params: Sequence[tuple[str, int]], args: Arguments
) -> list[int]:
    """The group that each parameter is in, by its (name, dims): those that weight decay applies to,
    others, and so on.

    FormatError where two groups are of one kind, or a parameter has none.
    """
    decoupled = any(group.get("is_decoupled_lr") for group in groups)
    separate_experts = any(group.get("is_expert_parallel") for group in groups)
    group_kinds = [
        (
            _group_has_decay(group),
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
            f"has param groups {sorted(group_kinds)} (with weight decay, a rate of their own, experts) for parameters {sorted(set(param_kinds))}; "
            "needed one for each: which parameters others are of is not known"
        )
    return [group_kinds.index(kind) for kind in param_kinds]


def _group_has_decay(group: Mapping[str, Any]) -> bool:
    return bool(group["wd_mult"] if "wd_mult" in group else group["weight_decay"])


def has_weight_decay(name: str, dims: int, args: Arguments) -> bool:
    """Whether weight decay applies: not to biases and norms."""
    if args.get_bool("apply_wd_to_qk_layernorm") and (
        "q_layernorm." in name or "k_layernorm." in name
    ):
        return True
    return dims != 1 and not name.endswith(".bias")


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _EXCLUDED_OPTIONS}


def _from_groups(
    optimizer: Mapping[str, Any],
    params_by_group: Sequence[tuple[Mapping[str, Any], list[ParamRef]]],
) -> Iterator[tuple[ParamKey, ParamState]]:
    torch_state, masters = (
        _torch_state(optimizer),
        optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16")),
    )
    for number, (group, params) in enumerate(params_by_group):
        indices = list(group["params"])
        if len(indices) != len(params):
            raise FormatError(
                f"group {number} has {len(indices)} parameters; the model has {len(params)} such: {_format_params(params)}"
            )
        low_precision = [
            param for param in params if param.tensor.dtype in (torch.float16, torch.bfloat16)
        ]
        group_masters = list(masters[number]) if masters is not None else []
        if masters is not None and len(group_masters) != len(low_precision):
            raise FormatError(
                f"group {number} has {len(group_masters)} fp32 copies; the model has {len(low_precision)} such parameters: {_format_params(low_precision)}"
            )
        masters_by_key = dict(zip(map(_param_key, low_precision), group_masters, strict=False))
        for index, param in zip(indices, params, strict=True):
            state = torch_state["state"].get(index)
            if state is None:
                raise FormatError(
                    f"{param.name}: has no optimizer state (parameter {index}); needed a step to have been made"
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
                f"{param.name}: its {label} has shape {tuple(tensor.shape)}; needed {tuple(param.tensor.shape)}, the parameter's"
            )
    if not isinstance(step, int | float | torch.Tensor):
        raise FormatError(f"{param.name}: nothing says how many steps its optimizer made")
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
    """A buffer holds the parameters of one virtual stage and one dtype."""
    if not content.get("buckets_coalesced"):
        raise FormatError(
            f"{FLAT_FILE}: has a buffer for each bucket (before 2024), which is not read; needed one for all buckets"
        )
    groups_by_param = dict(zip(map(_param_key, params), groups, strict=True))
    buffers: dict[tuple[int, torch.dtype], list[ParamRef]] = {}
    for param in params:
        buffers.setdefault((param.chunk, param.tensor.dtype), []).append(param)
    numbers = sorted(key for key in content if isinstance(key, int))
    if len(numbers) != len(buffers):
        raise FormatError(
            f"{FLAT_FILE}: has {len(numbers)} buffers; needed {len(buffers)}, one for each stage and dtype of its parameters"
        )
    for number, ((chunk, dtype), buffer_params) in zip(numbers, buffers.items(), strict=True):
        (buffers_by_dtype,) = content[number].items()
        (stored, _), buffer = buffers_by_dtype
        if stored != dtype:
            raise FormatError(
                f"{FLAT_FILE}: buffer {number} is of {stored}; needed {dtype}, as its parameters"
            )
        ranges = flat_ranges(
            [(param.tensor.numel(), _has_bucket(param.name, args)) for param in buffer_params],
            bucket_size(rank_file.pp, chunk, args),
        )
        total = max(stop for _, stop in ranges)
        tensors = {name: value for name, value in buffer.items() if isinstance(value, torch.Tensor)}
        sizes = {name: value.numel() for name, value in tensors.items()} | {
            "numel_unpadded": int(buffer["numel_unpadded"])
        }
        wrong = {name: size for name, size in sizes.items() if size != total}
        if wrong or "param" not in tensors:
            raise FormatError(
                f"{FLAT_FILE}: buffer {number} has elements {sizes}; its parameters make up {total}: they are in another order"
            )
        for param, (start, stop) in zip(buffer_params, ranges, strict=True):
            slices = {
                name: value[start:stop].view(param.tensor.shape) for name, value in tensors.items()
            }
            yield (
                _param_key(param),
                _param_state(
                    param,
                    slices.pop("param"),
                    slices,
                    groups_by_param[_param_key(param)].get("step"),
                    groups_by_param[_param_key(param)],
                ),
            )


def _has_bucket(name: str, args: Arguments) -> bool:
    """Embeddings that the first and the last stage share have buckets of their own."""
    return (
        args.pp > 1
        and not args.get_bool("untie_embeddings_and_output_weights")
        and name in (EMBEDDING, OUTPUT)
    )


def bucket_size(pp: int, chunk: int, args: Arguments) -> int | None:
    """Elements from which a bucket is full, None for a single bucket: `DistributedDataParallel`'s
    rule.
    """
    if not args.get_bool("overlap_grad_reduce") or pp > 0 or chunk > 0:
        return None
    return args.get_int(
        "ddp_bucket_size", max(40_000_000, 1_000_000 * args.get_int("data_parallel_size", 1))
    )


def flat_ranges(
    sizes: Sequence[tuple[int, bool]], bucket_numel: int | None
) -> list[tuple[int, int]]:
    """Where parameters, of (elements, whether in a bucket of its own), lie in a buffer without the
    padding after each bucket.

    They are laid from the last to the first, each on a multiple of 64 elements from its bucket's
    start. Source: `_ParamAndGradBuffer` and `DistributedOptimizer.get_parameter_state_dp_zero`.
    """
    ranges: list[tuple[int, int]] = []
    bucket = offset = 0  # the bucket's start; elements in it
    for size, separate in reversed(sizes):
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        if separate and offset:
            bucket, offset = bucket + offset, 0
        ranges.append((bucket + offset, bucket + offset + size))
        offset += size
        if separate or (bucket_numel is not None and offset >= bucket_numel):
            bucket, offset = bucket + offset, 0
    return ranges[::-1]

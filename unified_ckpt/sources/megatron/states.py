"""Optimizer state that Megatron-LM saved by position, for each parameter of a rank: by groups, or in flat buffers (`distrib_optim.pt`).

How it could be given to the wrong parameter: nothing in the files names one. The order is that of the model's parameters, which is that of
its state dict; groups take those without weight decay apart, and experts that are spread over ranks; a flat buffer has them backwards.
So counts, shapes and sizes must all agree, and `megatron_twins` compares values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.sources.megatron.files import FLAT_FILE, Arguments, Saved
from unified_ckpt.sources.megatron.names import EMBEDDING, OUTPUT, is_expert
from unified_ckpt.sources.megatron.tensor_parallel import is_parameter
from unified_ckpt.sources.restricted_pickle.load import load_torch

_ALIGNED = 64  # elements: where a parameter may start in a flat buffer
_OPTIONS_LEFT = ("params", "step")


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a rank: the virtual stage that it is in."""

    chunk: int
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class State:
    """Of a parameter. `master`: its fp32 copy, None for one that is fp32 itself. `options`: its group's."""

    master: torch.Tensor | None
    tensors: Mapping[str, torch.Tensor]
    step: float
    options: Mapping[str, Any]


Place = tuple[int, str]  # virtual stage, name there


def states(saved: Saved, args: Arguments) -> dict[Place, State]:
    """Of the parameters whose optimizer state this rank saved: all, those of experts alone, or those beside them.

    FormatError where the state does not fit the parameters in number or shape, or is in no order that is known.
    """
    told = saved.told.get("optimizer")
    if told is None:
        return {}
    beside = os.listdir(os.path.dirname(saved.where))
    if any(name.startswith("layer_wise_optimizer_") for name in beside):
        raise FormatError(
            f"{saved.where}: its optimizer is divided by layers over data-parallel ranks, which is not read"
        )
    parts = (
        list(told)
        if isinstance(told, list)
        else [told[n] for n in sorted(told)]
        if 0 in told
        else [told]
    )
    params = [
        Param(number, name, tensor)
        for number, chunk in enumerate(saved.chunks)
        for name, tensor in chunk.items()
        if is_parameter(name)
    ]
    if len(parts) > 2:
        raise FormatError(
            f"{saved.where}: has {len(parts)} optimizers; needed one, or one more for experts"
        )
    of_part = (
        [params]
        if len(parts) == 1
        else [[one for one in params if is_expert(one.name) == wanted] for wanted in (False, True)]
    )
    flat = _flat_file(saved, len(parts))
    found: dict[Place, State] = {}
    try:
        for number, (part, mine) in enumerate(zip(parts, of_part, strict=True)):
            groups = _inner(part)["param_groups"]
            which = (
                group_of(groups, [(one.name, one.tensor.dim()) for one in mine], args)
                if mine
                else []
            )
            if all("params" in group for group in groups):
                grouped = [
                    [one for one, at in zip(mine, which, strict=True) if at == place]
                    for place in range(len(groups))
                ]
                found |= _by_groups(part, list(zip(groups, grouped, strict=True)))
            elif flat is not None and flat[number] is not None:
                found |= _by_ranges(flat[number], mine, saved, args, [groups[at] for at in which])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(
            f"{saved.where}: its optimizer is not what Megatron-LM writes: {error!r}"
        ) from error
    except CheckpointError as error:
        raise type(error)(f"{saved.where}: {error}") from error
    return found


def _place(one: Param) -> Place:
    return one.chunk, one.name


def _flat_file(saved: Saved, count: int) -> list[Any] | None:
    """What the distributed optimizers saved beside; None where this rank saved none."""
    path = os.path.join(os.path.dirname(saved.where), FLAT_FILE)
    if not os.path.isfile(path):
        return None
    told = load_torch(path)
    found = list(told) if isinstance(told, list) else [told]
    if len(found) != count:
        raise FormatError(f"{path}: is of {len(found)} optimizers; needed {count}, as beside it")
    return found


def _inner(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """What torch's optimizer gave: an optimizer without fp32 copies saves just that."""
    found: Mapping[str, Any] = part.get("optimizer", part)
    return found


# ---- groups


def group_of(
    groups: Sequence[Mapping[str, Any]], params: Sequence[tuple[str, int]], args: Arguments
) -> list[int]:
    """The group that each parameter is in, by its (name, dims): those that weight decay applies to, others, and so on.

    FormatError where two groups are of one kind, or a parameter has none.
    """
    decoupled = any(group.get("is_decoupled_lr") for group in groups)
    apart = any(group.get("is_expert_parallel") for group in groups)
    keys = [
        (_decays(group), bool(group.get("is_decoupled_lr")), bool(group.get("is_expert_parallel")))
        for group in groups
    ]
    taken = [
        (
            decays(name, dims, args),
            decoupled and name in (EMBEDDING, OUTPUT),
            apart and is_expert(name),
        )
        for name, dims in params
    ]
    lost = set(taken) - set(keys)
    if lost or len(set(keys)) != len(keys):
        raise FormatError(
            f"has param groups {sorted(keys)} (with weight decay, a rate of their own, experts) for parameters {sorted(set(taken))}; "
            "needed one for each: which parameters others are of is not known"
        )
    return [keys.index(key) for key in taken]


def _decays(group: Mapping[str, Any]) -> bool:
    return bool(group["wd_mult"] if "wd_mult" in group else group["weight_decay"])


def decays(name: str, dims: int, args: Arguments) -> bool:
    """Whether weight decay applies: not to biases and norms."""
    if args.flag("apply_wd_to_qk_layernorm") and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return dims != 1 and not name.endswith(".bias")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OPTIONS_LEFT}


def _by_groups(
    part: Mapping[str, Any], grouped: Sequence[tuple[Mapping[str, Any], list[Param]]]
) -> Iterator[tuple[Place, State]]:
    inner, masters = _inner(part), part.get("fp32_from_fp16_params", part.get("fp32_from_fp16"))
    for number, (group, params) in enumerate(grouped):
        indices = list(group["params"])
        if len(indices) != len(params):
            raise FormatError(
                f"group {number} has {len(indices)} parameters; the model has {len(params)} such: {_some(params)}"
            )
        half = [one for one in params if one.tensor.dtype in (torch.float16, torch.bfloat16)]
        held = list(masters[number]) if masters is not None else []
        if masters is not None and len(held) != len(half):
            raise FormatError(
                f"group {number} has {len(held)} fp32 copies; the model has {len(half)} such parameters: {_some(half)}"
            )
        copies = dict(zip(map(_place, half), held, strict=False))
        for index, one in zip(indices, params, strict=True):
            state = inner["state"].get(index)
            if state is None:
                raise FormatError(
                    f"{one.name}: has no optimizer state (parameter {index}); needed a step to have been made"
                )
            tensors = {
                name: value
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and name != "step"
            }
            step = state.get("step", group.get("step", inner["state"].get("common_step")))
            yield _place(one), _state(one, copies.get(_place(one)), tensors, step, group)


def _state(
    one: Param,
    master: torch.Tensor | None,
    tensors: Mapping[str, torch.Tensor],
    step: Any,
    group: Mapping[str, Any],
) -> State:
    for what, tensor in {**tensors, **({} if master is None else {"fp32 copy": master})}.items():
        if tensor.shape != one.tensor.shape:
            raise FormatError(
                f"{one.name}: its {what} has shape {tuple(tensor.shape)}; needed {tuple(one.tensor.shape)}, the parameter's"
            )
    if not isinstance(step, int | float | torch.Tensor):
        raise FormatError(f"{one.name}: nothing says how many steps its optimizer made")
    return State(master, tensors, float(step), options_of(group))


def _some(params: Sequence[Param]) -> str:
    return ", ".join(one.name for one in params[:3]) + (", ..." if len(params) > 3 else "")


# ---- flat buffers


def _by_ranges(
    told: Mapping[Any, Any],
    params: Sequence[Param],
    saved: Saved,
    args: Arguments,
    groups: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Place, State]]:
    """A buffer holds the parameters of one virtual stage and one dtype."""
    if not told.get("buckets_coalesced"):
        raise FormatError(
            f"{FLAT_FILE}: has a buffer for each bucket (before 2024), which is not read; needed one for all buckets"
        )
    group = dict(zip(map(_place, params), groups, strict=True))
    buffers: dict[tuple[int, torch.dtype], list[Param]] = {}
    for one in params:
        buffers.setdefault((one.chunk, one.tensor.dtype), []).append(one)
    numbers = sorted(key for key in told if isinstance(key, int))
    if len(numbers) != len(buffers):
        raise FormatError(
            f"{FLAT_FILE}: has {len(numbers)} buffers; needed {len(buffers)}, one for each stage and dtype of its parameters"
        )
    for number, ((chunk, dtype), mine) in zip(numbers, buffers.items(), strict=True):
        (kinds,) = told[number].items()
        (stored, _), flat = kinds
        if stored != dtype:
            raise FormatError(
                f"{FLAT_FILE}: buffer {number} is of {stored}; needed {dtype}, as its parameters"
            )
        ranges = flat_ranges(
            [(one.tensor.numel(), _has_bucket(one.name, args)) for one in mine],
            bucket_size(saved.pp, chunk, args),
        )
        total = max(stop for _, stop in ranges)
        tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
        sizes = {name: value.numel() for name, value in tensors.items()} | {
            "numel_unpadded": int(flat["numel_unpadded"])
        }
        wrong = {name: size for name, size in sizes.items() if size != total}
        if wrong or "param" not in tensors:
            raise FormatError(
                f"{FLAT_FILE}: buffer {number} has elements {sizes}; its parameters make up {total}: they are in another order"
            )
        for one, (start, stop) in zip(mine, ranges, strict=True):
            cut = {
                name: value[start:stop].view(one.tensor.shape) for name, value in tensors.items()
            }
            yield (
                _place(one),
                _state(
                    one, cut.pop("param"), cut, group[_place(one)].get("step"), group[_place(one)]
                ),
            )


def _has_bucket(name: str, args: Arguments) -> bool:
    """Embeddings that the first and the last stage share have buckets of their own."""
    return (
        args.pp > 1
        and not args.flag("untie_embeddings_and_output_weights")
        and name in (EMBEDDING, OUTPUT)
    )


def bucket_size(pp: int, chunk: int, args: Arguments) -> int | None:
    """Elements from which a bucket is full, None for a single bucket: `DistributedDataParallel`'s rule."""
    if not args.flag("overlap_grad_reduce") or pp > 0 or chunk > 0:
        return None
    return args.number(
        "ddp_bucket_size", max(40_000_000, 1_000_000 * args.number("data_parallel_size", 1))
    )


def flat_ranges(sizes: Sequence[tuple[int, bool]], full: int | None) -> list[tuple[int, int]]:
    """Where parameters, of (elements, whether in a bucket of its own), lie in a buffer without the padding after each bucket.

    They are laid from the last to the first, each on a multiple of 64 elements from its bucket's start.
    Source: `_ParamAndGradBuffer` and `DistributedOptimizer.get_parameter_state_dp_zero`.
    """
    found: list[tuple[int, int]] = []
    bucket = at = 0  # the bucket's start; elements in it
    for size, alone in reversed(sizes):
        at = -(-at // _ALIGNED) * _ALIGNED
        if alone and at:
            bucket, at = bucket + at, 0
        found.append((bucket + at, bucket + at + size))
        at += size
        if alone or (full is not None and at >= full):
            bucket, at = bucket + at, 0
    return found[::-1]

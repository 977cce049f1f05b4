"""Where a rank's tensors lie in those of the whole model: tensor parallelism, experts spread over ranks, experts in one tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from unified_ckpt.core.sharding.boxes import Box, whole
from unified_ckpt.errors import FormatError
from unified_ckpt.sources.megatron.files import Arguments, Saved, expert_rank
from unified_ckpt.sources.megatron.names import NO_PARAMETERS, is_expert, split_of

_ALONE = re.compile(r"(.+\.mlp\.experts\.local_experts\.)(\d+)(\..+)")
_NUMBERED = re.compile(r"(.+\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
_GROUPED = re.compile(r"(.+\.mlp\.experts\.)weight([12])")


@dataclass(frozen=True, slots=True)
class Share:
    """A box of a tensor of the whole model. `of`: of a rank's tensor of that name, or of its optimizer state, the elements in the box."""

    name: str
    shape: tuple[int, ...]
    box: Box
    of: Callable[[torch.Tensor], torch.Tensor]


def is_parameter(name: str) -> bool:
    return not name.endswith(NO_PARAMETERS)


def shares(saved: Saved, name: str, tensor: torch.Tensor, args: Arguments) -> Iterator[Share]:
    """What a rank's tensor is of the whole model; nothing where another rank has the same.

    FormatError for a tensor of which it is not known how ranks share it.
    """
    if not is_expert(name):
        yield from _divided(name, tuple(tensor.shape), saved.tp, args.tp, _same, args)
        return
    rank, world, local = expert_rank(saved, args), args.etp, args.experts // args.ep
    first = saved.ep * local
    alone, numbered, grouped = (
        _ALONE.fullmatch(name),
        _NUMBERED.fullmatch(name),
        _GROUPED.fullmatch(name),
    )
    if alone is not None:
        own = f"{alone[1]}{first + int(alone[2])}{alone[3]}"
        yield from _divided(own, tuple(tensor.shape), rank, world, _same, args)
    elif numbered is not None:
        own = f"{numbered[1]}local_experts.{first + int(numbered[3])}.{numbered[2]}"
        yield from _divided(own, tuple(tensor.shape), rank, world, _same, args)
    elif grouped is not None:
        hidden = args.number("hidden_size")
        if tensor.numel() % (local * hidden):
            raise FormatError(
                f"{name}: has shape {tuple(tensor.shape)}; needed {local} experts of hidden size {hidden}"
            )
        inner = tensor.numel() // (local * hidden)
        shape = (inner, hidden) if grouped[2] == "1" else (hidden, inner)
        for n in range(local):
            own = f"{grouped[1]}local_experts.{first + n}.linear_fc{grouped[2]}.weight"
            yield from _divided(own, shape, rank, world, partial(_of_group, n, local, shape), args)
    else:
        raise FormatError(f"{name}: is no tensor of experts that is known")


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _of_group(
    number: int, count: int, shape: tuple[int, int], tensor: torch.Tensor
) -> torch.Tensor:
    """Of experts in one tensor, which multiplies from the right, one expert's weight as `Linear` has it."""
    return tensor.reshape(count, shape[1], shape[0])[number].t()


def _rows(
    of: Callable[[torch.Tensor], torch.Tensor], low: int, high: int, tensor: torch.Tensor
) -> torch.Tensor:
    return of(tensor)[low:high]


def _divided(
    name: str,
    local: tuple[int, ...],
    rank: int,
    world: int,
    of: Callable[[torch.Tensor], torch.Tensor],
    args: Arguments,
) -> Iterator[Share]:
    """`local`: this rank's shape, of `world` that share the tensor."""
    split = split_of(name, gated=args.flag("swiglu")) if world > 1 else "whole"
    if split is None:
        raise FormatError(
            f"{name}: how {world} tensor-parallel ranks share it is not known; needed a GPT model of Megatron's"
        )
    if split == "whole":
        if rank == 0:
            yield Share(name, local, whole(local), of)
        return
    dim = 1 if split == "columns" else 0
    if len(local) <= dim:
        raise FormatError(f"{name}: has shape {local}; needed {dim + 1} dims")
    shape = (*local[:dim], local[dim] * world, *local[dim + 1 :])
    if split != "gated":
        offsets = tuple(rank * local[dim] if d == dim else 0 for d in range(len(local)))
        yield Share(name, shape, Box(offsets, local), of)
        return
    if local[0] % 2:
        raise FormatError(f"{name}: has {local[0]} rows; needed gates and as many more")
    half = (
        local[0] // 2
    )  # each rank has its part of the gates, then its part of what they let through
    for number in range(2):
        box = Box(
            (number * half * world + rank * half, *(0 for _ in local[1:])), (half, *local[1:])
        )
        yield Share(name, shape, box, partial(_rows, of, number * half, (number + 1) * half))

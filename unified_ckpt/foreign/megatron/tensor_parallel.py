"""Where a rank's tensors lie in the whole model, under tensor and expert parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.megatron.arguments import Arguments
from unified_ckpt.foreign.megatron.files import RankFile, expert_tp_rank
from unified_ckpt.foreign.megatron.names import BUFFER_SUFFIXES, is_expert, parse_expert, tp_split

# Another name of `local_experts.<n>.linear_fc1.weight`.
_NUMBERED_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)$")
_GROUPED_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)weight([12])")


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor of the whole model.

    `extract`: returns the box's elements from a rank's tensor, or from its optimizer state.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    extract: Callable[[torch.Tensor], torch.Tensor]


def is_parameter(name: str) -> bool:
    """Return whether an optimizer may have state of the tensor."""
    return not name.endswith(BUFFER_SUFFIXES)


def global_slices(
    rank_file: RankFile, name: str, tensor: torch.Tensor, args: Arguments
) -> Iterator[Slice]:
    """Yield the slices of the whole model that a rank's tensor holds; none if rank 0 yields them.

    FormatError if it is unknown how ranks split the tensor.
    """
    if not is_expert(name):
        yield from _tensor_slices(
            name, tuple(tensor.shape), rank_file.tp, args.tp, _unchanged, args
        )
        return
    rank, world, local_experts = expert_tp_rank(rank_file, args), args.etp, args.experts // args.ep
    first_expert = rank_file.ep * local_experts
    expert = parse_expert(_NUMBERED_EXPERT.sub(r"\1local_experts.\3.\2", name))
    grouped = _GROUPED_EXPERTS.fullmatch(name)
    if expert is not None:
        template, number = expert
        expert_name = template.format(first_expert + number)
        yield from _tensor_slices(expert_name, tuple(tensor.shape), rank, world, _unchanged, args)
    elif grouped is not None:
        hidden = args.get_int("hidden_size")
        if tensor.numel() % (local_experts * hidden):
            raise FormatError(
                f"{name}: got shape {tuple(tensor.shape)}, "
                f"expected {local_experts} experts of hidden size {hidden}"
            )
        inner = tensor.numel() // (local_experts * hidden)
        shape = (inner, hidden) if grouped[2] == "1" else (hidden, inner)
        for n in range(local_experts):
            number = first_expert + n
            expert_name = f"{grouped[1]}local_experts.{number}.linear_fc{grouped[2]}.weight"
            extract = partial(_extract_expert, n, local_experts, shape)
            yield from _tensor_slices(expert_name, shape, rank, world, extract, args)
    else:
        raise FormatError(f"{name}: unknown kind of expert tensor; expected a name of Megatron's")


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _extract_expert(
    index: int, count: int, shape: tuple[int, int], tensor: torch.Tensor
) -> torch.Tensor:
    """Return one expert's weight in `Linear`'s orientation, from the grouped, transposed tensor."""
    return tensor.reshape(count, shape[1], shape[0])[index].t()


def _extract_rows(
    extract: Callable[[torch.Tensor], torch.Tensor], low: int, high: int, tensor: torch.Tensor
) -> torch.Tensor:
    return extract(tensor)[low:high]


def _tensor_slices(
    name: str,
    local_shape: tuple[int, ...],
    rank: int,
    world: int,
    extract: Callable[[torch.Tensor], torch.Tensor],
    args: Arguments,
) -> Iterator[Slice]:
    """Yield one tensor's slices. `local_shape`: of this rank's part; `world` ranks split it."""
    split = tp_split(name, gated=args.get_bool("swiglu")) if world > 1 else "whole"
    if split is None:
        raise FormatError(
            f"{name}: unknown split over {world} tensor-parallel ranks; "
            "expected a tensor of Megatron's GPT models"
        )
    if split == "whole":
        if rank == 0:
            yield Slice(name, local_shape, full_box(local_shape), extract)
        return
    dim = 1 if split == "columns" else 0
    if len(local_shape) <= dim:
        raise FormatError(f"{name}: got shape {local_shape}, expected at least {dim + 1} dims")
    shape = (*local_shape[:dim], local_shape[dim] * world, *local_shape[dim + 1 :])
    if split != "gated":
        offsets = tuple(rank * local_shape[dim] if d == dim else 0 for d in range(len(local_shape)))
        yield Slice(name, shape, Box(offsets, local_shape), extract)
        return
    if local_shape[0] % 2:
        raise FormatError(f"{name}: got {local_shape[0]} rows, expected an even number (gate, up)")
    half = local_shape[0] // 2  # each rank has its part of the gates, then of the up projection
    for index in range(2):
        box = Box(
            (index * half * world + rank * half, *(0 for _ in local_shape[1:])),
            (half, *local_shape[1:]),
        )
        yield Slice(
            name, shape, box, partial(_extract_rows, extract, index * half, (index + 1) * half)
        )

"""Megatron-LM: a folder of `mp_rank_*/model_optim_rng.pt`, read here, or of torch_dist, which `megatron_dist` reads; or a root of either.

Tensors get the names of Hugging Face's model where they are known, else Megatron's own, with layers and experts numbered over all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.detect.names import DCP_METADATA
from unified_ckpt.sources.megatron.dist import open_dist, step_fragment
from unified_ckpt.sources.megatron.files import (
    FLAT_FILE,
    Arguments,
    Saved,
    expert_rank,
    plain,
    read_ranks,
    step_folder,
)
from unified_ckpt.sources.megatron.master_check import Twin
from unified_ckpt.sources.megatron.names import EMBEDDING, OUTPUT, expert_of, is_expert
from unified_ckpt.sources.megatron.states import Place, State, states
from unified_ckpt.sources.megatron.tensor_parallel import Share, is_parameter, shares
from unified_ckpt.sources.megatron.view import named
from unified_ckpt.views.shards import Assembled, Assembly, Fragment, assembly

_KEPT_APART = (
    "args",
    "model",
    "optimizer",
    "rng_state",
    "rerun_state_machine",
    "checkpoint_version",
)


@dataclass(slots=True)
class _Global:
    """A tensor of the whole model, as it is put together. `options`: its param group's; `step`: of its optimizer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fragments: dict[str, list[Fragment]] = field(
        default_factory=dict
    )  # by "model", "master_weights" and names of state
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    step: float | None = None
    options: Mapping[str, Any] | None = None


def open_megatron(root: str, options: SourceOptions) -> Source:
    """FormatError for files that are damaged, or in no order that is known; IncompleteError naming ranks and tensors that are missing."""
    folder = step_folder(root)
    if os.path.isfile(os.path.join(folder, DCP_METADATA)):
        return open_dist(folder, options)
    args, ranks = read_ranks(folder)
    if float(ranks[0].told.get("checkpoint_version", 0)) < 2:
        raise FormatError(
            f"{folder}: has queries, keys and values in the order of before 2021; needed checkpoint_version 2 or later"
        )
    held, doubt = _held(folder, ranks, args)
    found = _merge(ranks, args, held)
    tensors = dict(_assemblies(folder, found))
    groups = _groups(found)
    extra = {
        key: plain(value)
        for key, value in ranks[0].told.items()
        if key.rstrip("0123456789") not in _KEPT_APART
    }
    iteration = ranks[0].told.get("iteration")
    said = Said(
        step=iteration if isinstance(iteration, int) else None,
        extra={**extra, "args": plain(ranks[0].told["args"])},
        groups=groups,
        rank_extras=_world(args) if "rng_state" in ranks[0].told else 0,
    )
    aliases = {} if (MODEL, OUTPUT) in tensors else {OUTPUT: EMBEDDING}
    refused = {OPTIMIZER: f"{doubt}; without the optimizer the model loads"} if doubt else {}
    make = partial(
        Assembled,
        folder,
        tensors,
        format="megatron",
        aliases={MODEL: aliases, MASTER: aliases},
        refused=refused,
    )
    return named(
        folder, make, said, tensors, args, options, rank_extra=partial(_random_state, ranks, args)
    )


def _holder(saved: Saved, name: str, args: Arguments) -> tuple[int, ...]:
    """Ranks of one holder have the same of a tensor."""
    return (
        (saved.pp, expert_rank(saved, args), saved.ep) if is_expert(name) else (saved.pp, saved.tp)
    )


Held = Mapping[tuple[tuple[int, ...], Place], tuple[Saved, State]]


def _held(folder: str, ranks: Sequence[Saved], args: Arguments) -> tuple[Held, str]:
    """Optimizer state by holder and place; or none, and why it is not read.

    IncompleteError naming the tensors that have none, where others have.
    """
    held: dict[tuple[tuple[int, ...], Place], tuple[Saved, State]] = {}
    for saved in ranks:
        try:
            for place, state in states(saved, args).items():
                held.setdefault((_holder(saved, place[1], args), place), (saved, state))
        except FormatError as error:
            return {}, str(error)
    lost = {
        f"{saved.where}: {name}"
        for saved in ranks
        for number, chunk in enumerate(saved.chunks)
        for name in chunk
        if is_parameter(name) and (_holder(saved, name, args), (number, name)) not in held
    }
    if lost and any("optimizer" in saved.told for saved in ranks):
        raise IncompleteError(
            listed(
                f"{folder}: tensors have no optimizer state; is {FLAT_FILE} missing?", sorted(lost)
            )
        )
    return held, ""


def _merge(ranks: Sequence[Saved], args: Arguments, held: Held) -> dict[str, _Global]:
    found: dict[str, _Global] = {}
    seen: set[tuple[tuple[int, ...], Place]] = set()
    tied = args.pp > 1 and not args.flag("untie_embeddings_and_output_weights")
    for saved in ranks:
        for number, chunk in enumerate(saved.chunks):
            for name, tensor in chunk.items():
                key = _holder(saved, name, args), (number, name)
                if key in seen or (
                    tied and name == OUTPUT
                ):  # the last stage's copy of the embedding
                    continue
                seen.add(key)
                try:
                    for share in shares(saved, name, tensor, args):
                        _add(found, saved, share, tensor, held.get(key))
                except FormatError as error:
                    raise FormatError(f"{saved.where}: {error}") from error
    _check_experts(found, args)
    return found


def _check_experts(found: Collection[str], args: Arguments) -> None:
    """IncompleteError naming experts that no rank has, where it has others of the layer."""
    held: dict[str, set[int]] = {}
    for place in filter(None, map(expert_of, found)):
        held.setdefault(place.of_all, set()).add(place.number)
    lost = [
        name.format(n)
        for name, numbers in held.items()
        for n in sorted(set(range(args.experts)) ^ numbers)
    ]
    if lost:
        raise IncompleteError(
            listed(
                f"{args.where}: of {args.experts} experts, tensors are missing, or more than these",
                lost,
            )
        )


def _add(
    found: dict[str, _Global],
    saved: Saved,
    share: Share,
    tensor: torch.Tensor,
    held: tuple[Saved, State] | None,
) -> None:
    one = found.setdefault(share.name, _Global(share.shape, tensor.dtype))
    if one.shape != share.shape or one.dtype != tensor.dtype:
        raise FormatError(
            f"{share.name}: has {share.shape} {tensor.dtype}; other ranks {one.shape} {one.dtype}"
        )

    def add(what: str, value: torch.Tensor, where: str) -> Fragment:
        one.dtypes.setdefault(what, value.dtype)
        return Fragment(share.box, partial(share.of, value), where)

    one.fragments.setdefault(MODEL, []).append(add(MODEL, tensor, saved.where))
    if held is None:
        return
    where, state = held[0].where, held[1]
    of_optimizer = {name: add(name, value, where) for name, value in state.tensors.items()}
    if state.master is not None:
        twin = Twin(share.name, where, partial(share.of, tensor), partial(share.of, state.master))
        of_optimizer = {name: twin.guard(fragment) for name, fragment in of_optimizer.items()}
        if tensor.dtype != torch.float32:
            of_optimizer[MASTER] = twin.guard(add(MASTER, state.master, where))
    for name, fragment in of_optimizer.items():
        one.fragments.setdefault(name, []).append(fragment)
    if one.step not in (None, state.step):
        raise FormatError(f"{share.name}: has step {state.step}; other ranks {one.step}")
    one.step, one.options = state.step, state.options


def _assemblies(folder: str, found: Mapping[str, _Global]) -> Iterable[tuple[Key, Assembly]]:
    for name, one in found.items():
        try:
            for what, fragments in one.fragments.items():
                key = (what, name) if what in (MODEL, MASTER) else (OPTIMIZER, f"{name}/{what}")
                yield key, assembly(one.dtypes[what], one.shape, fragments)
            if one.step is not None:
                yield (
                    (OPTIMIZER, f"{name}/step"),
                    assembly(torch.float32, (), [step_fragment(one.step, folder)]),
                )
        except CheckpointError as error:
            raise type(error)(f"{folder}: {name}: {error}") from error


def _groups(found: Mapping[str, _Global]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for name, one in found.items():
        if one.options is not None:
            known = next((group for group in groups if group["options"] == one.options), None)
            if known is None:
                groups.append({"names": [name], "options": dict(one.options)})
            else:
                known["names"].append(name)
    return groups


def _world(args: Arguments) -> int:
    return args.number("world_size", 0)


def _random_state(ranks: Sequence[Saved], args: Arguments, rank: int) -> Any:
    """Of a rank of the job: ranks are counted along tensor, context, data and pipeline parallelism, in this order."""
    tp, cp = args.tp, args.number("context_parallel_size", 1)
    data_rank, pp = (
        rank // (tp * cp) % args.number("data_parallel_size", 1),
        rank * args.pp // max(1, _world(args)),
    )
    told = next(
        (one.told.get("rng_state") for one in ranks if (one.tp, one.pp) == (rank % tp, pp)), None
    )
    if not told:
        return None
    return {"rng_state": plain(told[data_rank if len(told) > 1 else 0])}

"""Agrees with all ranks on which tensors a save encodes, once per plan.

Stored bytes would depend on the layout if ranks decided from what they hold alone. A tensor is
encoded if every rank that holds some of it can, and if few of its elements are exceptions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.plan.holders import gather_distinct_json
from unified_ckpt.format.encoded_tensors import (
    Compression,
    Encoding,
    MomentEncoding,
    choose_encodings,
)
from unified_ckpt.format.exceptions import MIN_RATIO, is_too_many
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.tensors import LocalTensor
from unified_ckpt.runtime.torch_state.unfit import count_unfit_masters, count_unfit_moments


def agree_on_encodings(
    collective: Collective,
    tensors: Sequence[LocalTensor],
    compression: Compression,
    *,
    reads_values: bool = True,
) -> dict[Key, str]:
    """Collective, inside a step. Return the encodings of this rank's tensors, by name.

    Without `reads_values`, no element counts as an exception.
    """
    if compression == "none":
        return {}
    by_key = {tensor.decl.key: tensor for tensor in tensors}
    specs = {key: tensor.decl.spec for key, tensor in by_key.items()}
    chosen = choose_encodings(specs, compression)
    counts = {
        key: _count_exceptions(by_key, key, encoding, rank=collective.rank) if reads_values else 0
        for key, encoding in chosen.items()
    }
    report = {
        "plain": sorted(
            key
            for key, spec in specs.items()
            if key[0] in (MASTER, OPTIMIZER) and spec.dtype == "F32" and counts.get(key) is None
        ),
        # A tensor with too many exceptions has a shard with too many.
        "suspects": sorted(
            key
            for key, count in counts.items()
            if (count or 0) * MIN_RATIO > by_key[key].local.numel()
        ),
    }
    _, reports = gather_distinct_json(collective, "encodings", report)
    lists = {
        name: sorted({tuple(key) for report in reports.values() for key in report[name]})
        for name in ("plain", "suspects")
    }
    agreed = collective.broadcast_json("encodings-agreed", lists)
    plain = {tuple(key) for key in agreed["plain"]}
    suspects = {tuple(key) for key in agreed["suspects"]} - plain
    if suspects:
        plain |= _agree_on_suspects(collective, by_key, counts, suspects)
    return {key: encoding.name for key, encoding in chosen.items() if key not in plain}


def with_encodings(
    tensors: Sequence[LocalTensor], encodings: Mapping[Key, str]
) -> list[LocalTensor]:
    """Return the tensors with these encodings in their declarations."""
    if not encodings:
        return list(tensors)
    return [
        LocalTensor(replace(tensor.decl, encoding=encodings[tensor.decl.key]), tensor.local)
        if tensor.decl.key in encodings
        else tensor
        for tensor in tensors
    ]


def _count_exceptions(
    by_key: Mapping[Key, LocalTensor], key: Key, encoding: Encoding, *, rank: int
) -> int | None:
    """Return the number of local exceptions; None if this rank cannot encode the tensor."""
    tensor = by_key[key]
    if isinstance(encoding, MomentEncoding):
        return count_unfit_moments(tensor, signed=encoding.blocks.signed)
    return count_unfit_masters(by_key[MODEL, key[1]], tensor, rank=rank)


def _agree_on_suspects(
    collective: Collective,
    by_key: Mapping[Key, LocalTensor],
    counts: Mapping[Key, int | None],
    suspects: Collection[Key],
) -> set[Key]:
    """Collective. Return the tensors with too many exceptions, counting replicas once."""
    report = []
    for key in sorted(suspects & counts.keys()):
        decl = by_key[key].decl
        position = decl.sharding.position(collective.rank)
        if position is not None:
            coordinates = decl.sharding.coordinates(position)
            report.append([key, decl.spec.shape, coordinates, counts[key]])
    _, reports = gather_distinct_json(collective, "exception-counts", report)
    shapes: dict[Key, tuple[int, ...]] = {}
    shard_counts: dict[Key, dict[tuple[int, ...], int]] = {}
    for entries in reports.values():
        for (part, fqn), shape, coordinates, count in entries:
            shapes[part, fqn] = tuple(shape)
            shard_counts.setdefault((part, fqn), {})[tuple(coordinates)] = count
    plain = [
        key
        for key, by_shard in sorted(shard_counts.items())
        if is_too_many(sum(by_shard.values()), shapes[key])
    ]
    return {(part, fqn) for part, fqn in collective.broadcast_json("encodings-plain", plain)}

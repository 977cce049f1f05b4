"""Agrees with all ranks on which tensors a save encodes, once per plan.

Stored bytes would depend on the layout if ranks decided from what they hold alone. A tensor is
encoded if every rank that holds some of it can, and if few of its elements are outliers. In the
folders of node groups, each stored box must have whole rows. A master may be decoded beside any
stored copy of its model. Only equal boxes can be compared, so a group must store the same boxes of
both, and all groups must store them whole, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from unified_ckpt.core.nodes.node_groups import base_key
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.engine.encode.unfit import count_unfit_masters, count_unfit_moments
from unified_ckpt.engine.plan.holders import gather_distinct_json
from unified_ckpt.engine.plan.stored_tensors import model_beside
from unified_ckpt.format.encoded_tensors import (
    Compression,
    Encoding,
    MomentEncoding,
    choose_encodings,
)
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.format.outliers import MIN_RATIO, is_too_many
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.masters import model_elements
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

# How a node group stores a tensor: whole, as shards of whole rows, or as shards that cut rows. The
# last also counts for masters that are not cut like their model.
ShardKind = Literal["whole", "rows", "cut"]


@dataclass(frozen=True, slots=True)
class EncodingAgreement:
    """What all ranks agreed on: the encodings of this rank's tensors, by name.

    `plain`: the tensors of all ranks that the compression would encode and this save does not.
    """

    encodings: Mapping[Key, str] = field(default_factory=dict)
    plain: Sequence[Key] = ()


def agree_on_encodings(
    collective: Collective,
    tensors: Sequence[LocalTensor],
    compression: Compression,
    *,
    kinds: Mapping[Key, ShardKind] = MappingProxyType({}),
    reads_values: bool = True,
) -> EncodingAgreement:
    """Collective, inside a step. Agree on what a save encodes.

    `kinds`: how the group of this rank stores its tensors; empty where all ranks share a folder.
    Without `reads_values`, no element counts as an outlier.
    """
    if compression == "none":
        return EncodingAgreement()
    by_key = {tensor.decl.key: tensor for tensor in tensors}
    # Declared boxes are stored plain: a rank may hold several of a tensor, and they may cut rows.
    with_boxes = {tensor.decl.key for tensor in tensors if tensor.decl.sharding.box is not None}
    with_boxes |= {(MASTER, fqn) for part, fqn in with_boxes if part == MODEL}
    specs = {key: tensor.decl.spec for key, tensor in by_key.items()}
    chosen = choose_encodings(specs, compression)
    counts = {
        key: _count_outliers(by_key, key, encoding, rank=collective.rank) if reads_values else 0
        for key, encoding in chosen.items()
        if kinds.get(key) != "cut" and key not in with_boxes
    }
    report = {
        "plain": sorted(
            key
            for key, spec in specs.items()
            if key[0] in (MASTER, OPTIMIZER) and spec.dtype == "F32" and counts.get(key) is None
        ),
        # A tensor with too many outliers has a shard with too many.
        "suspects": sorted(
            key
            for key, count in counts.items()
            if (count or 0) * MIN_RATIO > by_key[key].local.numel()
        ),
        "chosen": sorted(chosen),
    }
    for kind in ("whole", "rows", "cut"):
        report[kind] = sorted(
            key for key in kinds if kinds[key] == kind and key[0] in (MODEL, MASTER)
        )
    _, reports = gather_distinct_json(collective, "encodings", report)
    agreed = collective.broadcast_json("encodings-agreed", _combine_reports(list(reports.values())))
    plain, suspects, refused = (
        {(part, fqn) for part, fqn in agreed[name]} for name in ("plain", "suspects", "refused")
    )
    if suspects:
        too_many = _agree_on_suspects(collective, by_key, counts, suspects)
        plain, refused = plain | too_many, refused | too_many
    encodings = {key: encoding.name for key, encoding in chosen.items() if key not in plain}
    return EncodingAgreement(encodings, sorted(refused))


def _combine_reports(
    reports: Sequence[Mapping[str, Sequence[Sequence[str]]]],
) -> dict[str, list[Key]]:
    """Return, on rank 0, what follows from the reports of all ranks."""
    plain, suspects, chosen, whole, rows, cut = (
        {(part, fqn) for report in reports for part, fqn in report[name]}
        for name in ("plain", "suspects", "chosen", "whole", "rows", "cut")
    )
    plain |= {(MASTER, fqn) for _, fqn in (whole & rows) | (whole & cut) | (rows & cut)}
    return {
        "plain": sorted(plain),
        "suspects": sorted(suspects - plain),
        "refused": sorted(plain & chosen),
    }


def with_encodings(
    tensors: Sequence[LocalTensor], encodings: Mapping[Key, str], *, rank: int | None = None
) -> list[LocalTensor]:
    """Return the tensors with these encodings in their declarations.

    `rank`: for a save, which writes the model of encoded masters with them; None: only to plan.
    """
    if not encodings:
        return list(tensors)
    models = {tensor.decl.fqn: tensor for tensor in tensors if tensor.decl.part == MODEL}
    encoded: list[LocalTensor] = []
    for tensor in tensors:
        if tensor.decl.key in encodings:
            decl, model = tensor.decl._replace(encoding=encodings[tensor.decl.key]), None
            if decl.part == MASTER and rank is not None:
                model = model_elements(models[decl.fqn], tensor, rank=rank)
            tensor = encoded_tensor(decl, tensor.local, model)
        encoded.append(tensor)
    return encoded


def encoded_tensor(
    decl: TensorDecl, local: torch.Tensor, model: torch.Tensor | None = None
) -> LocalTensor:
    """Return a local tensor that may be encoded. `model`: the elements beside a master's."""
    model_decl = model_beside(decl)
    if model is None or model_decl is None:
        return LocalTensor(decl, local)
    return LocalTensor(decl, local, LocalTensor(model_decl, model))


def masters_of_differing_models(
    digests_of_groups: Sequence[Mapping[str, int]], encoded: Collection[Key]
) -> list[str]:
    """Return the encoded masters whose model differs between node groups that store equal boxes.

    A load may decode a master of one group beside the model of another one. `digests_of_groups`:
    those of the model tensors and shards of each, by "part:name".
    """
    digest_by_name: dict[str, int] = {}
    differing = {
        name
        for by_name in digests_of_groups
        for name, digest in by_name.items()
        if digest_by_name.setdefault(name, digest) != digest
    }
    fqns = (base_key((part, fqn))[1] for part, _, fqn in (n.partition(":") for n in differing))
    return sorted({fqn for fqn in fqns if (MASTER, fqn) in encoded})


def _count_outliers(
    by_key: Mapping[Key, LocalTensor], key: Key, encoding: Encoding, *, rank: int
) -> int | None:
    """Return the number of local outliers; None if this rank cannot encode the tensor."""
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
    """Collective. Return the tensors with too many outliers, counting replicas once."""
    report = []
    for key in sorted(suspects & counts.keys()):
        decl = by_key[key].decl
        coordinates = decl.sharding.coordinates(decl.sharding.position(collective.rank))
        report.append([key, decl.spec.shape, coordinates, counts[key]])
    _, reports = gather_distinct_json(collective, "outlier-counts", report)
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

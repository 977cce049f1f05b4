"""What files store of the tensors of a group: each as it is, or the tensors of its encoding.

Ranks divide and exchange the bytes that a tensor has in memory. Files, offsets and digests are
those of stored tensors. Rows of an encoded tensor are rows of each stored tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, parse_shard_key, shard_name
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import HolderGroup, TensorDecl
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.format.encoded_tensors import (
    Encoding,
    MasterEncoding,
    encoding_named,
    encoding_records,
)
from unified_ckpt.format.manifest_fields import EncodingRecord


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file, which stores tensor `decl_index` of the group, or a part of it."""

    decl_index: int
    fqn: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The stored tensors of a group, by declaration.

    `starts`: index of the first one of each declaration, and at last their number.
    """

    tensors: tuple[StoredTensor, ...]
    starts: tuple[int, ...]

    def of(self, decl_index: int) -> range:
        """Return the indices of what stores a declaration."""
        return range(self.starts[decl_index], self.starts[decl_index + 1])

    def nbytes_by_decl(self) -> list[int]:
        """Return the stored bytes of each declaration."""
        ends = list(accumulate((tensor.spec.nbytes for tensor in self.tensors), initial=0))
        return [ends[self.starts[i + 1]] - ends[n] for i, n in enumerate(self.starts[:-1])]


def is_encoded_master(decl: TensorDecl) -> bool:
    """Return whether a save encodes this tensor beside the stored model."""
    return decl.encoding == MasterEncoding.name


def masters_last(groups: Sequence[HolderGroup]) -> list[HolderGroup]:
    """Move encoded masters to groups of their own, which follow all groups with models."""
    ordered = [
        replace(group, decls=decls)
        for is_last in (False, True)
        for group in groups
        if (decls := tuple(d for d in group.decls if is_encoded_master(d) == is_last))
    ]
    return [replace(group, index=index) for index, group in enumerate(ordered)]


def encoding_of(decl: TensorDecl) -> Encoding | None:
    """Return the encoding in which a save stores this tensor, None if it stores it as it is."""
    return encoding_named(decl.encoding, file=decl.fqn) if decl.encoding else None


def stored_specs(decl: TensorDecl) -> dict[str, TensorSpec]:
    """Return what files store of a declaration, by name.

    An encoded shard has whole rows: each of its stored tensors is a shard of those rows.
    """
    encoding = encoding_of(decl)
    if encoding is None:
        return {decl.fqn: decl.spec}
    shard = parse_shard_key(decl.key)
    if shard is None:
        return encoding.stored_specs(decl.fqn, decl.spec.shape)
    fqn, box, shape = shard
    specs = {}
    for name, spec in encoding.stored_specs(fqn, shape).items():
        rows = Box(box.offsets, (*box.shape[:-1], spec.shape[-1]))
        specs[shard_name(name, rows, spec.shape)] = TensorSpec(spec.dtype, rows.shape)
    return specs


def list_stored(decls: Sequence[TensorDecl]) -> StoredTensors:
    """Return the stored tensors of a group's declarations."""
    tensors: list[StoredTensor] = []
    starts = [0]
    for decl_index, decl in enumerate(decls):
        tensors += [StoredTensor(decl_index, fqn, spec) for fqn, spec in stored_specs(decl).items()]
        starts.append(len(tensors))
    return StoredTensors(tuple(tensors), tuple(starts))


def encoding_records_of(decls: Iterable[TensorDecl]) -> dict[str, dict[str, EncodingRecord]]:
    """Return the manifest's records of encodings. FormatError if a reader would misread a tensor.

    Leaves out shards, whose encodings are those of their tensors in all node groups.
    """
    whole = [decl for decl in decls if not decl.part.endswith(SHARD_SUFFIX)]
    encodings = {
        decl.key: encoding_named(decl.encoding, file=decl.fqn) for decl in whole if decl.encoding
    }
    return encoding_records(encodings, {decl.key: decl.spec for decl in whole}) if encodings else {}

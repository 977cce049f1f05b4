"""What files store of the tensors of a group: each as it is, or the tensors of its encoding.

Ranks divide and exchange the bytes that a tensor has in memory. Files, offsets and digests are
those of stored tensors. Rows of an encoded tensor are rows of each stored tensor.

A master could come back wrong if it were encoded beside other bits than the stored model: of a
replica that drifted, or of a later step. So the rank that writes rows of an encoded master also
writes these rows of the model, from the buffer beside which it encodes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, parse_shard_key, shard_name
from unified_ckpt.core.planning.write_plan import StoredTensor
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import HolderGroup, Key, TensorDecl
from unified_ckpt.core.sharding.shardings import TensorSpec, spec_of
from unified_ckpt.format.encoded_tensors import (
    Encoding,
    MasterEncoding,
    encoding_named,
    encoding_records,
)
from unified_ckpt.format.manifest_fields import EncodingRecord
from unified_ckpt.format.names import MASTER, MODEL


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


def is_encoded_master(decl: TensorDecl) -> bool:
    """Return whether a save encodes this tensor beside the model, and writes both."""
    return decl.encoding == MasterEncoding.name


def model_beside(decl: TensorDecl) -> TensorDecl | None:
    """Return the model tensor that is stored with an encoded master, sharded like the master."""
    if not is_encoded_master(decl):
        return None
    part, spec = decl.part.replace(MASTER, MODEL), spec_of("BF16", decl.spec.shape)
    return TensorDecl(part, decl.fqn, spec, decl.sharding)


def split_models(groups: Sequence[HolderGroup]) -> tuple[list[HolderGroup], list[HolderGroup]]:
    """Return the groups that write their tensors, and then those of models beside masters.

    Tensors of the latter are written with their masters, by the ranks that hold these.
    """
    beside: set[Key] = {
        model.key
        for group in groups
        for decl in group.decls
        if decl.encoding and (model := model_beside(decl))
    }
    if not beside:
        return list(groups), []
    split: list[list[HolderGroup]] = [[], []]
    for is_beside, kept in enumerate(split):
        for group in groups:
            decls = tuple(decl for decl in group.decls if (decl.key in beside) == is_beside)
            if decls:
                kept.append(replace(group, index=sum(map(len, split)), decls=decls))
    return split[0], split[1]


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
    """Return the stored tensors of a group's declarations; the model follows an encoded master."""
    tensors: list[StoredTensor] = []
    starts = [0]
    for decl_index, decl in enumerate(decls):
        for fqn, spec in stored_specs(decl).items():
            tensors.append(StoredTensor(decl_index, decl.part, fqn, spec))
        if decl.encoding and (model := model_beside(decl)) is not None:
            tensors.append(StoredTensor(decl_index, *model.key, model.spec))
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

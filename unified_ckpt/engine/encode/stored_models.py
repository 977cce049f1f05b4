"""Reads the stored model back, beside which masters are encoded, and proves what it read.

A master could come back wrong if it were encoded beside other bits than the stored ones: of a
replica that drifted, or of a later step. So all ranks first write the model, then encode masters
beside what the file holds. A file system that shows one node old bytes of another is found by
digests: those of what was read must be those of what was written.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import numpy as np

from unified_ckpt.core.nodes.node_groups import base_key, base_part
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.engine.plan.chunks import BlockCrcs
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.plan.stored_tensors import is_encoded_master
from unified_ckpt.format import digests
from unified_ckpt.format.digests import BlockCrc
from unified_ckpt.format.encodings import Bits16
from unified_ckpt.format.names import MASTER, MODEL
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_writer import FileWriter


class StoredModels:
    """The model tensors of this rank's groups in the staging folder, once they are written."""

    def __init__(self, file_writer: FileWriter, groups: Sequence[GroupPlan]) -> None:
        self._file_writer = file_writer
        self._places: dict[Key, tuple[str, int]] = {}
        for group in groups:
            for decl_index, decl in enumerate(group.decls):
                if base_part(decl.part) == MODEL:
                    file = group.files[group.file_by_decl[decl_index]]
                    offset = file.offsets[group.stored.starts[decl_index]]
                    self._places[decl.key] = file.name, offset
        self._read_crcs: dict[Key, list[BlockCrc]] = {}

    def read_beside(self, master: Key, first: int, shape: tuple[int, ...]) -> Bits16:
        """Return the bits of the model beside a master or its shard, from flat index `first` on.

        Read each element once.
        """
        bits = np.empty(shape, np.uint16)
        view, start = bits.reshape(-1).view(np.uint8).data, first * bits.itemsize
        file, offset = self._places[_model_key(master)]
        self._file_writer.read_at(file, offset + start, view)
        self._read_crcs.setdefault(master, []).extend(digests.block_crcs(view, start=start))
        return bits

    def records(self, group: GroupPlan) -> BlockCrcs:
        """Return the CRCs of the model read for this group, by index past its stored tensors."""
        return [
            (len(group.stored.tensors) + decl_index, crc)
            for decl_index, decl in enumerate(group.decls)
            if is_encoded_master(decl)
            for crc in self._read_crcs.get(decl.key, ())
        ]


def pack_model_digests(
    group: GroupPlan,
    crcs_by_tensor: Mapping[int, Sequence[BlockCrc]],
    stored_blocks: Sequence[Sequence[int]],
) -> bytes:
    """Return one digest for each tensor of a group, as its leader knows them.

    That of a model tensor is of what is stored, that of encoded masters of the model that was read.
    `crcs_by_tensor`: the CRCs of all members. `stored_blocks`: the digests by stored tensor.
    """
    packed = []
    for decl_index, decl in enumerate(group.decls):
        blocks: Sequence[int] = ()
        if base_part(decl.part) == MODEL:
            blocks = stored_blocks[group.stored.starts[decl_index]]
        elif is_encoded_master(decl):
            crcs = crcs_by_tensor.get(len(group.stored.tensors) + decl_index, ())
            nbytes = group.stored.tensors[group.stored.starts[decl_index]].spec.nbytes  # model's
            by_block, _ = digests.combine_blocks(crcs, nbytes=nbytes)
            blocks = [by_block[block] for block in range(digests.block_count(nbytes))]
        packed.append(digests.crc(struct.pack(f"<{len(blocks)}Q", *blocks)))
    return struct.pack(f"<{len(packed)}Q", *packed)


def read_model_digests(
    collective: Collective, decls_by_group: Sequence[Sequence[TensorDecl]]
) -> dict[Key, int]:
    """On rank 0, return the digests of `pack_model_digests` of all groups, by declaration."""
    return {
        decl.key: digest
        for index, decls in enumerate(decls_by_group)
        for decl, (digest,) in zip(
            decls, struct.iter_unpack("<Q", collective.get(f"models/{index}")), strict=True
        )
    }


def models_read_wrong(
    decls_by_group: Sequence[Sequence[TensorDecl]], digest_by_key: Mapping[Key, int]
) -> list[str]:
    """Return the masters beside which other bits than the stored model were read."""
    return sorted(
        decl.fqn
        for decl in chain.from_iterable(decls_by_group)
        if is_encoded_master(decl)
        and digest_by_key[decl.key] != digest_by_key[_model_key(decl.key)]
    )


def model_digests(
    decls_by_group: Sequence[Sequence[TensorDecl]], digest_by_key: Mapping[Key, int]
) -> dict[str, int]:
    """Return the digest of each stored model tensor, and of each shard, by "part:name"."""
    return {
        f"{decl.part}:{decl.fqn}": digest_by_key[decl.key]
        for decl in chain.from_iterable(decls_by_group)
        if base_part(decl.part) == MODEL
    }


def masters_of_differing_models(
    digests_of_groups: Sequence[Mapping[str, int]], encoded: Collection[Key]
) -> list[str]:
    """Return the encoded masters whose model differs between node groups that store equal boxes.

    A load may decode a master of one group beside the model of another one. `digests_of_groups`:
    the `model_digests` of each.
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


def _model_key(master: Key) -> Key:
    """Return the part and name of the model tensor, or shard, beside which a master is stored."""
    part, fqn = master
    return part.replace(MASTER, MODEL), fqn

"""Proves that encoded masters lie beside the model bits that give them back.

A master could come back wrong if replicas drifted apart: its model is stored by another rank than
its encoding, and may be compared by a third. So whoever encodes masters digests the model bits that
they need. These digests, corrected at exceptions, must be those of the stored model.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod

import numpy as np
from numpy.typing import NDArray

from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.engine.plan.chunks import BlockCrcs
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.format.digests import BLOCK_NBYTES, BlockCrc
from unified_ckpt.format.encodings import fitting_models
from unified_ckpt.format.names import MASTER, MODEL
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.unfit import UnfitMasters

Difference = tuple[NDArray[np.int64], NDArray[np.uint16]]

_UNKNOWN = 0  # in place of the digest of a tensor that is not compared


@dataclass(slots=True)
class ModelDigests:
    """What this rank knows of the models of encoded masters, by master.

    `fitting`: CRCs of the model bits that give back the masters encoded here. `differences`: flat
    indices of exceptions, and the XOR of these bits with the model's; None if those of the model
    are not known.
    """

    fitting: dict[Key, list[BlockCrc]] = field(default_factory=dict)
    differences: dict[Key, list[Difference] | None] = field(default_factory=dict)

    def add_masters(self, key: Key, first: int, masters: NDArray[np.uint32]) -> None:
        """Add masters that are encoded, as bits, from flat index `first` of the tensor on."""
        models = fitting_models(masters).reshape(-1)
        crcs = digests.block_crcs(models.view(np.uint8).data, start=first * models.itemsize)
        self.fitting.setdefault(key, []).extend(crcs)

    def add_exceptions(self, key: Key, unfit: UnfitMasters) -> None:
        """Add exceptions that this rank found in a tensor, each once."""
        indices, masters, models = unfit
        found = self.differences.setdefault(key, [])
        if models is None:
            self.differences[key] = None
        elif found is not None:
            found.append((indices, fitting_models(masters) ^ models))

    def records(self, group: GroupPlan) -> BlockCrcs:
        """Return what the leader of this group needs, under indices past its stored tensors."""
        records: BlockCrcs = []
        for decl_index, decl in enumerate(group.decls):
            fitting, correcting = _record_indices(group, decl_index)
            records += [(fitting, crc) for crc in self.fitting.get(decl.key, ())]
            differences = self.differences.get(decl.key, [])
            if differences is None:
                records.append((correcting, BlockCrc(0, 0, 0, 0)))
            elif differences:
                nbytes = 2 * prod(decl.spec.shape)
                records += [(correcting, change) for change in _changes(differences, nbytes)]
        return records


def _changes(differences: Sequence[Difference], nbytes: int) -> Iterator[BlockCrc]:
    """Yield the XOR by which differing elements change the CRC of each block of a model tensor."""
    indices, bits = (np.concatenate(arrays) for arrays in zip(*differences, strict=True))
    order = np.argsort(indices)
    starts, bits = 2 * indices[order], bits[order]
    for block in np.unique(starts // BLOCK_NBYTES):
        start = int(block) * BLOCK_NBYTES
        stop = min(start + BLOCK_NBYTES, nbytes)
        low, high = np.searchsorted(starts, [start, stop])
        body = np.zeros((stop - start) // 2, np.uint16)
        unchanged = digests.crc(body.data)
        body[(starts[low:high] - start) // 2] = bits[low:high]
        yield BlockCrc(int(block), start, stop, digests.crc(body.data) ^ unchanged)


def _record_indices(group: GroupPlan, decl_index: int) -> tuple[int, int]:
    first = len(group.stored.tensors) + 2 * decl_index
    return first, first + 1


def pack_model_digests(
    group: GroupPlan,
    crcs_by_tensor: Mapping[int, Sequence[BlockCrc]],
    stored_blocks: Sequence[Sequence[int]],
) -> bytes:
    """Return one digest for each tensor of a group, as its leader knows them.

    That of a model tensor is of what is stored. That of encoded masters is of the model they need.
    `crcs_by_tensor`: the CRCs of all members. `stored_blocks`: the digests by stored tensor.
    """
    packed = []
    for decl_index, decl in enumerate(group.decls):
        blocks: Sequence[int] | None = None
        if decl.part == MODEL:
            blocks = stored_blocks[group.stored.starts[decl_index]]
        elif decl.part == MASTER and decl.encoding:
            blocks = _needed_blocks(group, decl_index, crcs_by_tensor)
        body = b"" if blocks is None else struct.pack(f"<{len(blocks)}Q", *blocks)
        packed.append(_UNKNOWN if blocks is None else digests.crc(body))
    return struct.pack(f"<{len(packed)}Q", *packed)


def _needed_blocks(
    group: GroupPlan, decl_index: int, crcs_by_tensor: Mapping[int, Sequence[BlockCrc]]
) -> list[int] | None:
    """Return the digests of the model that encoded masters need, None if they are not known."""
    fitting, correcting = _record_indices(group, decl_index)
    nbytes = group.stored.tensors[group.stored.starts[decl_index]].spec.nbytes  # as the model's
    blocks, _ = digests.combine_blocks(crcs_by_tensor.get(fitting, ()), nbytes=nbytes)
    for correction in crcs_by_tensor.get(correcting, ()):
        if correction.start == correction.stop:
            return None
        blocks[correction.block] ^= correction.crc
    return [blocks[block] for block in range(digests.block_count(nbytes))]


def masters_of_other_models(
    collective: Collective, decls_by_group: Sequence[Sequence[TensorDecl]]
) -> list[str]:
    """On rank 0, return the masters whose leaders need another model than the stored one."""
    digest_by_key = {
        decl.key: digest
        for index, decls in enumerate(decls_by_group)
        for decl, (digest,) in zip(
            decls, struct.iter_unpack("<Q", collective.get(f"models/{index}")), strict=True
        )
    }
    return sorted(
        decl.fqn
        for decl in chain.from_iterable(decls_by_group)
        if decl.part == MASTER
        and decl.encoding
        and digest_by_key[decl.key] not in (_UNKNOWN, digest_by_key[MODEL, decl.fqn])
    )

"""The parts of a group's files in a bucket: how tensors map to them, and who owns each.

Owners depend on all parts of the group. Its leader assigns them once and sends them to the members,
since every member would need as long.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from unified_ckpt.core.planning.part_grid import GroupParts, PartedFile, StoredBytes
from unified_ckpt.core.planning.part_owners import assign_owners
from unified_ckpt.core.planning.part_segments import Numbers
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.engine.plan.file_layout import GroupLayout
from unified_ckpt.engine.plan.stored_tensors import encoding_of, is_encoded_master
from unified_ckpt.runtime.comm.collective import Collective

_MASTER_NBYTES, _MODEL_NBYTES = 4, 2  # of an element of an encoded master, and of the model


def group_parts(layout: GroupLayout) -> GroupParts:
    """Return the parts of the files of a group, of which one rank writes each."""
    assert layout.part_nbytes is not None
    stored = [
        stored_bytes
        for index, decl in enumerate(layout.decls)
        for stored_bytes in _stored_bytes(index, decl)
    ]
    files = []
    for file in layout.files:
        in_order = sorted(file.offsets.items(), key=lambda item: item[1])
        indices, starts = zip(*in_order, strict=True) if in_order else ((), ())
        files.append(PartedFile(len(file.header_bytes), file.nbytes, indices, starts))
    return GroupParts(layout.decls, stored, files, layout.holders, layout.part_nbytes)


def _stored_bytes(index: int, decl: TensorDecl) -> list[StoredBytes]:
    """Return how the stored tensors of a declaration follow from it, in their order."""
    encoding = encoding_of(decl)
    if encoding is None:
        return [StoredBytes(index)]
    length = decl.spec.shape[-1]
    stored = [
        StoredBytes(index, row_nbytes, _MASTER_NBYTES * length)
        for row_nbytes in encoding.row_nbytes(length)
    ]
    if is_encoded_master(decl):
        stored.append(StoredBytes(index, _MODEL_NBYTES, _MASTER_NBYTES, is_model=True))
    return stored


def share_owners(collective: Collective, layouts: Sequence[GroupLayout]) -> list[Numbers | None]:
    """Return the owners of each group's parts, as indices of the holders; None without parts.

    Collective over the holders of each group.
    """
    assigned: dict[int, Numbers] = {}
    parted = [layout for layout in layouts if layout.part_nbytes is not None]
    for layout in parted:  # first, as other ranks wait for them
        if layout.holders[0] == collective.rank:
            assigned[layout.index] = assign_owners(group_parts(layout))
            collective.put(f"owners/{layout.index}", _encode(assigned[layout.index]))
    for layout in parted:
        if layout.index not in assigned:
            assigned[layout.index] = _decode(collective.get(f"owners/{layout.index}"))
    return [assigned.get(layout.index) for layout in layouts]


def _encode(owners: Numbers) -> bytes:
    return zlib.compress(owners.astype("<u4").tobytes(), 1)


def _decode(body: bytes) -> Numbers:
    return np.frombuffer(zlib.decompress(body), "<u4").astype(np.int64)

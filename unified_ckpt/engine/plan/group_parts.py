"""The parts of a group's files in a bucket, and how the bytes of tensors map to them."""

from __future__ import annotations

from unified_ckpt.core.planning.part_grid import GroupParts, PartedFile, StoredBytes
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.engine.plan.file_layout import GroupLayout
from unified_ckpt.engine.plan.stored_tensors import encoding_of, is_encoded_master

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

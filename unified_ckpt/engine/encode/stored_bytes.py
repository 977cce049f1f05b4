"""Encodes rows of tensors as they are written; bytes of other tensors pass through."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.engine.encode.exceptions import Exceptions
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, chunks
from unified_ckpt.engine.plan.save_plan import FileLayout, GroupPlan
from unified_ckpt.engine.plan.stored_tensors import encoding_of
from unified_ckpt.format.encoded_tensors import MomentEncoding

_ENCODED_NBYTES = 1 << 20  # encoded at a time: temporary arrays stay in the CPU cache
_ITEM_NBYTES = 4  # of float32, the dtype of all encoded tensors


def extent_chunks(decl: TensorDecl, extent: Extent) -> Iterator[tuple[int, int]]:
    """Split the range of an extent at multiples of a chunk; of an encoded tensor, between rows."""
    return chunks(extent.start, extent.stop, nbytes=_whole_rows(decl, CHUNK_NBYTES))


def _whole_rows(decl: TensorDecl, nbytes: int) -> int:
    """Return the most bytes of whole rows up to `nbytes`, at least one row; any, if not encoded."""
    if not decl.encoding:
        return nbytes
    row_nbytes = _ITEM_NBYTES * decl.spec.shape[-1]
    return max(nbytes // row_nbytes, 1) * row_nbytes


def stored_range(
    group: GroupPlan, stored_index: int, start: int, stop: int
) -> tuple[FileLayout, tuple[int, int]]:
    """Return the file and the range in it that stores bytes [start, stop) of a tensor in memory.

    In an encoded tensor these are whole rows.
    """
    tensor = group.stored.tensors[stored_index]
    decl, file = group.decls[tensor.decl_index], group.files[group.file_by_decl[tensor.decl_index]]
    offset, stored_nbytes = file.offsets[stored_index], tensor.spec.nbytes
    low, high = (bound * stored_nbytes // decl.spec.nbytes for bound in (start, stop))
    return file, (offset + low, offset + high)


def stored_bytes(
    group: GroupPlan, decl_index: int, start: int, view: memoryview, exceptions: Exceptions
) -> Iterator[tuple[int, int, memoryview]]:
    """Yield what stores the bytes of a tensor in memory from `start` on.

    Each item is the index of a stored tensor, a byte offset in it, and bytes. They alias `view`
    where the tensor is stored as it is.
    """
    decl, indices = group.decls[decl_index], group.stored.of(decl_index)
    encoding = encoding_of(decl)
    if encoding is None:
        yield indices.start, start, view
        return
    length = decl.spec.shape[-1]
    rows = np.frombuffer(view, np.uint32).reshape(-1, length)
    first_element = start // _ITEM_NBYTES
    stored = [np.empty((len(rows), nbytes), np.uint8) for nbytes in encoding.row_nbytes(length)]
    row_count = _whole_rows(decl, _ENCODED_NBYTES) // (_ITEM_NBYTES * length)
    for first in range(0, len(rows), row_count):
        some = rows[first : first + row_count]
        position = first_element + first * length
        if isinstance(encoding, MomentEncoding):
            unfit = encoding.exceptions(some)
        elif exceptions.models is None:
            raise AssertionError(f"{decl.fqn}: encoded before the model is written")
        else:
            model = exceptions.models.read_beside(decl.key, position, some.shape)
            unfit = encoding.exceptions(some, model)
        exceptions.add(decl.key, (position + unfit, some.reshape(-1)[unfit]))
        for whole, encoded in zip(stored, encoding.encode(some), strict=True):
            whole[first : first + row_count] = encoded
    for index, whole in zip(indices, stored, strict=True):
        yield index, first_element // length * whole.shape[1], whole.reshape(-1).data

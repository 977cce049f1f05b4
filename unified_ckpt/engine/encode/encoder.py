"""Encodes rows of tensors between plan and writer; bytes of other tensors pass through.

Ranks copy and exchange *planes*: the bytes of a tensor, and with an encoded master those of the
model's elements. An encoder returns what stores them, and the outliers. It reads nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from unified_ckpt.core.planning.exchange import Clip
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, BlockCrcs
from unified_ckpt.engine.plan.group_plan import GroupPlan
from unified_ckpt.engine.plan.stored_tensors import encoding_of, is_encoded_master
from unified_ckpt.format.encoded_tensors import MasterEncoding, MomentEncoding
from unified_ckpt.format.outliers import Elements

_ENCODED_NBYTES = 1 << 20  # encoded at a time: temporary arrays stay in the CPU cache
_ITEM_NBYTES = 4  # of float32, the dtype of all encoded tensors

Planes = Sequence[memoryview]
LocalOutliers = list[tuple[Key, Elements]]  # of tensors and shards, by flat index
StoredBytes = tuple[int, int, memoryview]  # index of a stored tensor, byte offset in it, bytes


@dataclass(slots=True)
class GroupWritten:
    """What a rank has written of a group: the CRCs of its blocks, and the outliers in them."""

    crcs: BlockCrcs = field(default_factory=list)
    outliers: LocalOutliers = field(default_factory=list)

    def extend(self, other: GroupWritten) -> None:
        """Add what was written after it."""
        self.crcs += other.crcs
        self.outliers += other.outliers


@dataclass(frozen=True, slots=True)
class PlainEncoder:
    """Stores a tensor as it is, as stored tensor `index`."""

    index: int
    chunk_nbytes = CHUNK_NBYTES

    def plane_sizes(self, nbytes: int) -> tuple[int, ...]:
        """Return the bytes of each plane for `nbytes` of the tensor."""
        return (nbytes,)

    def encode(
        self, start: int, planes: Planes, clip: Clip | None = None
    ) -> tuple[list[StoredBytes], LocalOutliers]:
        """Return what stores the bytes of the tensor from `start` on, and the outliers in them.

        `clip`: only these bytes.
        """
        return _clipped([(self.index, start, planes[0])], clip), []


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """Stores whole rows of a tensor as rows of the stored tensors `indices`."""

    decl: TensorDecl
    indices: range
    encoding: MasterEncoding | MomentEncoding

    @property
    def chunk_nbytes(self) -> int:
        """The bytes to encode and write at once: whole rows."""
        return self._row_count(CHUNK_NBYTES) * self._row_nbytes

    @property
    def _row_nbytes(self) -> int:
        return _ITEM_NBYTES * self.decl.spec.shape[-1]

    def _row_count(self, nbytes: int) -> int:
        return max(nbytes // self._row_nbytes, 1)

    def plane_sizes(self, nbytes: int) -> tuple[int, ...]:
        """Return the bytes of each plane for `nbytes` of the tensor: bfloat16 beside float32."""
        return (nbytes, nbytes // 2) if is_encoded_master(self.decl) else (nbytes,)

    def encode(
        self, start: int, planes: Planes, clip: Clip | None = None
    ) -> tuple[list[StoredBytes], LocalOutliers]:
        """Return what stores the rows from byte `start` on, and the outliers in them.

        `clip`: only these bytes of one stored tensor. The codes come with the outliers of rows that
        begin in them. The bytes of the model alias its plane.
        """
        model_item = (self.indices[-1], start // 2, planes[-1])
        if clip is not None and clip.is_model:
            return _clipped([model_item], clip), []
        length, encoding = self.decl.spec.shape[-1], self.encoding
        rows, *models = (
            np.frombuffer(plane, dtype).reshape(-1, length)
            for plane, dtype in zip(planes, (np.uint32, np.uint16), strict=False)
        )
        first_element = start // _ITEM_NBYTES
        stored = [np.empty((len(rows), nbytes), np.uint8) for nbytes in encoding.row_nbytes(length)]
        outliers: LocalOutliers = []
        row_count = self._row_count(_ENCODED_NBYTES)
        for first in range(0, len(rows), row_count):
            some = slice(first, first + row_count)
            unfit = encoding.outliers(rows[some], *(model[some] for model in models))
            if len(unfit):
                position = first_element + first * length
                outliers.append((self.decl.key, (position + unfit, rows[some].reshape(-1)[unfit])))
            for whole, encoded in zip(stored, encoding.encode(rows[some]), strict=True):
                whole[some] = encoded
        items = [
            (index, first_element // length * whole.shape[1], whole.reshape(-1).data)
            for index, whole in zip(self.indices, stored, strict=False)
        ]
        if models:
            items.append(model_item)
        return _clipped(items, clip), self._clipped_outliers(outliers, clip)

    def _clipped_outliers(self, outliers: LocalOutliers, clip: Clip | None) -> LocalOutliers:
        """Return the outliers that the owner of these bytes reports."""
        if clip is None:
            return outliers
        if clip.stored_index != self.indices[0]:
            return []
        length = self.decl.spec.shape[-1]
        row_nbytes = self.encoding.row_nbytes(length)[0]
        first, stop = (-(-byte // row_nbytes) * length for byte in (clip.start, clip.stop))
        clipped = []
        for key, (positions, values) in outliers:
            inside = (positions >= first) & (positions < stop)
            if inside.any():
                clipped.append((key, (positions[inside], values[inside])))
        return clipped


def _clipped(items: list[StoredBytes], clip: Clip | None) -> list[StoredBytes]:
    if clip is None:
        return items
    return [
        (index, max(start, clip.start), stored[max(clip.start - start, 0) : clip.stop - start])
        for index, start, stored in items
        if index == clip.stored_index
    ]


Encoder = PlainEncoder | RowEncoder


def encoder_of(group: GroupPlan, decl_index: int) -> Encoder:
    """Return the encoder of a tensor of a group; one of which others declare boxes is plain."""
    decl = group.decls[decl_index] if decl_index < len(group.decls) else None
    encoding = encoding_of(decl) if decl is not None else None
    if decl is None or encoding is None:
        return PlainEncoder(group.stored.starts[decl_index])
    return RowEncoder(decl, group.stored.of(decl_index), encoding)

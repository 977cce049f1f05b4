"""Copies byte ranges of sharded tensors out of their shards, which are loaded as tensors."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from unified_ckpt.core.sharding.boxes import Box, intersect, range_to_boxes, relative_to
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.storage.mapped_pages import PageReclaimer, copy_single_threaded
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.torch_state.tensors import from_bytes, torch_dtype
from unified_ckpt.views.shards import ShardedTensor, TensorShard

CACHE_NBYTES = 256 << 20  # of shards that are expensive to load; a larger one is cached alone


class ShardAssembler:
    """Reads byte ranges of tensors that are assembled from shards, on any number of threads.

    Caches the shards that are expensive to load. Only one thread loads these at a time.
    """

    def __init__(self, tensors: Mapping[Key, ShardedTensor]) -> None:
        self._tensors, self._pages = tensors, PageReclaimer()
        self._indexes: dict[Key, _ShardIndex] = {}  # of tensors read so far
        self._cached: OrderedDict[int, tuple[TensorShard, torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Read any byte range. Elements that it splits at either end are read whole and trimmed."""
        view = memoryview(buffer).cast("B")
        element_nbytes = itemsize(self._tensors[key].spec.dtype)
        first, stop = start // element_nbytes, -(-(start + len(view)) // element_nbytes)
        if start % element_nbytes or (start + len(view)) % element_nbytes:
            aligned = bytearray((stop - first) * element_nbytes)
            self._read_elements(key, first, stop, memoryview(aligned))
            view[:] = memoryview(aligned)[start - first * element_nbytes :][: len(view)]
        else:
            self._read_elements(key, first, stop, view)

    def clear(self) -> None:
        """Drop cached shards."""
        with self._lock:
            self._cached.clear()

    def _read_elements(self, key: Key, first: int, stop: int, view: memoryview) -> None:
        """Copy elements [first, stop) of a tensor, row-major, into `view`."""
        if first >= stop:
            return
        tensor = self._tensors[key]
        shard_index = self._indexes.get(key)
        if shard_index is None:
            shard_index = self._indexes[key] = _ShardIndex(tensor.shards)
        dtype = torch_dtype(tensor.spec.dtype)
        flat_view, position = torch.frombuffer(view, dtype=dtype), 0  # [stop - first]
        for block in range_to_boxes(tensor.box_shape, first, stop):
            block_view = flat_view[position : position + block.numel].view(block.shape)
            position += block.numel
            for number in shard_index.candidates(block):
                shard = tensor.shards[number]
                common = intersect(block, shard.box)
                if common is not None:
                    elements = self._load(shard, dtype, key)[
                        relative_to(common, shard.box.offsets).slices
                    ]
                    copy_single_threaded(
                        block_view[relative_to(common, block.offsets).slices], elements
                    )
                    # a cached shard may be a caller's mapping with changes that must not be dropped
                    if not shard.cache:
                        self._pages.mark_read(elements)

    def _load(self, shard: TensorShard, dtype: torch.dtype, key: Key) -> torch.Tensor:
        loaded = self._load_cached(shard) if shard.cache else shard.load()
        if tuple(loaded.shape) != shard.box.shape or loaded.dtype != dtype:
            raise FormatError(
                f"{shard.file}: got a shard of {':'.join(key)} with shape {tuple(loaded.shape)} "
                f"and {loaded.dtype}, expected {shard.box.shape} and {dtype}"
            )
        return loaded

    def _load_cached(self, shard: TensorShard) -> torch.Tensor:
        with self._lock:
            if id(shard) in self._cached:
                self._cached.move_to_end(id(shard))
            else:
                self._cached[id(shard)] = shard, shard.load()
                while (
                    len(self._cached) > 1
                    and sum(tensor.nbytes for _, tensor in self._cached.values()) > CACHE_NBYTES
                ):
                    self._cached.popitem(last=False)
            return self._cached[id(shard)][1]


def assemble(tensor: ShardedTensor) -> torch.Tensor:
    """Return a whole tensor in memory."""
    key, buffer = ("", ""), bytearray(tensor.spec.nbytes)
    ShardAssembler({key: tensor}).read_into(key, 0, memoryview(buffer))
    return from_bytes(buffer, torch_dtype(tensor.spec.dtype), tensor.spec.shape)


class _ShardIndex:
    """Shards by their rows of `box_shape`.

    A tensor may have thousands, one per rank that saved it.
    """

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        row_ranges = sorted((*_row_span(shard.box), number) for number, shard in enumerate(shards))
        self._starts = [start for start, _, _ in row_ranges]
        self._numbers = [number for _, _, number in row_ranges]
        self._max_rows = max((stop - start for start, stop, _ in row_ranges), default=0)

    def candidates(self, block: Box) -> list[int]:
        """Return the numbers of all shards that may intersect the block."""
        start, stop = _row_span(block)
        return self._numbers[
            bisect_right(self._starts, start - self._max_rows) : bisect_left(self._starts, stop)
        ]


def _row_span(box: Box) -> tuple[int, int]:
    return (box.offsets[0], box.offsets[0] + box.shape[0]) if box.shape else (0, 1)

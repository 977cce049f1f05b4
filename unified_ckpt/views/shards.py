"""Tensors assembled from shards in other formats' files, as a Source. Shards are loaded when read.

How wrong bytes could be read: a shard is missing, two shards claim the same elements, a shard's
file changed, or a dtype differs. So every tensor is shown to be covered exactly once when it is
built, and every shard's shape and dtype are checked when it is loaded.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import add
from typing import Any

import torch

from unified_ckpt.core.nodes.coverage import coverage_gaps
from unified_ckpt.core.sharding.boxes import (
    Box,
    full_box,
    intersect,
    is_inside,
    range_to_boxes,
    relative_to,
)
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import Source, SourceMetadata, VerificationLog
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.runtime.storage.mapped_pages import PageReclaimer, copy_single_threaded
from unified_ckpt.runtime.storage.storage import Buffer
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, TORCH_DTYPES

CACHE_NBYTES = 256 << 20  # of shards that are expensive to load; a larger one is cached alone


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor. `load` returns its elements, in the box's shape and the tensor's dtype.

    `load` should return a view of a mapped file where it can. `file` is for messages. `cache` marks
    shards that are expensive to load (decompressed or cast); the latest ones are cached, in bounded
    memory.
    """

    box: Box
    load: Callable[[], torch.Tensor]
    file: str
    cache: bool = False


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor and its shards.

    `box_shape` is the shape that the shards' boxes refer to. It has the tensor's elements in the
    same order: the tensor's own shape, (numel,) for flat ranges, or one dim split in two.
    """

    spec: TensorSpec
    shards: Sequence[TensorShard]
    box_shape: tuple[int, ...]


def sharded_tensor(
    dtype: torch.dtype,
    shape: Sequence[int],
    shards: Sequence[TensorShard],
    *,
    box_shape: Sequence[int] | None = None,
) -> ShardedTensor:
    """Return a ShardedTensor whose shards cover every element exactly once.

    FormatError if a box lies outside, boxes overlap, or `box_shape` has another number of elements;
    IncompleteError for a gap.
    """
    if dtype not in DTYPE_NAMES:
        raise FormatError(f"got dtype {dtype}, expected one that safetensors can name")
    spec = TensorSpec(DTYPE_NAMES[dtype], tuple(shape))
    full_shape = tuple(shape if box_shape is None else box_shape)
    if prod(full_shape) != prod(spec.shape):
        raise FormatError(
            f"got shards of shape {full_shape}, expected the elements of shape {spec.shape}"
        )
    for shard in shards:
        if not is_inside(shard.box, full_shape):
            raise FormatError(
                f"{shard.file}: got box {shard.box.offsets} + {shard.box.shape}, expected a box "
                f"within shape {full_shape}"
            )
    gap = next(coverage_gaps(full_shape, [shard.box for shard in shards]), None)
    if gap is not None:
        raise IncompleteError(f"no shard has box {gap.offsets} + {gap.shape} of shape {full_shape}")
    if sum(shard.box.numel for shard in shards) != prod(full_shape):
        raise FormatError(
            f"shards overlap: got {sum(shard.box.numel for shard in shards)} elements, expected "
            f"{prod(full_shape)}"
        )
    return ShardedTensor(spec, tuple(shards), full_shape)


def shape_of_boxes(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the least shape that holds the boxes."""
    ends = [map(add, box.offsets, box.shape) for box in boxes]
    return tuple(map(max, zip(*ends, strict=True)))


def whole_tensor(tensor: torch.Tensor, file: str) -> ShardedTensor:
    """Return a tensor in memory, or in a mapped file, as a single shard."""
    return sharded_tensor(
        tensor.dtype,
        tensor.shape,
        [TensorShard(full_box(tuple(tensor.shape)), tensor.detach, file)],
    )


def _no_rank_extra(_: int) -> None:
    """Return None: the format stores nothing by rank."""


def _no_files() -> None:
    """Do nothing: no file is open."""


@dataclass(frozen=True, slots=True)
class SourceExtras:
    """What only some formats have.

    `refused`: parts that exist but cannot be read, and the reason, which their `names` raise.
    `rank_extra` returns the state that a rank saved for itself. `close` is called once.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    rank_extra: Callable[[int], Any] = _no_rank_extra
    close: Callable[[], object] = _no_files


class ShardedSource(Source):
    """A Source of sharded tensors, by part and name. Names are in the order of their files.

    `format` names the folder's format in messages. `tensors` serve a source that combines several.
    """

    def __init__(
        self,
        root: str,
        tensors: Mapping[Key, ShardedTensor],
        *,
        format: str,  # noqa: A002  # the name in the Source protocol
        metadata: SourceMetadata,
        aliases: Mapping[str, Mapping[str, str]] | None = None,
        extras: SourceExtras | None = None,
    ) -> None:
        self._root, self.tensors, self.format, self._metadata = root, tensors, format, metadata
        self._aliases, self._extras = aliases or {}, extras or SourceExtras()
        self._refused = self._extras.refused
        self.verification = VerificationLog()  # other formats have no digests
        self._assembler = ShardAssembler(tensors)
        self._names: dict[str, dict[str, None]] = {}
        for part, name in sorted(
            tensors, key=lambda key: [shard.file for shard in tensors[key].shards[:1]]
        ):
            self._names.setdefault(part, {})[name] = None

    @property
    def refused(self) -> Collection[str]:
        """Parts that exist but cannot be read."""
        return self._refused.keys()

    @property
    def parts(self) -> Sequence[str]:
        """Names of all parts, those that cannot be read included."""
        return sorted({*self._names, *self._refused})

    def names(self, part: str) -> Collection[str]:
        """Return the tensor names of a part. FormatError for a part that cannot be read."""
        if part in self._refused:
            raise FormatError(f"{self._root}: {part}: {self._refused[part]}")
        return self._names.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        """Return the names of tied tensors in a part, each with the stored name."""
        return self._aliases.get(part, {})

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of these tensors. NotFoundError for names that do not exist."""
        raise_if_any(
            NotFoundError,
            f"{self._root}: these tensors do not exist",
            [f"{part}:{name}" for name in names if (part, name) not in self.tensors],
        )
        return {name: self.tensors[part, name].spec for name in names}

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` with a tensor's bytes from byte `start`."""
        if key not in self.tensors:
            self.specs(key[0], [key[1]])  # raises
        self._assembler.read_into(key, start, buffer)

    def metadata(self) -> SourceMetadata:
        """Return everything beside tensors."""
        return self._metadata

    def rank_extra(self, rank: int) -> Any:
        """Return the state that this rank saved for itself."""
        return self._extras.rank_extra(rank)

    def close(self) -> None:
        """Drop cached shards and close the files."""
        self._assembler.clear()
        self._extras.close()


class ShardCache:
    """The shards loaded last, for readers on many threads. Only one thread loads at a time."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[int, tuple[TensorShard, torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        self.pages = PageReclaimer()

    def load(self, shard: TensorShard) -> torch.Tensor:
        """Return the shard's elements, from the cache if possible."""
        with self._lock:
            if id(shard) in self._loaded:
                self._loaded.move_to_end(id(shard))
            else:
                loaded = shard.load()
                self._loaded[id(shard)] = shard, loaded
                while (
                    len(self._loaded) > 1
                    and sum(tensor.nbytes for _, tensor in self._loaded.values()) > CACHE_NBYTES
                ):
                    self._loaded.popitem(last=False)
            return self._loaded[id(shard)][1]

    def clear(self) -> None:
        """Drop all shards."""
        with self._lock:
            self._loaded.clear()


class ShardAssembler:
    """Reads byte ranges of tensors that are assembled from shards."""

    def __init__(self, tensors: Mapping[Key, ShardedTensor]) -> None:
        self._tensors, self._cache = tensors, ShardCache()
        self._indexes: dict[Key, _ShardIndex] = {}  # of tensors read so far

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
        self._cache.clear()

    def _read_elements(self, key: Key, first: int, stop: int, view: memoryview) -> None:
        """Copy elements [first, stop) of a tensor, row-major, into `view`."""
        if first >= stop:
            return
        tensor = self._tensors[key]
        shard_index = self._indexes.get(key)
        if shard_index is None:
            shard_index = self._indexes[key] = _ShardIndex(tensor.shards)
        dtype = TORCH_DTYPES[tensor.spec.dtype]
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
                        self._cache.pages.mark_read(elements)

    def _load(self, shard: TensorShard, dtype: torch.dtype, key: Key) -> torch.Tensor:
        loaded = self._cache.load(shard) if shard.cache else shard.load()
        if tuple(loaded.shape) != shard.box.shape or loaded.dtype != dtype:
            raise FormatError(
                f"{shard.file}: got a shard of {':'.join(key)} with shape {tuple(loaded.shape)} "
                f"and {loaded.dtype}, expected {shard.box.shape} and {dtype}"
            )
        return loaded


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

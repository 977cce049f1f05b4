"""Tensors assembled from shards in other formats' files, as a Source. Shards are loaded when read.

How wrong bytes could be read: a shard is missing, two shards claim the same elements, a shard's
file changed, or a dtype differs. So every tensor is shown to be covered exactly once when it is
built, and every shard's shape and dtype are checked when it is loaded.

Imports without torch, which only `ShardAssembler` needs: names and shapes are read before tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import islice
from math import prod
from operator import add
from typing import TYPE_CHECKING, Any

from unified_ckpt.core.nodes.coverage import coverage_gaps
from unified_ckpt.core.sharding.boxes import Box, full_box, is_inside
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import ITEM_BITS
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import Source, SourceMetadata, VerificationLog
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.runtime.storage.storage import Buffer
from unified_ckpt.runtime.torch_state.names import safetensors_dtype

if TYPE_CHECKING:
    import torch


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

    `box_shape` is the shape that the shards' boxes refer to: the tensor's own, or (numel,) for flat
    ranges.
    """

    spec: TensorSpec
    shards: Sequence[TensorShard]
    box_shape: tuple[int, ...]


def sharded_tensor(
    dtype: torch.dtype | str, shape: Sequence[int], shards: Sequence[TensorShard]
) -> ShardedTensor:
    """Return a ShardedTensor whose shards cover every element exactly once.

    `dtype`: of torch, or its name in safetensors. FormatError if a box lies outside or boxes
    overlap, IncompleteError for a gap.
    """
    dtype_name = safetensors_dtype(dtype)
    if dtype_name not in ITEM_BITS:
        raise FormatError(f"got dtype {dtype}, expected one that safetensors can name")
    full_shape = tuple(shape)
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
    return ShardedTensor(TensorSpec(dtype_name, full_shape), tuple(shards), full_shape)


def shape_of_boxes(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the least shape that holds the boxes."""
    ends = [map(add, box.offsets, box.shape) for box in boxes]
    return tuple(map(max, zip(*ends, strict=True)))


def single_shard(
    dtype: torch.dtype | str, shape: Sequence[int], load: Callable[[], torch.Tensor], file: str
) -> ShardedTensor:
    """Return a tensor that `load` returns whole."""
    return sharded_tensor(dtype, shape, [TensorShard(full_box(tuple(shape)), load, file)])


def whole_tensor(tensor: torch.Tensor, file: str) -> ShardedTensor:
    """Return a tensor in memory, or in a mapped file."""
    return single_shard(tensor.dtype, tensor.shape, tensor.detach, file)


@dataclass(frozen=True, slots=True)
class SourceExtras:
    """What only some formats have.

    `refused`: parts that exist but cannot be read, and the reason, which their `names` raise.
    `rank_extra` returns the state that a rank saved for itself. `close` is called once.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    rank_extra: Callable[[int], Any] = lambda _: None
    close: Callable[[], object] = lambda: None


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
        self._names: dict[str, dict[str, None]] = {}
        for part, name in sorted(
            tensors, key=lambda key: [shard.file for shard in islice(tensors[key].shards, 1)]
        ):
            self._names.setdefault(part, {})[name] = None

    @cached_property
    def _assembler(self) -> Any:
        module = import_module("unified_ckpt.views.shard_assembler")  # only now: it imports torch
        return module.ShardAssembler(self.tensors)

    @property
    def refused(self) -> Collection[str]:
        """Parts that exist but cannot be read."""
        return self._refused.keys()

    @property
    def parts(self) -> Sequence[str]:
        """Names of all parts, those that cannot be read included."""
        has_optimizer = self._metadata.groups or self._metadata.scalars  # also one without state
        return sorted({*self._names, *self._refused, *([OPTIMIZER] if has_optimizer else [])})

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
        if "_assembler" in self.__dict__:
            self._assembler.clear()
        self._extras.close()

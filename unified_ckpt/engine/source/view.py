"""The result of `uc.open`: a lazy view of a Source as torch tensors. Needs no process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from operator import index as as_int
from types import EllipsisType, TracebackType
from typing import Any, SupportsIndex

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.engine.source.protocol import Source, SourceMetadata, read_box
from unified_ckpt.errors import NotFoundError
from unified_ckpt.runtime.torch_state.tensors import from_bytes, torch_dtype

Index = SupportsIndex | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class TensorView:
    """A stored tensor. Indexing reads the selected elements into new CPU memory.

    Indices are ints, slices with step 1 and an ellipsis. Raises IntegrityError if a 1 MiB block
    that was read completely does not match its digest; a smaller tensor is one block.
    """

    _source: Source
    part: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        indices = index if isinstance(index, tuple) else (index,)
        ellipses = [i for i, item in enumerate(indices) if item is Ellipsis]
        if ellipses:
            position = ellipses[0]
            missing = [slice(None)] * (len(self.shape) - len(indices) + 1)
            indices = (*indices[:position], *missing, *indices[position + 1 :])
        if len(indices) > len(self.shape):
            raise IndexError(
                f"{self.part}:{self.name}: {len(indices)} indices for {len(self.shape)} dims"
            )
        indices = (*indices, *[slice(None)] * (len(self.shape) - len(indices)))
        ranges = [
            _index_range(item, size, f"{self.part}:{self.name}")
            for item, size in zip(indices, self.shape, strict=True)
        ]
        box = Box(tuple(low for low, *_ in ranges), tuple(high - low for low, high, _ in ranges))
        body = read_box(self._source, (self.part, self.name), box)
        return from_bytes(
            body, self.dtype, [high - low for low, high, keepdim in ranges if keepdim]
        )


def _index_range(index: Any, size: int, label: str) -> tuple[int, int, bool]:
    """Return the half-open range of one dim, and whether the dim is kept."""
    if isinstance(index, slice):
        low, high, step = index.indices(size)
        if step != 1:
            raise IndexError(f"{label}: got slice step {step}, expected 1")
        return low, max(low, high), True
    try:
        if isinstance(index, (bool, torch.Tensor)):
            raise TypeError("torch takes it for a mask, or may")
        position = as_int(index)
    except TypeError:
        text = f"{label}: got index {index!r}, expected an int, a slice or an ellipsis"
        raise IndexError(text) from None
    if not -size <= position < size:
        raise IndexError(f"{label}: index {position} is out of range for a dim of size {size}")
    return position % size, position % size + 1, False


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of known dtype and shape that `load` reads on demand. For a `conversion_fn`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PartView(Mapping[str, TensorView]):
    """The tensors of a part by name. Aliases of tied tensors are accepted but not listed."""

    _source: Source
    part: str

    def __getitem__(self, name: str) -> TensorView:
        names = self._source.names(self.part)
        stored_name = name if name in names else self._source.aliases(self.part).get(name)
        if stored_name is None or stored_name not in names:
            raise KeyError(f"{self.part}:{name}")
        spec = self._source.specs(self.part, [stored_name])[stored_name]
        return TensorView(self._source, self.part, stored_name, spec.shape, torch_dtype(spec.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._source.names(self.part)))

    def __len__(self) -> int:
        return len(self._source.names(self.part))


@dataclass(frozen=True, slots=True)
class RankExtras(Sequence[Any]):
    """The `rank_extra` of each saving rank, read on access."""

    _source: Source
    _count: int

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(self._count))]
        if not -self._count <= rank < self._count:
            raise IndexError(f"rank_extra[{rank}]: the checkpoint has {self._count} entries")
        return self._entry(rank % self._count)

    def _entry(self, rank: int) -> Any:
        return self._source.rank_extra(rank)

    def __len__(self) -> int:
        return self._count


class SourceView(AbstractContextManager["SourceView"]):
    """An open checkpoint: `src["model"]["lm_head.weight"][0:1024]`.

    A context manager. Reading after `close` is an error.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, part: str) -> PartView:
        if part not in self._source.parts:
            raise NotFoundError(
                f"part {part!r}: does not exist, expected one of {', '.join(self._source.parts)}"
            )
        return PartView(self._source, part)

    def __contains__(self, part: object) -> bool:
        return part in self._source.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.parts)

    @property
    def source(self) -> Source:
        """The Source behind this view, without torch."""
        return self._source

    @property
    def format(self) -> str:
        """The name of the format, such as "unified"."""
        return self._source.format

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the stored parts."""
        return tuple(self._source.parts)

    @property
    def step(self) -> int | None:
        """The training step of the save, or None."""
        return self._metadata.step

    @property
    def extra(self) -> Any:
        """The `extra` given at the save."""
        return self._metadata.extra

    @property
    def rank_extra(self) -> RankExtras:
        """The `rank_extra` of each saving rank."""
        return RankExtras(self._source, self._metadata.rank_extras)

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    @cached_property
    def _metadata(self) -> SourceMetadata:
        return self._source.metadata()

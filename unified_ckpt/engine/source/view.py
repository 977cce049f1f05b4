"""What `uc.open` gives: a source seen through torch, lazily. No process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType, TracebackType
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import NotFoundError
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

Index = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class TensorView:
    """A stored tensor. Indexing reads what is asked for, into new CPU memory: ints, slices of step
    1, an ellipsis.

    IntegrityError where a 1 MiB block that lies whole in what is read has not its digest; a tensor
    of less is one block.
    """

    _source: Source
    part: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        indices = index if isinstance(index, tuple) else (index,)
        if Ellipsis in indices:
            ellipsis = indices.index(Ellipsis)
            indices = (
                *indices[:ellipsis],
                *[slice(None)] * (len(self.shape) - len(indices) + 1),
                *indices[ellipsis + 1 :],
            )
        if len(indices) > len(self.shape):
            raise IndexError(
                f"{self.part}:{self.name}: {len(indices)} indices for {len(self.shape)} dims"
            )
        offsets, sizes, out_shape = [], [], []
        for item, size in zip(
            (*indices, *[slice(None)] * (len(self.shape) - len(indices))), self.shape, strict=True
        ):
            low, high, keeps_dim = _index_range(item, size, f"{self.part}:{self.name}")
            offsets.append(low)
            sizes.append(high - low)
            out_shape.extend([high - low] if keeps_dim else [])
        body = self._source.read(self.part, self.name, Box(tuple(offsets), tuple(sizes)))
        if not body:
            return torch.empty(out_shape, dtype=self.dtype, device="cpu")
        return (
            torch.frombuffer(bytearray(body), dtype=torch.uint8).view(self.dtype).reshape(out_shape)
        )


def _index_range(index: object, size: int, label: str) -> tuple[int, int, bool]:
    """Half-open range in one dim, and whether the dim stays."""
    if isinstance(index, int):
        if not -size <= index < size:
            raise IndexError(f"{label}: index {index} is out of range for a dim of {size}")
        return index % size, index % size + 1, False
    if isinstance(index, slice):
        low, high, step = index.indices(size)
        if step != 1:
            raise IndexError(f"{label}: slice step {step}; needed 1")
        return low, max(low, high), True
    raise IndexError(f"{label}: index {index!r}; needed an int, a slice or an ellipsis")


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is not there yet: `load` gives it, of this dtype and shape, whenever it is
    read. For a `conversion_fn`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PartView(Mapping[str, TensorView]):
    """The tensors of a part, by name; other names of tied tensors work too, and are not listed."""

    _source: Source
    part: str

    def __getitem__(self, name: str) -> TensorView:
        stored_name = (
            name
            if name in self._source.names(self.part)
            else self._source.aliases(self.part).get(name, name)
        )
        if stored_name not in self._source.names(self.part):
            raise KeyError(f"{self.part}:{name}")
        spec = self._source.specs(self.part, [stored_name])[stored_name]
        return TensorView(
            self._source, self.part, stored_name, spec.shape, TORCH_DTYPES[spec.dtype]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._source.names(self.part)))

    def __len__(self) -> int:
        return len(self._source.names(self.part))


@dataclass(frozen=True, slots=True)
class RankExtras(Sequence[Any]):
    """What each rank of the save left, read when asked for."""

    _source: Source
    _count: int

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(self._count))]
        if not -self._count <= rank < self._count:
            raise IndexError(f"rank_extra[{rank}]: the checkpoint has {self._count} entries")
        return self._source.rank_extra(rank % self._count)

    def __len__(self) -> int:
        return self._count


class SourceView:
    """An open checkpoint: `src["model"]["lm_head.weight"][0:1024]`. A context manager; reading
    after `close` is an error.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._metadata: SourceMetadata | None = None

    def __enter__(self) -> SourceView:
        return self

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
                f"part {part!r}: the checkpoint has {', '.join(self._source.parts)}"
            )
        return PartView(self._source, part)

    @property
    def source(self) -> Source:
        """What it is a view of, without torch."""
        return self._source

    @property
    def format(self) -> str:
        return self._source.format

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._source.parts)

    @property
    def step(self) -> int | None:
        return self._cached_metadata().step

    @property
    def extra(self) -> Any:
        return self._cached_metadata().extra

    @property
    def rank_extra(self) -> RankExtras:
        return RankExtras(self._source, self._cached_metadata().rank_extras)

    def close(self) -> None:
        self._source.close()

    def _cached_metadata(self) -> SourceMetadata:
        if self._metadata is None:
            self._metadata = self._source.metadata()
        return self._metadata

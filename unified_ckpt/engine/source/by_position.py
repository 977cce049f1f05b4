"""A source whose optimizer state is by position, as `torch.optim.Optimizer.state_dict` has it: of
which parameter, the optimizer to be filled says, or the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Catalog, Source, SourceMetadata
from unified_ckpt.errors import FormatError

_OPTIMIZER = "optimizer"
Order = Sequence[
    Sequence[tuple[str, tuple[int, ...]]]
]  # of each param group: its parameters' names and global shapes


class IndexedOptimizerSource:
    """`bare`: the source without its optimizer. `named`: all of it, for an optimizer in this order,
    None where there is none that says; FormatError where that leaves a doubt. What needs no
    optimizer never asks.
    """

    def __init__(self, base: Source, with_order: Callable[[Order | None], Source]) -> None:
        self._base, self._with_order = base, with_order

    def without_optimizer(self) -> Source:
        return self._base

    def with_order(self, order: Order) -> Source:
        return self._with_order(order)

    @cached_property
    def with_stored_order(self) -> Source:
        """With the names that the checkpoint itself gives."""
        return self._with_order(None)

    @property
    def format(self) -> str:
        return self._base.format

    @property
    def parts(self) -> Sequence[str]:
        return sorted({*self._base.parts, _OPTIMIZER})

    def names(self, part: str) -> Collection[str]:
        return self._source_of(part).names(part)

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._base.aliases(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        return self._source_of(part).specs(part, names)

    def read(self, part: str, name: str, box: Box) -> bytes:
        return self._source_of(part).read(part, name, box)

    def catalog(self, keys: Collection[tuple[str, str]]) -> Catalog:
        return (
            self.with_stored_order if any(part == _OPTIMIZER for part, _ in keys) else self._base
        ).catalog(keys)

    def block_digests(
        self, keys: Collection[tuple[str, str]]
    ) -> Mapping[tuple[str, str], Sequence[int] | None]:
        return dict.fromkeys(keys)

    def metadata(self) -> SourceMetadata:
        """Without param groups where nothing says of which parameters they are: who asks for the
        optimizer is told.
        """
        try:
            return self.with_stored_order.metadata()
        except FormatError:
            return self._base.metadata()

    def rank_extra(self, rank: int) -> Any:
        return self._base.rank_extra(rank)

    def close(self) -> None:
        self._base.close()

    def _source_of(self, part: str) -> Source:
        return self.with_stored_order if part == _OPTIMIZER else self._base

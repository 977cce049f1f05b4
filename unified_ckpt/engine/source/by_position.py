"""A source whose optimizer state is by position, as `torch.optim.Optimizer.state_dict` has it: of which parameter, the optimizer to be
filled says, or the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Catalog, Said, Source
from unified_ckpt.errors import FormatError

_OPTIMIZER = "optimizer"
Order = Sequence[
    Sequence[tuple[str, tuple[int, ...]]]
]  # of each param group: its parameters' names and global shapes


class ByPosition:
    """`bare`: the source without its optimizer. `named`: all of it, for an optimizer in this order, None where there is none that says;
    FormatError where that leaves a doubt. What needs no optimizer never asks.
    """

    def __init__(self, bare: Source, named: Callable[[Order | None], Source]) -> None:
        self._bare, self._named = bare, named

    def without_optimizer(self) -> Source:
        return self._bare

    def named_for(self, order: Order) -> Source:
        return self._named(order)

    @cached_property
    def whole(self) -> Source:
        """With the names that the checkpoint itself gives."""
        return self._named(None)

    @property
    def format(self) -> str:
        return self._bare.format

    @property
    def parts(self) -> Sequence[str]:
        return sorted({*self._bare.parts, _OPTIMIZER})

    def names(self, part: str) -> Collection[str]:
        return self._of(part).names(part)

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._bare.aliases(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        return self._of(part).specs(part, names)

    def read(self, part: str, name: str, box: Box) -> bytes:
        return self._of(part).read(part, name, box)

    def catalog(self, wanted: Collection[tuple[str, str]]) -> Catalog:
        return (
            self.whole if any(part == _OPTIMIZER for part, _ in wanted) else self._bare
        ).catalog(wanted)

    def block_digests(
        self, wanted: Collection[tuple[str, str]]
    ) -> Mapping[tuple[str, str], Sequence[int] | None]:
        return dict.fromkeys(wanted)

    def said(self) -> Said:
        """Without param groups where nothing says of which parameters they are: who asks for the optimizer is told."""
        try:
            return self.whole.said()
        except FormatError:
            return self._bare.said()

    def rank_extra(self, rank: int) -> Any:
        return self._bare.rank_extra(rank)

    def close(self) -> None:
        self._bare.close()

    def _of(self, part: str) -> Source:
        return self.whole if part == _OPTIMIZER else self._bare

"""A Source whose optimizer state is stored by index, as `Optimizer.state_dict()` has it.

The parameter names come from the optimizer to be loaded, or from the checkpoint itself.
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
# Of each param group, the name and global shape of each parameter.
Order = Sequence[Sequence[tuple[str, tuple[int, ...]]]]


class IndexedOptimizerSource:
    """A Source that resolves the names of optimizer state only when they are needed.

    `base`: the Source without its optimizer. `with_order`: returns the complete Source for an
    optimizer in this order, or in the stored order for None; FormatError if that is ambiguous.
    """

    def __init__(self, base: Source, with_order: Callable[[Order | None], Source]) -> None:
        self._base, self._with_order = base, with_order

    def without_optimizer(self) -> Source:
        """Return the Source without its optimizer state."""
        return self._base

    def with_order(self, order: Order) -> Source:
        """Return the Source with optimizer state named in this order."""
        return self._with_order(order)

    @cached_property
    def with_stored_order(self) -> Source:
        """The Source with the names that the checkpoint itself gives."""
        return self._with_order(None)

    @property
    def format(self) -> str:
        """The name of the format."""
        return self._base.format

    @property
    def parts(self) -> Sequence[str]:
        """The stored parts, always with "optimizer"."""
        return sorted({*self._base.parts, _OPTIMIZER})

    def names(self, part: str) -> Collection[str]:
        """Return the stored tensors of a part."""
        return self._source_of(part).names(part)

    def aliases(self, part: str) -> Mapping[str, str]:
        """Return other names of tied tensors."""
        return self._base.aliases(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of some tensors."""
        return self._source_of(part).specs(part, names)

    def read(self, part: str, name: str, box: Box) -> bytes:
        """Return a box of a tensor, as row-major bytes."""
        return self._source_of(part).read(part, name, box)

    def catalog(self, keys: Collection[tuple[str, str]]) -> Catalog:
        """Return where some tensors lie."""
        has_optimizer = any(part == _OPTIMIZER for part, _ in keys)
        return (self.with_stored_order if has_optimizer else self._base).catalog(keys)

    def block_digests(
        self, keys: Collection[tuple[str, str]]
    ) -> Mapping[tuple[str, str], Sequence[int] | None]:
        """Return None for each tensor: such formats have no digests."""
        return dict.fromkeys(keys)

    def metadata(self) -> SourceMetadata:
        """Return the metadata, without param groups if their parameters are unknown."""
        try:
            return self.with_stored_order.metadata()
        except FormatError:
            return self._base.metadata()

    def rank_extra(self, rank: int) -> Any:
        """Return the `rank_extra` of a saving rank."""
        return self._base.rank_extra(rank)

    def close(self) -> None:
        """Close the files."""
        self._base.close()

    def _source_of(self, part: str) -> Source:
        return self.with_stored_order if part == _OPTIMIZER else self._base

"""A Source of tensors in shards. Imports torch only when a tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import Source, SourceMetadata, VerificationLog
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.views.shards import ShardedTensor

if TYPE_CHECKING:
    from unified_ckpt.views.shard_assembler import ShardAssembler


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
    def _assembler(self) -> ShardAssembler:
        from unified_ckpt.views.shard_assembler import ShardAssembler  # imports torch

        return ShardAssembler(self.tensors)

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

"""Source: reads slices of named tensors of any format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from unified_ckpt.core.keywords import check_step
from unified_ckpt.core.sharding.boxes import Box, full_box, runs
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.rank_mesh import RankMesh
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.value_paths import RankValues
from unified_ckpt.errors import FormatError
from unified_ckpt.format.codec import Path
from unified_ckpt.format.manifest_fields import EncodingRecord, ShardingRecords
from unified_ckpt.format.names import OPTIMIZER, WITHOUT_MASTERS
from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.storage.protocol import Buffer, Reader, ReadRange


class Location(NamedTuple):
    """Where a tensor's row-major bytes start: byte `start` of a file."""

    file: str
    start: int


@dataclass(frozen=True, slots=True)
class Locations:
    """Tensors that lie plainly in files of `storage`, for callers that read the files themselves.

    Whoever reads there also verifies: compare with `Source.block_digests`. Tensors without an entry
    are read with `Source.read_into`.
    """

    storage: Reader
    by_key: Mapping[Key, Location]


@dataclass(slots=True)
class ReadPolicy:
    """How the stored bytes of a Source are read; given when it is opened.

    `verify`: "read" verifies each 1 MiB block that one read covers, "full" each block that it
    touches. `share_reads`: whether nodes that see one folder read it for each other. A load sets
    `redundancy`, the bytes that its nodes need per distinct byte, before the first read. `traffic`
    counts what is read from other nodes.
    """

    verify: Literal["full", "read", "off"] = "read"
    share_reads: Literal["auto", "always", "never"] = "never"
    redundancy: float = 1.0
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(slots=True)
class VerificationLog:
    """What a Source verified while it was read.

    `verified_nbytes`: in blocks that matched their digests. `damage`: one sentence for each damaged
    or missing thing that was read from another copy, or is lost.
    """

    verified_nbytes: int = 0
    damage: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SourceMetadata:
    """Everything a Source holds besides tensors.

    `groups`: param groups as {"names", "options"}; `scalars`: optimizer state that is not a tensor,
    by fqn; `modules`: the extra state of modules, by name; `stores_modules`: whether a module
    without an entry had none, False if the format may lack it; `rank_extras`: how many ranks stored
    one; `rank_mesh`: the mesh of these ranks, if one is known; `shardings`: how they held stored
    tensors, if that is known; `rank_values`: values that differed between ranks, of which the other
    fields have those of the lowest rank; `has_digests`: whether the tensors have digests;
    `objects`: paths of stored object states, such as "extra:scheduler"; `paddable_dims`: of tensors
    that may fill larger targets, the dims that may be larger; `left_out`: names of what the
    checkpoint has and the Source does not, with `*` for numbers.
    """

    save_id: str | None = None
    step: int | None = None
    extra: Any = None
    modules: Mapping[str, Any] = field(default_factory=dict)
    stores_modules: bool = False
    groups: Sequence[Mapping[str, Any]] = ()
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rank_extras: int = 0
    rank_values: RankValues | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    has_digests: bool = False
    omitted_parts: Sequence[str] = ()
    paddable_dims: Mapping[Key, Sequence[int]] = field(default_factory=dict)
    objects: Sequence[str] = ()
    left_out: Sequence[str] = ()
    rank_mesh: RankMesh | None = None
    shardings: ShardingRecords | None = None

    def __post_init__(self) -> None:
        """Raise FormatError for a step that a manifest cannot store."""
        if self.step is not None:
            check_step(self.step)


KeyRange = tuple[Key, int, int]  # bytes [start, stop) of a tensor
# Of each param group, the name and global shape of each parameter.
Order = Sequence[Sequence[tuple[str, tuple[int, ...]]]]


class Source(ABC):
    """Named tensors by part: the only way stored bytes are read.

    Every format and every view is one, and tests/foreign/conformance.py checks it. A byte range of
    a tensor, not a box, is the unit of reading: digests, chunks and codecs divide row-major bytes,
    and a box is a few such ranges (`read_box`).

    `verification`: what was verified so far; a view has that of the Source it reads. `format`: its
    name, for messages. `is_node_folder`: other folders have more tensors of its parts.
    """

    verification: VerificationLog
    format: str
    is_node_folder: bool = False

    @property
    @abstractmethod
    def parts(self) -> Sequence[str]:
        """The names of the stored parts."""

    @property
    def indexed(self) -> IndexedOptimizerSource | None:
        """This Source if its optimizer state has indices in place of names, else None."""
        return None

    @abstractmethod
    def names(self, part: str) -> Collection[str]:
        """Return the names of a part's stored tensors, in an order that is cheap to read."""

    @abstractmethod
    def aliases(self, part: str) -> Mapping[str, str]:
        """Return other names of tied tensors -> stored names."""

    @abstractmethod
    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of some tensors.

        Raises IncompleteError or IntegrityError if their bytes are missing.
        """

    def all_specs(self) -> dict[Key, TensorSpec]:
        """Return dtype and shape of every tensor."""
        return {
            (part, name): spec
            for part in self.parts
            for name, spec in self.specs(part, self.names(part)).items()
        }

    @abstractmethod
    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` with a tensor's row-major bytes, from byte `start`.

        The Source that holds the stored bytes verifies them; IntegrityError if they are damaged.
        """

    def locations(self, keys: Collection[Key]) -> Locations | None:  # noqa: ARG002
        """Return where tensors lie plainly in files, None if none do. Same errors as `specs`."""
        return None

    def file_ranges(self, reads: Iterable[KeyRange]) -> Iterator[ReadRange]:
        """Yield what these reads, in this order, read of files, where known."""
        for key, start, stop in reads:
            locations = self.locations([key])
            if locations is not None and key in locations.by_key:
                file, first = locations.by_key[key]
                yield ReadRange(file, first + start, first + stop)

    def encodings(self) -> Mapping[str, Mapping[str, EncodingRecord]]:
        """Return how some tensors are encoded, by part and state. `DecodedSource` decodes them."""
        return {}

    def outliers(self, part: str) -> bytes | None:  # noqa: ARG002
        """Return the content of the outliers file of an encoded part, if it has one."""
        return None

    def check_values(  # noqa: B027  # most Sources have nothing to check
        self, parts: Collection[str], *, share: int, shares: int
    ) -> None:
        """Check in advance what reading these parts would refuse; one of `shares` shares of it."""

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return the CRC64NVME of each 1 MiB block of a tensor, or None if it has no digests.

        Raises FormatError for digests of an unknown kind.
        """
        return dict.fromkeys(keys)

    def keys_with_digests(self, keys: Collection[Key]) -> set[Key]:
        """Return the tensors whose stored bytes all have digests, encoded or not."""
        return {key for key, crcs in self.block_digests(keys).items() if crcs is not None}

    @abstractmethod
    def metadata(self) -> SourceMetadata:
        """Return what is stored besides tensors. IntegrityError or FormatError if it is damaged."""

    @abstractmethod
    def rank_extra(self, rank: int) -> Any:
        """Return the `rank_extra` of saving rank `rank`, or None."""

    def rank_values(self, entry: int) -> Sequence[tuple[Path, Any]]:  # noqa: ARG002
        """Return (path, value) of an entry of `SourceMetadata.rank_values`."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


class WrappedSource(Source):
    """A Source that has the state beside tensors, and the files, of another one.

    `metadata` replaces that of the other one if names in it change. `new_paths` then returns the
    new paths of a value that differed between ranks.
    """

    # Whether the model has the stored names, by whose order `SourceMetadata.shardings` goes.
    _keeps_names: ClassVar[bool] = False

    def __init__(
        self,
        source: Source,
        metadata: SourceMetadata | None = None,
        new_paths: Callable[[Path], Sequence[Path]] = lambda path: [path],
    ) -> None:
        self._source, self._metadata, self._new_paths = source, metadata, new_paths
        self.format, self.verification = source.format, source.verification

    @property
    def parts(self) -> Sequence[str]:
        """The parts of the wrapped source."""
        return self._source.parts

    def aliases(self, part: str) -> Mapping[str, str]:
        """Return other names of tied tensors."""
        return self._source.aliases(part)

    def check_values(self, parts: Collection[str], *, share: int, shares: int) -> None:
        """Check what is read of the wrapped source."""
        self._source.check_values(parts, share=share, shares=shares)

    def metadata(self) -> SourceMetadata:
        """Return everything besides tensors; nothing of an optimizer that is left out."""
        metadata, parts = self._metadata or self._source.metadata(), self.parts
        omitted_parts = {*metadata.omitted_parts, *self._source.parts} - {*parts, WITHOUT_MASTERS}
        if OPTIMIZER not in parts:
            metadata = replace(metadata, groups=(), scalars={})
        shardings = metadata.shardings if self._keeps_names else None
        return replace(metadata, omitted_parts=sorted(omitted_parts), shardings=shardings)

    def rank_extra(self, rank: int) -> Any:
        """Return the `rank_extra` of a saving rank."""
        return self._source.rank_extra(rank)

    def rank_values(self, entry: int) -> Sequence[tuple[Path, Any]]:
        """Return the values of an entry that differed between ranks."""
        return [
            (new_path, value)
            for path, value in self._source.rank_values(entry)
            for new_path in self._new_paths(path)
        ]

    def close(self) -> None:
        """Close the wrapped source."""
        self._source.close()


class IndexedOptimizerSource(WrappedSource):
    """A Source whose optimizer state is stored by index, as `Optimizer.state_dict()` has it.

    The parameter names come from the optimizer to be loaded, or from the checkpoint itself. They
    are resolved only when they are needed.

    `base`: the Source without its optimizer. `with_order`: returns the complete Source for an
    optimizer in this order, or in the stored order for None; FormatError if that is ambiguous.
    `by_index`: returns the complete Source with the parameters named 0, 1, ..., which needs no
    order; None if the names are known.
    """

    def __init__(
        self,
        base: Source,
        with_order: Callable[[Order | None], Source],
        *,
        by_index: Callable[[], Source] | None = None,
    ) -> None:
        super().__init__(base)
        self.without_optimizer, self.with_order = base, with_order
        self.by_index = by_index

    @property
    def indexed(self) -> IndexedOptimizerSource:
        """This Source."""
        return self

    @cached_property
    def with_stored_order(self) -> Source:
        """The Source with the names that the checkpoint itself gives."""
        return self.with_order(None)

    @property
    def parts(self) -> Sequence[str]:
        """The stored parts, always with "optimizer"."""
        return sorted({*self._source.parts, OPTIMIZER})

    def names(self, part: str) -> Collection[str]:
        """Return the stored tensors of a part."""
        return self._source_of(part).names(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of some tensors."""
        return self._source_of(part).specs(part, names)

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` with a tensor's bytes from byte `start`."""
        self._source_of(key[0]).read_into(key, start, buffer)

    def locations(self, keys: Collection[Key]) -> Locations | None:
        """Return where some tensors lie plainly in files."""
        has_optimizer = any(part == OPTIMIZER for part, _ in keys)
        return self._source_of(OPTIMIZER if has_optimizer else "").locations(keys)

    def metadata(self) -> SourceMetadata:
        """Return the metadata, without param groups if their parameters are unknown."""
        try:
            return self.with_stored_order.metadata()
        except FormatError:
            return self._source.metadata()

    def _source_of(self, part: str) -> Source:
        return self.with_stored_order if part == OPTIMIZER else self._source


def with_indexes(source: Source) -> Source:
    """Return a Source with indexes for parameters whose names would take building the model."""
    indexed = source.indexed
    return source if indexed is None or indexed.by_index is None else indexed.by_index()


def read_chunks(
    source: Source, key: Key, nbytes: int, *, chunk_nbytes: int
) -> Iterator[memoryview]:
    """Yield the row-major bytes of a tensor of `nbytes` in order, each chunk in new memory."""
    for start in range(0, nbytes, chunk_nbytes):
        chunk = memoryview(bytearray(min(chunk_nbytes, nbytes - start)))
        source.read_into(key, start, chunk)
        yield chunk


def read_box(source: Source, key: Key, box: Box) -> bytearray:
    """Return a box of a tensor, as row-major bytes."""
    spec = source.specs(key[0], [key[1]])[key[1]]
    item_nbytes = itemsize(spec.dtype)
    body = bytearray(box.numel * item_nbytes)
    view = memoryview(body)
    box_runs = list(runs(box, spec.shape, local=full_box(box.shape), local_shape=box.shape))
    locations = source.locations([key]) if len(box_runs) > 1 else None
    if locations is not None:
        locations.storage.expect(
            source.file_ranges(
                (key, first * item_nbytes, (first + count) * item_nbytes)
                for first, _, count in box_runs
            )
        )
    for first, local, count in box_runs:
        source.read_into(
            key, first * item_nbytes, view[local * item_nbytes : (local + count) * item_nbytes]
        )
    return body

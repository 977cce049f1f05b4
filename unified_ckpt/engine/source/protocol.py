"""Source: the protocol for reading slices of named tensors from any format. Knows no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unified_ckpt.core.sharding.boxes import Box, full_box, runs
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.runtime.storage.storage import Reader


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor's row-major bytes start: byte `start` of a file."""

    file: str
    start: int


@dataclass(slots=True)
class VerificationLog:
    """The results of a storage that verifies blocks while reading.

    `damage`: one sentence for each damaged block that was read from elsewhere.
    """

    verified_nbytes: int = 0
    damage: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Byte ranges of tensors that are contiguous in files, and the `storage` that reads them.

    `verification_log`: set if the storage verifies digests itself. `locality`: tensors with the
    same value are cheaper to read consecutively.
    """

    storage: Reader
    locations: Mapping[tuple[str, str], Location]  # (part, fqn)
    verification_log: VerificationLog | None = None
    locality: Mapping[tuple[str, str], str] | None = None


def read_box(storage: Reader, location: Location, spec: TensorSpec, box: Box) -> bytes:
    """Return a box of a contiguous tensor, as row-major bytes."""
    buffer = bytearray(box.numel * itemsize(spec.dtype))
    read_box_into(storage, location, spec, box, memoryview(buffer))
    return bytes(buffer)


def read_box_into(
    storage: Reader, location: Location, spec: TensorSpec, box: Box, buffer: memoryview
) -> None:
    """Read a box of a contiguous tensor into a buffer of the box's size."""
    item_nbytes = itemsize(spec.dtype)
    for first, local, count in runs(
        box, spec.shape, local=full_box(box.shape), local_shape=box.shape
    ):
        storage.read_at(
            location.file,
            location.start + first * item_nbytes,
            buffer[local * item_nbytes : (local + count) * item_nbytes],
        )


@dataclass(frozen=True, slots=True)
class SourceMetadata:
    """Everything a Source holds besides tensors.

    `groups`: param groups as {"names", "options"}; `scalars`: optimizer state that is not a
    tensor, by fqn; `rank_extras`: how many ranks stored one; `has_digests`: whether the tensors
    have digests; `objects`: paths of stored object states, such as "extra:scheduler";
    `pads`: tensors that may fill larger targets -> the dims that may be larger.
    """

    save_id: str | None = None
    step: int | None = None
    extra: Any = None
    modules: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rank_extras: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    has_digests: bool = False
    omitted_parts: Sequence[str] = ()
    pads: Mapping[tuple[str, str], Sequence[int]] = field(default_factory=dict)  # by (part, name)
    objects: Sequence[str] = ()


class Source(Protocol):
    """Named tensors by part. Every format and every view implements this."""

    @property
    def format(self) -> str:
        """The name of the format, for messages."""

    @property
    def parts(self) -> Sequence[str]:
        """The names of the stored parts."""

    def names(self, part: str) -> Collection[str]:
        """Return the names of a part's stored tensors."""

    def aliases(self, part: str) -> Mapping[str, str]:
        """Return other names of tied tensors -> stored names."""

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of some tensors.

        Raises IncompleteError or IntegrityError if their bytes are missing.
        """

    def read(self, part: str, name: str, box: Box) -> bytes:
        """Return a box of a tensor, as row-major bytes."""

    def catalog(self, keys: Collection[tuple[str, str]]) -> Catalog:
        """Return where some tensors lie. Raises the same errors as `specs`."""

    def block_digests(
        self, keys: Collection[tuple[str, str]]
    ) -> Mapping[tuple[str, str], Sequence[int] | None]:
        """Return the CRC64NVME of each 1 MiB block, by (part, name); None if there are no digests.

        Raises FormatError for digests of an unknown kind.
        """

    def metadata(self) -> SourceMetadata:
        """Return what is stored besides tensors. IntegrityError or FormatError if it is damaged."""

    def rank_extra(self, rank: int) -> Any:
        """Return the `rank_extra` of saving rank `rank`, or None."""

    def close(self) -> None:
        """Close the files."""

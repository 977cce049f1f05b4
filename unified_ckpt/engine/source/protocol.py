"""Source: the one protocol for reading. Anything that slices of named tensors can be read from; no
torch.
"""

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
    """A tensor's row-major bytes: from byte `start` of a file."""

    file: str
    start: int


@dataclass(slots=True)
class VerificationLog:
    """Of a storage that compares digests: bytes of blocks that were right, and what was wrong and
    read from elsewhere, in sentences.
    """

    verified_nbytes: int = 0
    damage: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Byte ranges of tensors, for sources whose tensors lie whole in files. `storage` reads them.
    `verification_log`: where it compares digests itself, what came of that. `locality`: of tensors
    that cost less where they are read one after another, a word that they share.
    """

    storage: Reader
    locations: Mapping[tuple[str, str], Location]  # (part, fqn)
    verification_log: VerificationLog | None = None
    locality: Mapping[tuple[str, str], str] | None = None


def read_box(storage: Reader, location: Location, spec: TensorSpec, box: Box) -> bytes:
    """The box's bytes, row-major, of a tensor that lies whole in a file."""
    buffer = bytearray(box.numel * itemsize(spec.dtype))
    read_box_into(storage, location, spec, box, memoryview(buffer))
    return bytes(buffer)


def read_box_into(
    storage: Reader, location: Location, spec: TensorSpec, box: Box, buffer: memoryview
) -> None:
    """`read_box`, into memory of the box's size."""
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
    """What a source holds beside tensors. `groups`: param groups as {"names", "options"};
    `scalars`: fqn -> optimizer state that is not one tensor; `rank_extras`: how many ranks left
    one; `has_digests`: whether there are any of its tensors; `objects`: where
    `extra` and `rank_extra` hold the state of an object, as "extra:scheduler". `pads`: tensors that
    may be read into larger ones -> the dims along which those may be larger."""

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
    """Named tensors by part. `format`: what it is, for people."""

    @property
    def format(self) -> str: ...

    @property
    def parts(self) -> Sequence[str]: ...

    def names(self, part: str) -> Collection[str]:
        """The stored tensors of a part."""

    def aliases(self, part: str) -> Mapping[str, str]:
        """Other names of tied tensors -> stored names."""

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Dtype and shape of some tensors of a part. IncompleteError or IntegrityError where their
        bytes are not there.
        """

    def read(self, part: str, name: str, box: Box) -> bytes:
        """The box's bytes, row-major."""

    def catalog(self, keys: Collection[tuple[str, str]]) -> Catalog:
        """Where the wanted tensors lie. Same errors as `specs`."""

    def block_digests(
        self, keys: Collection[tuple[str, str]]
    ) -> Mapping[tuple[str, str], Sequence[int] | None]:
        """CRC64NVME of each 1 MiB block of some tensors, by (part, name); None where the source has
        none. FormatError for others.
        """

    def metadata(self) -> SourceMetadata:
        """What it holds beside tensors. IntegrityError or FormatError where that is damaged."""

    def rank_extra(self, rank: int) -> Any:
        """What rank `rank` left, None for nothing."""

    def close(self) -> None: ...

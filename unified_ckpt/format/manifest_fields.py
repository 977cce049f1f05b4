"""The types of the manifest's fields, checked when parsed: names, sizes, files, and how ranks held
tensors, which never grows with the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from math import prod
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from unified_ckpt.core.sharding.rank_mesh import MeshDim, RankMesh
from unified_ckpt.errors import FormatError
from unified_ckpt.format import digests
from unified_ckpt.format.index import check_file_name
from unified_ckpt.format.names import check_part_name, check_save_id

SHOWN_CHARS = 80  # of untrusted text, in errors
MAX_RANKS = 1 << 20  # limits the rank tables that are allocated from an untrusted manifest


def _checked_by(check: Callable[[str], None]) -> AfterValidator:
    """Return a validator for names that `check` accepts."""

    def validate(name: str) -> str:
        try:
            check(name)
        except FormatError as error:
            raise ValueError(str(error)) from None
        return name

    return AfterValidator(validate)


def _validate_utc(text: str) -> str:
    if datetime.fromisoformat(text).utcoffset() != timedelta(0):
        raise ValueError("expected a time in UTC, as in 2026-01-31T12:00:00+00:00")
    return text


FileName = Annotated[str, _checked_by(check_file_name)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Crc = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]  # 64 bits, lower-case hex
PartName = Annotated[str, _checked_by(check_part_name)]
SaveId = Annotated[str, _checked_by(check_save_id)]
UtcTime = Annotated[str, AfterValidator(_validate_utc)]


class Record(BaseModel):
    """One JSON object of the manifest."""

    # Unknown fields come from a newer minor version.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class ReplicaDifference(Record):
    """A tensor whose replicas differed when it was saved.

    `tensor`: "part:name". `copies`: how many different ones there were. `ranks`: the ranks of each,
    that of the first rank first; at most 8 copies, and 32 ranks of each. `max_difference`: the
    largest absolute difference of an element from the first rank's; None if it was not computed or
    is not finite.
    """

    tensor: str
    ranks: list[list[Rank]]
    copies: Size
    max_difference: Annotated[float, Field(ge=0)] | None = None


class FileRecord(Record):
    """A safetensors file of a part: its size, and the CRC of its prefix, JSON and padding."""

    nbytes: Size
    header_crc: Crc


class NamedFile(FileRecord):
    """A safetensors file of no part: it has no block digests, but a CRC of all its bytes."""

    file: FileName
    crc: Crc


class EntriesFile(NamedFile):
    """A file of packed values, the entries, one after another.

    `table_crc`: of all bytes before the entries. They include the CRC of each entry, so one entry
    can be verified alone.
    """

    table_crc: Crc

    def _check_count(self, count: int) -> None:
        if self.nbytes < 16 * count:
            raise ValueError(
                f"got {self.nbytes} bytes, expected at least {16 * count} for {count} entries"
            )


class RankExtraFile(EntriesFile):
    """The file of the per-rank extra state, with `world_size` entries."""

    world_size: Ranks

    @model_validator(mode="after")
    def _check_entries(self) -> RankExtraFile:
        self._check_count(self.world_size)
        return self


class RankValuesFile(EntriesFile):
    """The file of the values that differed between ranks.

    `world_size`: of the save. `paths`: of these values. `ranks`: for each entry, the ranks that
    held its values, as half-open intervals.
    """

    world_size: Ranks
    paths: list[Annotated[list[str], Field(min_length=1)]]
    ranks: list[list[Annotated[list[Size], Field(min_length=2, max_length=2)]]]

    @model_validator(mode="after")
    def _check_entries(self) -> RankValuesFile:
        self._check_count(len(self.ranks))
        return self


class DigestFile(Record):
    """The file of the block digests, with the CRC of all its bytes."""

    file: FileName
    algorithm: str
    block_nbytes: Annotated[int, Field(ge=1)]
    nbytes: Size
    crc: Crc

    @property
    def is_supported(self) -> bool:
        """Whether this library can compute digests of this kind."""
        return self.algorithm == digests.ALGORITHM and self.block_nbytes == digests.BLOCK_NBYTES

    def check_supported(self, folder: str) -> None:
        """Raise FormatError if this library cannot compute digests of this kind."""
        if not self.is_supported:
            raise FormatError(
                f"{folder}/{self.file}: got digests {self.algorithm[:SHOWN_CHARS]!r} "
                f"of {self.block_nbytes} bytes, "
                f"expected {digests.ALGORITHM!r} of {digests.BLOCK_NBYTES}; install a newer "
                'unified_ckpt, or load without verification: LoadOptions(verify="off")'
            )


class IndexFile(Record):
    """The index of a part, with the CRC of all its bytes."""

    nbytes: Size
    crc: Crc

    @classmethod
    def from_bytes(cls, body: bytes) -> IndexFile:
        """Return the record of an index with these bytes."""
        return cls(nbytes=len(body), crc=f"{digests.crc(body):016x}")


class EncodingRecord(Record):
    """How some tensors of a part are stored: see `encoded_tensors`.

    `row_lengths`: the last dim of each tensor whose packed rows fit several lengths.
    """

    name: str
    row_lengths: dict[str, Size] = {}


class RankSet(Record):
    """Ranks in row-major order: `first` + i * stride + j * stride …, for each (size, stride) of
    `grid`, outermost first. None if the grid is empty.
    """

    first: Rank
    grid: list[Annotated[list[int], Field(min_length=2, max_length=2)]]

    @model_validator(mode="after")
    def _check_grid(self) -> RankSet:
        if min((size for size, _ in self.grid), default=1) < 1 or (
            prod(size for size, _ in self.grid) > MAX_RANKS
        ):
            raise ValueError(f"expected 1 to {MAX_RANKS} ranks")
        return self

    def ranks(self) -> list[int]:
        """Return the ranks."""
        ranks = [self.first] if self.grid else []
        for size, stride in self.grid:
            ranks = [rank + i * stride for rank in ranks for i in range(size)]
        return ranks


class ShardDimRecord(Record):
    """One split of a tensor dim over `size` coordinates of the mesh dim `name`.

    The coordinate of mesh position p is p // `stride` % `size`. `sections` are split separately.
    `chunk_length`: elements per coordinate, if ranks pad their shards.
    """

    dim: Size
    size: Ranks
    stride: Annotated[int, Field(ge=1)]
    sections: Annotated[int, Field(ge=1)] | list[Size] = 1
    chunk_length: Size = 0
    name: str = ""


class ShardingRule(Record):
    """How ranks held some tensors: split by `dims`, outermost first; whole without any.

    `mesh_ranks`: the ranks by mesh position; empty if the position is the rank.
    """

    holders: RankSet
    mesh_ranks: RankSet
    dims: list[ShardDimRecord]


class ShardingRecords(Record):
    """How the ranks of the save held its tensors.

    `parts`: for the stored tensors of a part in the order of their names, runs of
    [index of the rule, number of tensors].
    """

    rules: list[ShardingRule]
    parts: dict[str, list[Annotated[list[Size], Field(min_length=2, max_length=2)]]]


class MeshDimRecord(Record):
    """One dim of a mesh of all ranks: the coordinate of a rank is rank // `stride` % `size`.

    `name`: empty if the mesh has no names.
    """

    name: str
    size: Ranks
    stride: Ranks


class RankMeshRecord(Record):
    """The mesh of all ranks, without dims of size 1; `dims` outermost first."""

    dims: list[MeshDimRecord]

    @model_validator(mode="after")
    def _check_dims(self) -> RankMeshRecord:
        if self.mesh().world > MAX_RANKS:
            raise ValueError(f"expected 1 to {MAX_RANKS} ranks")
        return self

    def mesh(self) -> RankMesh:
        """Return the mesh."""
        return RankMesh(tuple(MeshDim(dim.name, dim.size, dim.stride) for dim in self.dims))


def rank_mesh_record(mesh: RankMesh | None) -> RankMeshRecord | None:
    """Return the record of a mesh, None without one."""
    if mesh is None:
        return None
    dims = [MeshDimRecord(name=name, size=size, stride=stride) for name, size, stride in mesh.dims]
    return RankMeshRecord(dims=dims)

"""The manifest: the commit record of a checkpoint folder, written last.

A folder without a valid manifest is not a checkpoint. A folder whose manifest has the right CRC is
one, even if this version cannot read it: treating it as incomplete would delete data
(`has_valid_crc`).

A manifest grows with the tensors, never with the ranks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.format.manifest_fields import (
    SHOWN_CHARS,
    Crc,
    DigestFile,
    EncodingRecord,
    FileName,
    FileRecord,
    IndexFile,
    NamedFile,
    PartName,
    Rank,
    RankExtraFile,
    RankMeshRecord,
    Ranks,
    RankValuesFile,
    Record,
    ReplicaDifference,
    SaveId,
    ShardingRecords,
    Size,
    UtcTime,
)
from unified_ckpt.format.names import index_name

FORMAT_VERSION = "1.0"

_NO_CRC = "0" * 16  # stands for the digits of the manifest's own CRC while it is computed
_DIGITS = re.compile("[0-9a-f]{16}")
_MAX_SHOWN = 5


class Part(Record):
    """A part: its files, index and aliases.

    `index`: None for a part without files. `total_nbytes`: bytes of the stored tensors.
    `aliases`: name of a tied tensor -> name it is stored under. `encodings`: by the state that
    tensors hold of a parameter, such as "exp_avg"; "" in a part other than the optimizer.
    `exceptions`: the file of its outliers, elements that an encoding cannot hold.
    """

    files: dict[FileName, FileRecord]
    index: IndexFile | None = None
    total_nbytes: Size
    aliases: dict[str, str] = {}
    encodings: dict[str, EncodingRecord] = {}
    exceptions: NamedFile | None = None

    @model_validator(mode="after")
    def _check_record(self) -> Part:
        if (self.index is None) != (not self.files):
            raise ValueError("expected the record of an index if, and only if, the part has files")
        for alias, stored in self.aliases.items():
            if stored in self.aliases:
                raise ValueError(
                    f"alias {alias!r}: got {stored!r}, which is an alias too, "
                    "expected a stored tensor"
                )
        return self


class ParamGroup(Record):
    """One optimizer param group: parameter names, and hyperparameters as a tree of `codec`.

    `optimizer`: name of its class. `masters`: name of the master weights in its state.
    `state_types`: "Tensor" for states that are plain tensors of the local shards of DTensor
    parameters, "DTensor" for DTensors of plain parameters; by name.
    """

    names: list[str]
    options: Any
    optimizer: str | None = None
    masters: str | None = None
    state_types: dict[str, str] = {}


class OptimizerRecord(Record):
    """The optimizer's state that is not tensors; `scalars`: a tree of `codec` by parameter name."""

    groups: list[ParamGroup]
    scalars: Any = None


class NodeGroupRecord(Record):
    """The node group that wrote this folder: group `number` of `count`, with ranks `ranks`.

    `totals`: for each part of the whole save, its number of tensors and their bytes. `replicas`:
    numbers of the folders that have a copy in `replicas/`.
    """

    number: Rank
    count: Ranks
    ranks: list[Rank]
    world_size: Ranks
    totals: dict[str, Annotated[list[Size], Field(min_length=2, max_length=2)]] = {}
    replicas: list[Rank] = []

    @model_validator(mode="after")
    def _check_numbers(self) -> NodeGroupRecord:
        if max([self.number, *self.replicas]) >= self.count:
            raise ValueError(f"expected number and replicas below count, {self.count}")
        if max(self.ranks, default=0) >= self.world_size:
            raise ValueError(f"expected ranks below world_size, {self.world_size}")
        return self


class ConvertedFrom(Record):
    """The source of a conversion, and the results of its checks.

    `tensors`, `nbytes`, `digests`: by part. A digest is the CRC of the names, dtypes, shapes and
    block digests of all its tensors. `compared`: number of tensors with a second, equal copy in the
    source. `verified`: number of tensors whose digests in the source were checked.
    """

    format: str
    path: str
    save_id: str | None = None
    options: dict[str, Any] = {}
    tensors: dict[str, Size] = {}
    nbytes: dict[str, Size] = {}
    digests: dict[str, Crc] = {}
    compared: Size = 0
    verified: Size = 0
    notes: list[str] = []


class Manifest(Record):
    """The commit record of a checkpoint; `docs/format.md` defines each field.

    `created`: ISO 8601 in UTC. `seconds`: from call to commit. `metrics`: passed by the caller;
    retention ranks by them. `mesh`, `shardings`: informative, never needed to load tensors.
    `rank_mesh`: by which values of ranks are placed on another mesh; None if there is none.
    `omitted_parts`: parts of the saved state that were left out on purpose. `modules`: tree of the
    modules' own extra state, by name. `extra`: tree of the caller's extra state. `objects`: places
    in `extra` and `rank_extra` that hold an object's state. `attached`: files in the folder at the
    commit that the engine did not write. `replica_differences`: tensors that ranks did not hold
    alike, the first ones. `etags`: in a bucket, the ETag of each file; `url`: of the checkpoint
    there, which they are of.
    """

    format_version: str = FORMAT_VERSION
    save_id: SaveId
    step: Size | None = None
    created: UtcTime
    world_size: Ranks
    seconds: Annotated[float, Field(ge=0)] | None = None
    metrics: dict[str, float] = {}
    versions: dict[str, str] = {}
    mesh: dict[str, Any] = {}
    rank_mesh: RankMeshRecord | None = None
    shardings: ShardingRecords | None = None
    parts: dict[PartName, Part]
    omitted_parts: list[str] = []
    digests: DigestFile | None = None
    extra_file: NamedFile | None = None
    rank_extra: RankExtraFile | None = None
    rank_values: RankValuesFile | None = None
    node_group: NodeGroupRecord | None = None
    optimizer: OptimizerRecord | None = None
    modules: Any = None
    extra: Any = None
    objects: list[str] = []
    converted_from: ConvertedFrom | None = None
    attached: list[str] = []
    replica_differences: list[ReplicaDifference] = []
    etags: dict[str, str] = {}
    url: str = ""

    @model_validator(mode="after")
    def _check_record(self) -> Manifest:
        counts = Counter(self.files())
        duplicates = [file for file, count in counts.items() if count > 1]
        if duplicates:
            raise ValueError(f"got file {duplicates[0]!r} twice, expected one owner for each file")
        ranks = self.node_group or self.rank_extra
        if self.rank_mesh is not None and ranks is not None:
            world = self.rank_mesh.mesh().world
            if world != ranks.world_size:
                raise ValueError(f"got rank_mesh of {world} ranks, expected {ranks.world_size}")
        return self

    def at(self, url: str) -> Manifest:
        """Return the manifest as of this place: elsewhere, objects have other ETags."""
        return self if url == self.url else self.model_copy(update={"etags": {}, "url": ""})

    def files(self) -> list[str]:
        """Return every file of the checkpoint except the manifest."""
        return [file for file, _ in (*self.part_files(), *self.whole_files())]

    def part_files(self) -> list[tuple[str, FileRecord]]:
        """Return the files of tensors, with their records."""
        return [item for part in self.parts.values() for item in part.files.items()]

    def with_parts(self, names: Collection[str]) -> Manifest:
        """Return this manifest with only these parts."""
        return self.model_copy(update={"parts": {name: self.parts[name] for name in names}})

    def whole_files(self) -> list[tuple[str, IndexFile | NamedFile | DigestFile]]:
        """Return the files that have one CRC of all their bytes, with their records."""
        records = (*self.outlier_records().values(), *self.auxiliary_files())
        return [*self.indexes().items(), *((record.file, record) for record in records)]

    def indexes(self) -> dict[str, IndexFile]:
        """Return the indexes of the parts, by file name."""
        return {
            index_name(name): part.index
            for name, part in self.parts.items()
            if part.index is not None
        }

    def is_deleted(self, part: str, exists: Callable[[str], bool]) -> bool:
        """Return whether a part was deleted: neither its index nor any of its files exists.

        A part of which the folder has only shards is deleted with them.
        """
        for name in (part, part + SHARD_SUFFIX):
            if name in self.parts and self.parts[name].files:
                return not any(map(exists, (index_name(name), *self.parts[name].files)))
        return False

    def auxiliary_files(self) -> list[NamedFile | DigestFile]:
        """Return the files of no part, which have one CRC of all their bytes."""
        records = (self.digests, self.extra_file, self.rank_extra, self.rank_values)
        return [record for record in records if record is not None]

    def outlier_records(self) -> dict[str, NamedFile]:
        """Return the outliers files of the parts, by part."""
        return {name: part.exceptions for name, part in self.parts.items() if part.exceptions}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return JSON with one line per field, the last of which is its own CRC.

    Raises FormatError for a tree that is not from `codec.encode`.
    """
    try:
        fields = [
            f'"{name}": {json.dumps(value, allow_nan=False)}'
            for name, value in manifest.model_dump().items()
            if value or name not in ("etags", "url")  # files on a disk have none
        ]
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"manifest: a value cannot be stored as JSON: {error}") from None
    return add_crc(("{\n" + ",\n".join([*fields, f'"crc": "{_NO_CRC}"']) + "\n}\n").encode())


def add_crc(encoded: bytes) -> bytes:
    """Return the JSON of a manifest whose last field is a `crc` of zeros, with the CRC inserted."""
    before, _, after = encoded.rpartition(_NO_CRC.encode())
    return before + f"{digests.crc(encoded):016x}".encode() + after


def parse_manifest(encoded: bytes, *, file: str) -> Manifest:
    """Parse a manifest of this major format version.

    Raises IntegrityError if its CRC is wrong, and FormatError, naming `file` and the field, for
    anything else that is invalid.
    """
    content = _parse_with_crc(encoded, file)
    _check_version(content, file)
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise FormatError(f"{file}: {_validation_text(error)}") from None


def has_valid_crc(encoded: bytes) -> bool:
    """Return whether these are the bytes of a manifest as some version of the format wrote it.

    Its folder is a checkpoint even if `parse_manifest` refuses it, and must never be deleted or
    replaced as an incomplete one.
    """
    try:
        _parse_with_crc(encoded, "")
    except (FormatError, IntegrityError):
        return False
    return True


def _parse_with_crc(encoded: bytes, file: str) -> dict[str, Any]:
    """Parse a manifest of any version: the CRC comes first, since damage may be in the version."""
    content = parse_json(encoded, file=file)
    if not isinstance(content, dict):
        raise FormatError(f"{file}: got a JSON {type(content).__name__}, expected an object")
    recorded = content.get("crc")
    if not isinstance(recorded, str) or not _DIGITS.fullmatch(recorded):
        raise FormatError(
            f"{file}: got crc {ascii(recorded)[:SHOWN_CHARS]}, expected 16 lower-case hex digits"
        )
    before, _, after = encoded.rpartition(recorded.encode())  # crc is the last field
    computed = f"{digests.crc(before + _NO_CRC.encode() + after):016x}"
    if computed != recorded:
        raise IntegrityError(
            f"{file}: is not the file that was written: got CRC {computed}, expected {recorded}; "
            "copy the whole folder from an intact copy"
        )
    return content


def _check_version(content: dict[str, Any], file: str) -> None:
    """Refuse the folder of a newer major version, by name. Every older one is read."""
    version = content.get("format_version")
    match = re.fullmatch(r"([0-9]{1,9})\.[0-9]{1,9}", version) if isinstance(version, str) else None
    newest = int(FORMAT_VERSION.partition(".")[0])
    if match is None or int(match[1]) < 1:
        raise FormatError(
            f"{file}: got format_version {version!r}, expected a version like {FORMAT_VERSION!r}"
        )
    if int(match[1]) > newest:
        versions = content.get("versions")
        writer = versions.get("unified-ckpt") if isinstance(versions, dict) else None
        writer_text = f", unified-ckpt {writer!s:.40}" if writer else ""
        raise FormatError(
            f"{file}: got format version {version}, expected at most {newest}.x: written by a "
            f"newer version{writer_text}; upgrade unified-ckpt"
        )


def _validation_text(error: ValidationError) -> str:
    reasons = []
    for item in error.errors(include_url=False, include_context=False)[:_MAX_SHOWN]:
        field = ".".join(str(step) for step in item["loc"]) or "manifest"
        value_text = (
            "" if item["type"] == "missing" else f"; got {ascii(item['input'])[:SHOWN_CHARS]}"
        )
        reasons.append(f"{field}: {item['msg'].removeprefix('Value error, ')}{value_text}")
    more_count = error.error_count() - len(reasons)
    return "; ".join(reasons) + (f"; and {more_count} more" if more_count > 0 else "")
